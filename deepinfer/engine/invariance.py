"""Where a request's bits could depend on other requests, and what is therefore refused with batch_invariant
(spec/engine.md 8; docs/determinism.md lists the operators).

Each question has the answer None, or why not, with the nearest setting that works. What is allowed: prefix hits in
exact mode, which give the bits of a cold run; preemption, because a sequence that is computed again or comes back from
host memory is the same to the bit; any number of verified drafts, because every request is reproducible then
(speculation/verify.py).
"""

from __future__ import annotations

import torch

from deepinfer.config import BLOCK_SIZE, EngineConfig, blocks_for
from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig


def operators_problem(device: torch.device, dtype: str) -> str | None:
    """Whether operators compute each row alone here, in a fixed order: the CPU kernels do, and those of a GPU can."""
    if device.type == "cpu" and dtype == "float32":
        if select.cpu_twins(device, torch.float32):
            return None
        return f"the CPU kernels are missing ({select.explain(device, torch.float32)}); use batch_invariant=False"
    if select.gpu_twins(device, getattr(torch, dtype)):
        return None
    # plain PyTorch chooses the blocking of a matrix product by its number of rows
    nearest = "device='cpu' with dtype='float32'"
    if select.gpu_twins(device, torch.bfloat16):
        nearest = f"dtype='bfloat16', whose kernels do not, {nearest}"
    return (
        f"matrix products in {dtype} on {device.type} run in plain PyTorch and round differently for other numbers of "
        f"rows; use {nearest}, or batch_invariant=False"
    )


def sizes_problem(model: ModelConfig, device: torch.device, dtype: str) -> str | None:
    """Whether the kernels serve all operators of this model: sizes that they do not know run in plain PyTorch."""
    on_gpu = select.gpu_twins(device, getattr(torch, dtype))
    wrong = _wrong_on_gpu(model) if on_gpu else _wrong_on_cpu(model)
    if wrong is None:
        return None
    return (
        f"the model has {wrong}: plain PyTorch rounds differently for other numbers of rows; use batch_invariant=False"
    )


def _wrong_on_cpu(model: ModelConfig) -> str | None:
    if model.hc_mult != 4:
        return f"hc_mult = {model.hc_mult}, and the CPU kernels mix 4 copies"
    if model.num_attention_heads % 4:
        return f"num_attention_heads = {model.num_attention_heads}, and the CPU kernels take 4 heads at a time"
    return None


def _wrong_on_gpu(model: ModelConfig) -> str | None:
    heads, size, width = model.num_attention_heads, model.head_dim, model.hidden_size
    if not select.mixes(model.hc_mult, width):
        return f"hc_mult = {model.hc_mult} and hidden_size = {width}, and the GPU kernels mix 4 copies of 64s"
    if not select.shuffles_experts(width):
        return f"hidden_size = {width}, and the GPU kernels of the experts take multiples of 128"
    if not select.splits_heads(size, model.qk_rope_head_dim):
        return f"head_dim = {size} and qk_rope_head_dim = {model.qk_rope_head_dim}, which no GPU kernel rotates"
    if not select.attends(heads, size):
        return (
            f"num_attention_heads = {heads} and head_dim = {size}, and the GPU kernels take 8, 16, 32 or 64 heads of "
            "128, 256 or 512"
        )
    return None


def records_problem(kv_format: str, device: torch.device, dtype: str) -> str | None:
    """Whether the kernels read these cache records: others are attended to in plain PyTorch."""
    if not select.gpu_twins(device, getattr(torch, dtype)) or kv_format in ("hopper", "packed"):
        return None
    return f"the GPU kernels do not read {kv_format} records; use kv_format 'hopper', or batch_invariant=False"


def replay_problem(prefix_caching: str) -> str | None:
    """Whether what others have left in the cache changes a bit."""
    if prefix_caching != "bounded":
        return None
    return (
        "a hit of the prefix cache without a stored window is an approximation with prefix_mode 'bounded'; use "
        "prefix_mode='exact' or enable_prefix_caching=False"
    )


def truncation_problem(config: EngineConfig) -> str | None:
    """Whether a prompt keeps the same rows whatever happens.

    Hot or cold it does: hits end below them (engine/prefix_planner.py). A sequence that gave its blocks up and is
    computed again counts its output as prompt, and keeps other rows: so there must be blocks for everybody.
    """
    needed = config.max_num_seqs * blocks_for(config.max_model_len)
    if not config.truncation or config.num_blocks >= needed:
        return None
    length = config.num_blocks // config.max_num_seqs * BLOCK_SIZE
    shorter = f"max_model_len <= {length}, " if length >= 2 else ""
    return (
        f'"compact" with batch_invariant needs blocks for {config.max_num_seqs} sequences of {config.max_model_len} '
        f"tokens, {needed}, and there are {config.num_blocks}: a preempted sequence that is computed again would keep "
        f'other rows; use {shorter}fewer max_num_seqs, or yoco_truncation "off"'
    )
