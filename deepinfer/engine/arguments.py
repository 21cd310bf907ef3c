"""The arguments of `LLM` and of an engine process: what each means, and its default, in one place.

`Arguments` names them for checkers and editors where they pass through as keywords; `EngineArguments` holds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar


class Arguments(TypedDict, total=False):
    """Keywords, as in `EngineArguments`; a test holds the two equal."""

    device: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    num_blocks: int | None
    wide_outputs: bool | None
    expert_cache: str | None
    enable_prefix_caching: bool
    prefix_mode: str
    kv_format: str
    yoco_truncation: str | None
    yoco_keep_tokens: int | None
    overlap: bool | None
    queue_policy: str
    window_store_bytes: int | None
    offload_bytes: int | None
    nextn: int | None
    mtp_varlen: bool | None
    batch_invariant: bool | None
    seed: int | None
    ep: int
    dp: int | None
    cp: int


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """What may be asked of an engine. Nothing is checked here: engine/settings.py resolves it against the environment
    and what is built, engine/build.py against the model and the memory."""

    device: str = "auto"
    """auto (DEEPINFER_ACCELERATOR, or a GPU if there is one), cpu, cuda."""
    dtype: str = "auto"
    """auto (float32 on a CPU, else bfloat16), float32 (weights widened, nothing rounded), bfloat16 (the release's
    numerics)."""

    max_model_len: int | None = None
    """Longest prompt + output in tokens; None = as long as model and memory allow."""
    max_num_seqs: int = 32
    """Sequences under way at once."""
    max_num_batched_tokens: int | None = None
    """Tokens computed per step; None = by the device."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory for weights and cache together."""
    num_blocks: int | None = None
    """Cache blocks of 128 tokens; None = what fits."""
    wide_outputs: bool | None = None
    """Keep the first output projection of every layer in bfloat16 beside FP8 on a GPU: steps of 96 rows and more are
    faster (2 % at 384), for 64 MiB a layer of the released model (2.7 GiB). None = where so many rows may come and it
    takes at most a sixteenth of the memory that is left for the cache; True = also where it takes more, an error where
    it does not fit; False = never. Never read with batch_invariant."""
    expert_cache: str | None = None
    """Directory that keeps the experts in the order of the GPU kernels, so that the next load need not lay them out: as
    many bytes as the experts have; None = nothing is kept."""

    enable_prefix_caching: bool = True
    """Compute what prompts begin with in common once."""
    prefix_mode: str = "exact"
    """ "exact" gives the tokens of a cold run; "bounded" recomputes less after a hit without a stored window and is an
    approximation."""
    kv_format: str = "auto"
    """How cache records are stored: float32, bfloat16, packed, hopper (packed, for the kernels of a Hopper GPU); auto
    rounds nothing that the dtype has not rounded."""
    yoco_truncation: str | None = None
    """ "compact" runs the layers after the last KV source on a prompt's last yoco_keep_tokens only, an approximation;
    "off"; None = DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE."""
    yoco_keep_tokens: int | None = None
    """None = DEEPINFER_YOCO_PREFILL_KEEP_TOKENS."""
    overlap: bool | None = None
    """Schedule the next step while one runs; None = on a GPU."""
    queue_policy: str = "first-come"
    """ "first-come", or "fair" between tenants."""
    window_store_bytes: int | None = None
    """Host memory for windows of cached prefixes; None = a share, 0 = they are computed again."""
    offload_bytes: int | None = None
    """Host memory for preempted sequences; None = a share (none on a CPU), 0 = they are computed again."""

    nextn: int | None = None
    """Tokens drafted and verified per step at most, up to the checkpoint's block size; 0 = no drafting. None =
    DEEPINFER_USE_NEXTN_DECODE, as far as the checkpoint has draft stages."""
    mtp_varlen: bool | None = None
    """How many drafts a step verifies follows from their confidence and the measured cost of a step; False = all of
    them. None = DEEPINFER_ENABLE_MTP_VARLEN."""
    batch_invariant: bool | None = None
    """Every request gives the same bits alone and in any company; refused where an operator cannot promise it. None =
    DEEPINFER_BATCH_INVARIANT."""
    seed: int | None = 0
    """Seed of the seeds that requests without seq_seed get, so that a script repeats itself; None = random ones, whose
    requests accept more drafts (rejection sampling: the distribution stays exact)."""

    ep: int = 1
    """Ranks that share the experts; only 1 is built."""
    dp: int | None = None
    """Data-parallel ranks; only 1 is built."""
    cp: int = 1
    """Ranks that split a long prompt; only 1 is built."""


Function = TypeVar("Function", bound=Callable[..., Any])


def shows_arguments(function: Function) -> Function:
    """For a function with `**arguments: Unpack[Arguments]`: help() shows them by name, with their defaults."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(EngineArguments)
    ]
    own.sort(key=lambda p: p.kind)
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return function
