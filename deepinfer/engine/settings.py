"""Which settings are in force. A wish that cannot be had is refused with the nearest working one, or stated as off."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.invariance import operators_problem, records_problem, replay_problem
from deepinfer.env import VARIABLES, Environment, read_environment
from deepinfer.kernels import select
from deepinfer.kernels.device import resolve_device
from deepinfer.model.config import ModelConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
DTYPES = ("float32", "bfloat16")
TRUNCATION_MODES = ("compact", "off")
# Enough rows to fill a matrix unit, few enough that a step's activations stay small beside the weights.
DEFAULT_STEP_TOKENS = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the caller asked for, resolved as far as that is possible without the model."""

    device: torch.device
    dtype: str
    max_model_len: int | None
    """None = what model and memory allow."""
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    num_blocks: int | None
    """None = what fits."""
    wide_outputs: bool | None
    """None = where it pays and there is room."""
    expert_cache: str | None
    """Directory; None where nothing is kept there, also because no GPU kernels run."""
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
    nextn: int
    """Drafts wished for; engine/drafting.py says how many the checkpoint gives."""
    nextn_asked: bool
    """By the caller: then what cannot be had is an error, and not a note."""
    varlen: bool
    batch_invariant: bool
    seed: int | None
    logging_interval: int
    """Steps between two progress lines, 0 = none."""
    notes: tuple[str, ...]
    """One line for every wish that is part of the interface and not in force."""

    def warn(self) -> None:
        """The notes as warnings in the log: for who does not print `describe`, for a wish that is not in force is no
        detail."""
        for note in self.notes:
            logger.warning("%s", note)

    def describe(self, path: Path, model: ModelConfig, config: EngineConfig, drafting: tuple[str, ...] = ()) -> str:
        """The lines printed at start: what is in force, with the numbers that follow from model and memory. drafting:
        the lines of engine/drafting.py."""
        lines = [
            f"deepinfer: {path}",
            f"  device {self.device}, dtype {self.dtype}, {torch.get_num_threads()} CPU threads",
            f"  {select.explain(self.device, getattr(torch, self.dtype))}",
            f"  context {config.max_model_len} tokens, up to {config.max_num_seqs} sequences and "
            f"{config.max_num_batched_tokens} tokens per step, {config.num_blocks} cache blocks of {BLOCK_SIZE} tokens",
            f"  cache records {config.kv_format}, {block_bytes(model, config.kv_format):,} bytes per block",
            f"  {_describe_prefix_cache(model, config)}",
            *([f"  experts in the kernels' order kept in {self.expert_cache}"] if self.expert_cache else []),
            "  every token of a prompt runs through every layer"
            if not config.truncation
            else f"  decoder truncation: layers after the last KV source run on a prompt's last {config.keep_tokens} "
            "tokens, an approximation",
            f"  {'overlapped' if config.overlap else 'plain'} loop, queue {config.queue_policy}, "
            f"{_describe_offload(config)}",
            *(f"  {line}" for line in drafting),
            f"  seeds of requests without one: {'random' if config.seed is None else f'drawn from seed {config.seed}'}",
            "  batch invariant: a request gives the same bits alone and in any company"
            if config.batch_invariant
            else "  not batch invariant: bits of a request may depend on its company"
            if operators_problem(self.device, self.dtype) is not None
            or select.gpu_twins(self.device, getattr(torch, self.dtype))  # whose kernels have to be told
            else "  batch invariance not asked for",
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


def resolve_settings(arguments: EngineArguments, environ: Mapping[str, str] | None = None) -> Settings:
    """Resolves what was asked for against the environment and what is built. ValueError names the argument.

    All that can be wrong without the model is found here, before one is loaded for nothing.
    """
    environment = read_environment(environ)
    _check_ranks(arguments, environment)
    _check_numbers(arguments)
    check_seed(arguments.seed)
    if arguments.prefix_mode == "off":
        raise ValueError("prefix_mode: how cached prefixes are used; to use none, say enable_prefix_caching=False")
    _check_word("prefix_mode", arguments.prefix_mode, tuple(mode for mode in PREFIX_MODES if mode != "off"))
    _check_word("queue_policy", arguments.queue_policy, QUEUE_POLICIES)
    for name in ("overlap", "mtp_varlen", "batch_invariant", "wide_outputs"):
        if getattr(arguments, name) is not None:
            _check_switch(name, getattr(arguments, name))
    _check_switch("enable_prefix_caching", arguments.enable_prefix_caching)
    cache = arguments.expert_cache
    if cache is not None and (not isinstance(cache, str) or not cache):
        raise ValueError(f"expert_cache: must be the name of a directory, or None, got {cache!r}")
    truncation = _or(arguments.yoco_truncation, environment.yoco_truncation_mode)
    _check_word("yoco_truncation", truncation, TRUNCATION_MODES)
    nextn = _or(arguments.nextn, environment.nextn_decode)

    device = resolve_device(environment.accelerator if arguments.device == "auto" else arguments.device)
    dtype = arguments.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"  # a CPU gains nothing from imitating the rounding
    _check_word("dtype", dtype, DTYPES, "auto")
    twins = select.gpu_twins(device, getattr(torch, dtype))
    kv_format = arguments.kv_format
    if kv_format == "auto":
        # in all cases nothing more is rounded
        packed = "hopper" if twins else "packed"
        kv_format = packed if dtype == "bfloat16" else "float32"
    _check_word("kv_format", kv_format, KV_FORMATS, "auto")
    problem = format_problem(kv_format, getattr(torch, dtype))
    if problem is not None:
        raise ValueError(problem)
    prefix_caching = arguments.prefix_mode if arguments.enable_prefix_caching else "off"
    batch_invariant = _or(arguments.batch_invariant, environment.batch_invariant)
    problem = None
    if batch_invariant:
        problem = operators_problem(device, dtype) or records_problem(kv_format, device, dtype)
        problem = problem or replay_problem(prefix_caching)
    if problem is not None:
        if arguments.batch_invariant is None:
            raise ValueError(f"DEEPINFER_BATCH_INVARIANT: {problem} (or set the variable to 0)")
        raise ValueError(f"batch_invariant: {problem}")
    most = arguments.max_num_batched_tokens
    return Settings(
        device=device,
        dtype=dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=max(DEFAULT_STEP_TOKENS[device.type], arguments.max_num_seqs) if most is None else most,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        num_blocks=arguments.num_blocks,
        wide_outputs=False if batch_invariant else arguments.wide_outputs,
        expert_cache=arguments.expert_cache if twins else None,
        kv_format=kv_format,
        prefix_caching=prefix_caching,
        truncation=truncation == "compact",
        keep_tokens=_or(arguments.yoco_keep_tokens, environment.yoco_keep_tokens),
        # a second thread for the host's part pays where the device is another chip
        overlap=_or(arguments.overlap, device.type != "cpu"),
        queue_policy=arguments.queue_policy,
        window_store_bytes=arguments.window_store_bytes,
        offload_bytes=arguments.offload_bytes,
        nextn=nextn,
        nextn_asked=arguments.nextn is not None,
        varlen=_or(arguments.mtp_varlen, environment.mtp_varlen),
        batch_invariant=batch_invariant,
        seed=arguments.seed,
        logging_interval=environment.logging_interval_step,
        notes=(
            *_notes(arguments, environment, truncation),
            *_without_effect(arguments, twins, batch_invariant),
        ),
    )


def _notes(arguments: EngineArguments, environment: Environment, truncation: str) -> list[str]:
    notes = []
    if truncation == "off" and arguments.yoco_keep_tokens is not None:
        notes.append(f'yoco_keep_tokens {arguments.yoco_keep_tokens} without effect: yoco_truncation is "off"')
    idle = [v for v in VARIABLES if v.planned and getattr(environment, v.field) != v.default]
    if idle:
        notes.append(f"without effect, not built yet: {', '.join(v.name for v in idle)}")
    if environment.unknown:
        notes.append(f"environment variables without a meaning: {', '.join(environment.unknown)}")
    return notes


def _without_effect(arguments: EngineArguments, twins: bool, batch_invariant: bool) -> Iterator[str]:
    """Of settings for the GPU kernels, which `twins` says are there, the ones that change nothing here."""
    if arguments.wide_outputs and (batch_invariant or not twins):
        reason = "batch_invariant reads the FP8 weights alone" if batch_invariant else "no GPU kernels read it"
        yield f"wide_outputs without effect: {reason}"
    if arguments.expert_cache is not None and not twins:
        yield "expert_cache without effect: no GPU kernels read what it would hold"


def _check_ranks(arguments: EngineArguments, environment: Environment) -> None:
    for name, value in (("ep", arguments.ep), ("dp", _or(arguments.dp, 1)), ("cp", arguments.cp)):
        if value != 1:
            raise ValueError(f"{name}: {value!r} needs several ranks, which are not built yet; use {name}=1")
    if environment.world_size != 1:
        raise ValueError(f"WORLD_SIZE={environment.world_size}: several ranks are not built yet; run one process")


def _check_numbers(arguments: EngineArguments) -> None:
    check_whole_number("max_num_seqs", arguments.max_num_seqs)
    for name in ("max_model_len", "num_blocks", "max_num_batched_tokens", "yoco_keep_tokens"):
        if (size := getattr(arguments, name)) is not None:
            check_whole_number(name, size)
    for name in ("window_store_bytes", "offload_bytes"):
        size = getattr(arguments, name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise ValueError(f"{name}: must be a whole number of bytes >= 0, or None for a share, got {size!r}")
    share = arguments.gpu_memory_utilization
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization: must be a number above 0 and at most 1, got {share!r}")
    nextn, most = arguments.nextn, VERIFY_ROWS - 1
    if nextn is not None and (not isinstance(nextn, int) or isinstance(nextn, bool) or not 0 <= nextn <= most):
        raise ValueError(f"nextn: must be a whole number from 0 to {most}, or None, got {nextn!r}")


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


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_word(name: str, value: object, known: tuple[str, ...], *more: str) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join((*more, *known))}")


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be True or False, got {value!r}")
