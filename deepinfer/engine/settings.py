"""Which settings are in force. A wish that cannot be had is refused with the nearest working one, or stated as off."""

from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.config import BLOCK_SIZE, EngineConfig
from deepinfer.env import VARIABLES, read_environment
from deepinfer.kernels import select
from deepinfer.kernels.device import resolve_device

DTYPES = ("float32", "bfloat16")
# Enough rows to fill a matrix unit, few enough that a step's activations stay small beside the weights.
DEFAULT_STEP_TOKENS = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the caller asked for, resolved."""

    device: torch.device
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: tuple[str, ...]
    """One line for every wish that is part of the interface and not in force."""

    def describe(self, path: Path, config: EngineConfig) -> str:
        """The lines printed at start."""
        lines = [
            f"deepinfer: {path}",
            f"  device {self.device}, dtype {self.dtype}, {torch.get_num_threads()} CPU threads",
            f"  {select.explain(self.device, getattr(torch, self.dtype))}",
            f"  context {config.max_model_len} tokens, up to {config.max_num_seqs} sequences and "
            f"{config.max_num_batched_tokens} tokens per step, {config.num_blocks} cache blocks of {BLOCK_SIZE} tokens",
            f"  seeds of requests without one: {'random' if config.seed is None else f'drawn from seed {config.seed}'}",
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


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
) -> Settings:
    """Resolves the arguments of LLM against the environment and what is built. ValueError names the argument."""
    environment = read_environment()
    for name, value in (("ep", ep), ("dp", 1 if dp is None else dp), ("cp", cp)):
        if value != 1:
            raise ValueError(f"{name}: {value!r} needs several ranks, which are not built yet; use {name}=1")
    if environment.world_size != 1:
        raise ValueError(f"WORLD_SIZE={environment.world_size}: several ranks are not built yet; run one process")
    if batch_invariant or (batch_invariant is None and environment.batch_invariant):
        # torch's CPU and CUDA matrix products choose their blocking by the number of rows
        raise ValueError(
            "batch_invariant: not every path of this version promises bit-equal logits across batch sizes; use "
            "batch_invariant=False (float32 on a CPU with its kernels is bit-equal without being asked)"
        )
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization: must be above 0 and at most 1, got {gpu_memory_utilization!r}")
    wished_drafts = environment.nextn_decode if nextn is None else nextn
    if not isinstance(wished_drafts, int) or isinstance(wished_drafts, bool) or wished_drafts < 0:
        raise ValueError(f"nextn: must be a whole number >= 0, got {nextn!r}")
    notes = []
    if wished_drafts:
        notes.append(f"nextn 0 instead of {wished_drafts}: drafting is not built yet")
    if enable_prefix_caching:
        notes.append("prefix caching off: it is not built yet")
    idle = [v for v in VARIABLES if v.planned and getattr(environment, v.field) != v.default]
    if idle:
        notes.append(f"without effect, not built yet: {', '.join(v.name for v in idle)}")
    if environment.unknown:
        notes.append(f"environment variables without a meaning: {', '.join(environment.unknown)}")

    where = resolve_device(environment.accelerator if device == "auto" else device)
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else "bfloat16"  # a CPU gains nothing from imitating the rounding
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(DEFAULT_STEP_TOKENS[where.type], max_num_seqs)
    return Settings(
        device=where,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        notes=tuple(notes),
    )
