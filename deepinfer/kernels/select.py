"""Picks the implementation of an operation by device, dtype and shape. The reference is always there and always right.

The CPU twins (`kernels/cpu`) serve float32 on a CPU where a C++ compiler is found; everything else runs the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.cpu.build import library
from deepinfer.kernels.cpu.linear import linear_packed
from deepinfer.kernels.reference import (
    attention,
    compressor,
    engram,
    experts,
    hyper,
    indexer,
    norm,
    rope,
    router,
    selection,
)
from deepinfer.kernels.reference.linear import linear, quantized_linear
from deepinfer.kernels.weights import Experts, PackedExperts, PackedWeight, Weight

_reference_only = False


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, every operation runs its reference: for comparisons."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def cpu_twins(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether float32 CPU kernels serve this device and dtype. The first question may compile them."""
    return device.type == "cpu" and dtype == torch.float32 and not _reference_only and library().handle is not None


def explain(device: torch.device, dtype: torch.dtype) -> str:
    """One line for people: what runs here, and why not something faster."""
    if device.type != "cpu":
        return f"reference operations (plain PyTorch) on {device}: GPU kernels are not built yet"
    if dtype != torch.float32:
        return f"reference operations (plain PyTorch): the CPU kernels serve float32, not {dtype}"
    return library().explanation if cpu_twins(device, dtype) else f"reference operations: {library().explanation}"


def _fast(x: Tensor, multiple: int = 8) -> bool:
    return x.shape[-1] % multiple == 0 and cpu_twins(x.device, x.dtype)


def project(x: Tensor, weight: Weight, *, rounded: bool) -> Tensor:
    """x [..., K] times weight [N, K]^T. rounded: the official numerics round x to FP8 first (not in float32)."""
    if isinstance(weight, PackedWeight) and x.dim() == 2 and cpu_twins(x.device, x.dtype):
        return linear_packed(x, weight.packed, weight.rows)
    return (quantized_linear if rounded else linear)(x, weight.dense())


def moe(x: Tensor, ids: Tensor, weights: Tensor, bank: Experts, limit: float) -> Tensor:
    """Sum of the routed experts' outputs and the shared expert's: x [N, D] -> float32 [N, D]."""
    if isinstance(bank, PackedExperts):
        return cpu.experts(x, ids, weights, bank.up, bank.down, limit)

    def dense(expert: tuple[Weight, Weight, Weight]) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = expert
        return w1.dense(), w3.dense(), w2.dense()

    routed = experts.routed_experts(x, ids, weights, lambda number: dense(bank.routed[number]), limit)
    return routed + experts.expert_forward(x, *dense(bank.shared), limit, None).float()


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    fast = _fast(q, 16) and q.shape[1] % 4 == 0
    run = cpu.sparse_attention if fast else attention.sparse_attention
    return run(q, window_pool, window_indices, kv_pool, kv_indices, sink, scale)


def index_scores(queries: Tensor, pool: Tensor, key_rows: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """queries [B, T, H, D], pool [rows, D], key_rows int64 [B, M], weights [B, T, H], visible int64 [B, T] -> float32
    [B, T, M], -inf where not visible."""
    if _fast(queries):
        return cpu.index_scores(queries, pool, key_rows, weights, visible)
    scores = indexer.index_scores(queries, pool[key_rows], weights)
    hidden = torch.arange(key_rows.shape[1], device=visible.device) >= visible.unsqueeze(-1)
    return scores.masked_fill(hidden, float("-inf"))


def hyper_coefficients(
    stream: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """stream [N, copies, D], fn transposed [copies * D, (2 + copies) * copies] -> pre, post, comb."""
    copies = stream.shape[1]
    if copies == 4 and _fast(stream):
        return cpu.hyper_coefficients(stream, fn, scale, base, iterations=iterations, eps=eps, norm_eps=norm_eps)
    mixes = hyper.hyper_mixes(stream, fn.t(), norm_eps)
    return hyper.hyper_coefficients(mixes, scale, base, copies=copies, iterations=iterations, eps=eps)


def hyper_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(collapse(stream, pre)) * weight: [N, copies, D] -> [N, D]."""
    if stream.shape[1] == 4 and _fast(stream):
        return cpu.hyper_collapse_norm(stream, pre, weight, eps)
    return norm.rms_norm(hyper.hyper_collapse(stream, pre), weight, eps)


def hyper_expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    run = cpu.hyper_expand if stream.shape[1] == 4 and _fast(stream) else hyper.hyper_expand
    return run(stream, y, post, comb)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (cpu.rms_norm if _fast(x) else norm.rms_norm)(x, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    return (cpu.apply_rope if _fast(x) else rope.apply_rope)(x, cos, sin, inverse=inverse)


def engram_inject(stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float) -> Tensor:
    """stream [N, copies, D], kv [N, (copies + 1) * D] (keys, then the value), weight [copies, D], dead bool [N] or None
    -> the stream with the gated value added to every copy of every live token."""
    copies = stream.shape[1]
    if copies == 4 and _fast(stream):
        return cpu.engram_inject(stream, kv, weight, dead, eps)
    keys, value = kv.unflatten(1, (copies + 1, -1)).split((copies, 1), dim=1)
    gate = engram.engram_gate(stream, keys, weight, eps)
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(1), 0.0)
    return engram.engram_inject(stream, gate, value.squeeze(1))


def compress_pairs(first: Tensor, second: Tensor, norm_weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32 and _fast(first):
        return cpu.compress_pairs(first, second, norm_weight, eps)
    return compressor.compress_pairs(first, second, norm_weight, eps, dtype)


def route(
    logits: Tensor, bias: Tensor, *, topk: int, scale: float, normalize: bool, gate_temp: float
) -> tuple[Tensor, Tensor, Tensor]:
    run = cpu.route if cpu_twins(logits.device, logits.dtype) else router.route
    return run(logits, bias, topk=topk, scale=scale, normalize=normalize, gate_temp=gate_temp)


def top_entries(scores: Tensor, k: int) -> Tensor:
    """scores float32 [N, M], -inf = not selectable -> int64 [N, k] the k best positions, ascending, -1 = empty."""
    run = cpu.top_entries if cpu_twins(scores.device, scores.dtype) else selection.top_entries
    return run(scores, k)
