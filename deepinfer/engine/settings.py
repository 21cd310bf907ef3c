"""Which settings are in force. A wish that cannot be had is refused with the nearest working one, or stated as off."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.cache.formats import block_bytes, format_problem, window_entry_bytes
from deepinfer.cache.prefix import ReplayPolicy
from deepinfer.config import (
    BLOCK_SIZE,
    KV_FORMATS,
    PREFIX_MODES,
    QUEUE_POLICIES,
    VERIFY_ROWS,
    EngineConfig,
    check_whole_number,
)
from deepinfer.env import VARIABLES, read_environment
from deepinfer.kernels import select
from deepinfer.kernels.device import resolve_device
from deepinfer.model.config import ModelConfig

DTYPES = ("float32", "bfloat16")
TRUNCATION_MODES = ("compact", "off")
# Enough rows to fill a matrix unit, few enough that a step's activations stay small beside the weights.
DEFAULT_STEP_TOKENS = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the caller asked for, resolved as far as that is possible without the model."""

    device: torch.device
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_format: str
    prefix_caching: str
    """"off", "exact" or "bounded"."""
    truncation: bool
    keep_tokens: int
    overlap: bool
    queue_policy: str
    window_store_bytes: int | None
    """None = a share of host memory."""
    offload_bytes: int | None
    logging_interval: int
    """Steps between two progress lines, 0 = none."""
    notes: tuple[str, ...]
    """One line for every wish that is part of the interface and not in force."""

    def describe(self, path: Path, model: ModelConfig, config: EngineConfig) -> str:
        """The lines printed at start: what is in force, with the numbers that follow from model and memory."""
        lines = [
            f"deepinfer: {path}",
            f"  device {self.device}, dtype {self.dtype}, {torch.get_num_threads()} CPU threads",
            f"  {select.explain(self.device, getattr(torch, self.dtype))}",
            f"  context {config.max_model_len} tokens, up to {config.max_num_seqs} sequences and "
            f"{config.max_num_batched_tokens} tokens per step, {config.num_blocks} cache blocks of {BLOCK_SIZE} tokens",
            f"  cache records {config.kv_format}, {block_bytes(model, config.kv_format):,} bytes per block",
            f"  {_describe_prefix_cache(model, config)}",
            "  every token of a prompt runs through every layer"
            if not config.truncation
            else f"  decoder truncation: layers after the last KV source run on a prompt's last {config.keep_tokens} "
            "tokens, an approximation",
            f"  {'overlapped' if config.overlap else 'plain'} loop, queue {config.queue_policy}, "
            f"{_describe_offload(config)}",
            f"  seeds of requests without one: {'random' if config.seed is None else f'drawn from seed {config.seed}'}",
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _describe_prefix_cache(model: ModelConfig, config: EngineConfig) -> str:
    if config.prefix_caching == "off":
        return "prefix caching off"
    replay = ReplayPolicy(config.prefix_caching, model.sliding_window, model.num_hidden_layers).replay_tokens
    line = f"prefix caching {config.prefix_caching}, a hit without a stored window computes {replay} tokens again"
    if config.prefix_caching == "bounded":
        line += ", an approximation"
    if not config.window_entries:
        return f"{line}; no windows kept"
    size = config.window_entries * window_entry_bytes(model, config.kv_format)
    return f"{line}; up to {config.window_entries} windows kept in {size / 2**20:,.1f} MiB of host memory"


def _describe_offload(config: EngineConfig) -> str:
    if not config.offload_bytes:
        return "preempted sequences are computed again"
    return (
        f"preempted sequences of {config.offload_tokens} tokens or more go to {config.offload_bytes / 2**20:,.1f} MiB "
        "of host memory, shorter ones are computed again"
    )


def check_sizes(max_num_seqs: int, max_model_len: int | None, num_blocks: int | None) -> None:
    """Raises ValueError naming the argument: these are checked before a model is loaded for nothing."""
    check_whole_number("max_num_seqs", max_num_seqs)
    for name, size in (("max_model_len", max_model_len), ("num_blocks", num_blocks)):
        if size is not None:
            check_whole_number(name, size)


def resolve_settings(
    *,
    device: str,
    dtype: str,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    gpu_memory_utilization: float,
    ep: int,
    dp: int | None,
    cp: int,
    nextn: int | None,
    enable_prefix_caching: bool,
    batch_invariant: bool | None,
    prefix_mode: str = "exact",
    kv_format: str = "auto",
    yoco_truncation: str | None = None,
    yoco_keep_tokens: int | None = None,
    overlap: bool | None = None,
    queue_policy: str = "first-come",
    window_store_bytes: int | None = None,
    offload_bytes: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Resolves the arguments of LLM against the environment and what is built. ValueError names the argument."""
    environment = read_environment(environ)
    for name, value in (("ep", ep), ("dp", 1 if dp is None else dp), ("cp", cp)):
        if value != 1:
            raise ValueError(f"{name}: {value!r} needs several ranks, which are not built yet; use {name}=1")
    if environment.world_size != 1:
        raise ValueError(f"WORLD_SIZE={environment.world_size}: several ranks are not built yet; run one process")
    if batch_invariant or (batch_invariant is None and environment.batch_invariant):
        # torch's CPU and CUDA matrix products choose their blocking by the number of rows
        asked, way_out = (
            ("batch_invariant", "use batch_invariant=False")
            if batch_invariant
            else ("DEEPINFER_BATCH_INVARIANT", "set it to 0 or unset it, or pass batch_invariant=False")
        )
        raise ValueError(
            f"{asked}: not every path of this version promises bit-equal logits across batch sizes; {way_out} (float32 "
            "on a CPU with its kernels is bit-equal without being asked)"
        )
    if (
        not isinstance(gpu_memory_utilization, (int, float))
        or isinstance(gpu_memory_utilization, bool)
        or not 0 < gpu_memory_utilization <= 1
    ):
        raise ValueError(
            f"gpu_memory_utilization: must be a number above 0 and at most 1, got {gpu_memory_utilization!r}"
        )
    if max_num_batched_tokens is not None:
        check_whole_number("max_num_batched_tokens", max_num_batched_tokens)
    if yoco_keep_tokens is not None:
        check_whole_number("yoco_keep_tokens", yoco_keep_tokens)
    wished_drafts = environment.nextn_decode if nextn is None else nextn
    if not isinstance(wished_drafts, int) or isinstance(wished_drafts, bool) or wished_drafts < 0:
        raise ValueError(f"nextn: must be a whole number >= 0, got {nextn!r}")
    if prefix_mode == "off":
        raise ValueError("prefix_mode: how cached prefixes are used; to use none, say enable_prefix_caching=False")
    _check_word("prefix_mode", prefix_mode, tuple(mode for mode in PREFIX_MODES if mode != "off"))
    _check_word("queue_policy", queue_policy, QUEUE_POLICIES)
    _check_switch("enable_prefix_caching", enable_prefix_caching)
    if overlap is not None:
        _check_switch("overlap", overlap)
    for name, size in (("window_store_bytes", window_store_bytes), ("offload_bytes", offload_bytes)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise ValueError(f"{name}: must be a whole number of bytes >= 0, or None for a share, got {size!r}")
    truncation = environment.yoco_truncation_mode if yoco_truncation is None else yoco_truncation
    _check_word("yoco_truncation", truncation, TRUNCATION_MODES)
    notes = []
    if truncation == "off" and yoco_keep_tokens is not None:
        notes.append(f'yoco_keep_tokens {yoco_keep_tokens} without effect: yoco_truncation is "off"')
    if wished_drafts:
        notes.append(f"nextn 0 instead of {wished_drafts}: drafting is not built yet")
    idle = [v for v in VARIABLES if v.planned and getattr(environment, v.field) != v.default]
    if idle:
        notes.append(f"without effect, not built yet: {', '.join(v.name for v in idle)}")
    if environment.unknown:
        notes.append(f"environment variables without a meaning: {', '.join(environment.unknown)}")

    where = resolve_device(environment.accelerator if device == "auto" else device)
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else "bfloat16"  # a CPU gains nothing from imitating the rounding
    _check_word("dtype", dtype, DTYPES, "auto")
    if kv_format == "auto":
        kv_format = "packed" if dtype == "bfloat16" else "float32"  # in both cases nothing more is rounded
    _check_word("kv_format", kv_format, KV_FORMATS, "auto")
    problem = format_problem(kv_format, getattr(torch, dtype))
    if problem is not None:
        raise ValueError(problem)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(DEFAULT_STEP_TOKENS[where.type], max_num_seqs)
    return Settings(
        device=where,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_format=kv_format,
        prefix_caching=prefix_mode if enable_prefix_caching else "off",
        truncation=truncation == "compact",
        keep_tokens=environment.yoco_keep_tokens if yoco_keep_tokens is None else yoco_keep_tokens,
        # a second thread for the host's part pays where the device is another chip
        overlap=where.type != "cpu" if overlap is None else overlap,
        queue_policy=queue_policy,
        window_store_bytes=window_store_bytes,
        offload_bytes=offload_bytes,
        logging_interval=environment.logging_interval_step,
        notes=tuple(notes),
    )


def check_keep_tokens(keep_tokens: int, model: ModelConfig) -> None:
    """ValueError unless truncation keeps enough rows to fill a window and one verify step, and leaves some out of the
    longest prompt."""
    least = model.sliding_window + VERIFY_ROWS
    if not isinstance(keep_tokens, int) or isinstance(keep_tokens, bool) or keep_tokens < least:
        raise ValueError(
            f"yoco_keep_tokens: must be a whole number >= {least} (window {model.sliding_window} + {VERIFY_ROWS} rows "
            f"of a verify step), got {keep_tokens!r}"
        )
    if keep_tokens > model.max_position_embeddings:
        raise ValueError(
            f"yoco_keep_tokens: {keep_tokens} is more than the model's {model.max_position_embeddings} positions, so "
            f'nothing would ever be left out; use at most that, or yoco_truncation "off"'
        )


def check_seed(seed: object) -> None:
    """ValueError unless it is a seed, or None for randomness."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 64):
        raise ValueError(f"seed: must be a whole number from 0 to 2**64 - 1, or None for randomness, got {seed!r}")


def _check_word(name: str, value: object, known: tuple[str, ...], *more: str) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join((*more, *known))}")


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be True or False, got {value!r}")
