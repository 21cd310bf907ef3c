"""From settings and a model to an engine core: sizes, cache, runner. Used by `LLM` and by the engine process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from deepinfer.cache.events import CacheEvent
from deepinfer.cache.formats import LAYOUT_VERSION, block_bytes, slot_bytes, staging_bytes, window_entry_bytes
from deepinfer.cache.hashing import namespace
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import VERIFY_ROWS, EngineConfig
from deepinfer.engine.checkpoint_grammars import checkpoint_grammars
from deepinfer.engine.core import EngineCore
from deepinfer.engine.drafting import describe_choice, describe_drafting, draft_length, every_request_is_reproducible
from deepinfer.engine.graphs import MOST_ROWS, GraphedModel
from deepinfer.engine.invariance import sizes_problem, truncation_problem
from deepinfer.engine.memory_plan import WorkingMemory, describe_memory, working_memory
from deepinfer.engine.profile import measure_costs, typical_seconds
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.settings import Settings, check_keep_tokens
from deepinfer.engine.sizing import divide_memory, fit, keeps_wide_outputs
from deepinfer.kernels import select
from deepinfer.kernels.device import free_memory
from deepinfer.kernels.select import step_threads
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.config import ModelConfig
from deepinfer.model.digest import model_digest
from deepinfer.model.draft_model import DraftModel
from deepinfer.model.wide_outputs import keep_wide_outputs, kept_output_bytes, wide_output_bytes
from deepinfer.speculation.calibration import Calibration
from deepinfer.speculation.planner import DraftPlanner
from deepinfer.speculation.propose import Drafter, DraftModelDrafter


def load(path: Path, settings: Settings, *, progress: bool = False) -> tuple[DeepseekV41, EngineConfig]:
    """The model of a directory, with its draft stages if they are to be used, and the sizes of an engine in the memory
    that it leaves. ValueError naming what does not fit."""
    config = ModelConfig.from_dir(path)
    drafts = draft_length(settings, config)  # refused before anything is read, as is
    if drafts:
        Calibration.load(path, drafts)  # a broken file
    _check_invariance(settings, config)
    model = load_model(
        path,
        device=str(settings.device),
        dtype=settings.dtype,
        drafts=drafts > 0,
        invariant=settings.batch_invariant,
        expert_cache=settings.expert_cache,
        progress=progress,
    )
    _keep_wide_outputs(settings, model, drafts)
    return model, engine_config(settings, model.config)


def _keep_wide_outputs(settings: Settings, model: DeepseekV41, drafts: int) -> None:
    """Where it is wished, or pays and there is room: before the cache is sized, which gets what is left."""
    size = wide_output_bytes(model)
    free, total = free_memory(settings.device)
    left = int(total * settings.gpu_memory_utilization) - (total - free)
    rows = settings.max_num_seqs * (1 + drafts)
    if size and keeps_wide_outputs(wished=settings.wide_outputs, size=size, free=left, rows=rows):
        keep_wide_outputs(model)


def engine_config(settings: Settings, model: ModelConfig) -> EngineConfig:
    """The sizes of an engine in the memory that is free now, after the weights were loaded.

    ValueError naming the argument that does not fit this model or this memory, with the nearest that does.
    """
    drafts = draft_length(settings, model)
    _check_invariance(settings, model)
    if settings.truncation:
        check_keep_tokens(settings.keep_tokens, model)
        if (problem := model.narrowing_obstacle()) is not None:
            raise ValueError(f'yoco_truncation: "compact" cannot be used, {problem}; use "off"')
    device_free, device_total = free_memory(settings.device)
    host_free, _ = free_memory(torch.device("cpu"))
    memory = divide_memory(
        device_free=device_free,
        device_total=device_total,
        host_free=host_free,
        device_type=settings.device.type,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        window_store_bytes=settings.window_store_bytes,
        offload_bytes=settings.offload_bytes,
    )
    per_block = block_bytes(model, settings.kv_format)
    if settings.offload_bytes and per_block > settings.offload_bytes:
        raise ValueError(
            f"offload_bytes: {settings.offload_bytes:,} bytes do not hold one block of {per_block:,}; use at least "
            f"that, or 0 to compute preempted sequences again"
        )
    per_window = window_entry_bytes(model, settings.kv_format) if settings.prefix_caching != "off" else 0
    if settings.window_store_bytes and per_window > settings.window_store_bytes:
        raise ValueError(
            f"window_store_bytes: {settings.window_store_bytes:,} bytes do not hold one window of {per_window:,}; "
            f"use at least that, or 0 to keep none"
        )
    keeps_windows = 0 < per_window <= memory.windows
    working, graph_rows = _beside_the_cache(settings, model, drafts)
    config = fit(
        context=model.max_position_embeddings,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        bytes_per_block=per_block,
        bytes_per_slot=slot_bytes(model, settings.kv_format, drafts, replicas=keeps_windows)
        + _draft_logit_bytes(settings, drafts, model.vocab_size),
        memory=max(0, memory.blocks - working),
        bytes_per_step_token=staging_bytes(model, settings.kv_format, 1, drafts=drafts),
        draft_rows_per_seq=model.dspark_block_size if drafts else 0,
        num_blocks=settings.num_blocks,
        bytes_per_window=per_window,
        window_memory=memory.windows,
        kv_format=settings.kv_format,
        prefix_caching=settings.prefix_caching,
        truncation=settings.truncation,
        keep_tokens=settings.keep_tokens,
        drafts=drafts,
        varlen=settings.varlen and drafts > 0,
        batch_invariant=settings.batch_invariant,
        overlap=settings.overlap,
        queue_policy=settings.queue_policy,
        offload_bytes=memory.offload,
        graph_rows=graph_rows,
        seed=settings.seed,
    )
    if config.batch_invariant and (problem := truncation_problem(config)) is not None:
        raise ValueError(f"yoco_truncation: {problem}")
    return config


def _check_invariance(settings: Settings, model: ModelConfig) -> None:
    if not settings.batch_invariant:
        return
    if (problem := sizes_problem(model, settings.device, settings.dtype)) is not None:
        raise ValueError(f"batch_invariant: {problem}")


def _beside_the_cache(settings: Settings, model: ModelConfig, drafts: int) -> tuple[int, int]:
    """Bytes of a GPU that steps and graphs need beside weights and cache, and the rows of the largest graph; none of
    either on a CPU."""
    if settings.device.type == "cpu":
        return 0, 0
    rows = settings.max_num_seqs * (1 + drafts)
    where = settings.device, getattr(torch, settings.dtype)
    twins = select.gpu_twins(*where)
    # Experts that no kernel serves run the reference, which asks the device how many rows each has: not in a graph.
    graph_rows = min(rows, MOST_ROWS) if twins and select.shuffles_experts(model.hidden_size) else 0
    return _working(settings, model, drafts, graph_rows, where).total, graph_rows


def _working(
    settings: Settings | EngineConfig,
    model: ModelConfig,
    drafts: int,
    graph_rows: int,
    where: tuple[torch.device, torch.dtype],
) -> WorkingMemory:
    tokens = settings.max_num_batched_tokens
    return working_memory(
        model,
        tokens=tokens,
        unpacks=select.will_unpack(tokens, model.num_attention_heads, model.head_dim, *where),
        sequences=settings.max_num_seqs,
        drafts=drafts,
        graph_rows=graph_rows,
        longest=settings.max_model_len or model.max_position_embeddings,
    )


def _draft_logit_bytes(settings: Settings, drafts: int, vocab_size: int) -> int:
    """Of one sequence: what rejection sampling compares with, float32 [drafts, vocab]; without it nothing is kept."""
    reproducible = every_request_is_reproducible(settings.seed, settings.batch_invariant)
    return 0 if reproducible else drafts * vocab_size * 4


def build_core(
    path: str | Path,
    model: DeepseekV41,
    config: EngineConfig,
    *,
    on_event: Callable[[CacheEvent], None] | None = None,
    progress: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """An engine core on a loaded model. path: the model's directory, which names the content of its cache. on_event:
    told what the prefix cache stores and loses. progress: show it on stderr if measuring steps takes long."""
    if config.batch_invariant and select.gpu_twins(model.device, model.numerics.dtype) and not model.numerics.invariant:
        raise ValueError("batch_invariant: the model was loaded without it; use load_model(..., invariant=True)")
    used = _used_memory(model.device)  # by the weights
    storage = CacheStorage.for_model(
        model,
        max_num_seqs=config.max_num_seqs,
        num_blocks=config.num_blocks,
        drafts=config.drafts,
        kv_format=config.kv_format,
        window_entries=config.window_entries,
        padded_rows=_staged_rows(model.config, config) if config.graph_rows else 0,
    )
    per_block = block_bytes(model.config, config.kv_format)
    manager = CacheManager.for_model(
        model.config, config, offload_blocks=config.offload_bytes // per_block, on_event=on_event
    )
    forward = GraphedModel(model, storage, rows=config.graph_rows, longest=config.max_model_len + VERIFY_ROWS)
    memory: tuple[str, ...] = ()
    if model.device.type == "cuda":
        graphs = forward.capture(progress=progress)
        where = model.device, model.numerics.dtype
        working = _working(config, model.config, config.drafts, config.graph_rows, where)
        wide = kept_output_bytes(model)
        memory = (
            describe_memory(
                model.config, config, weights=used - wide, wide_outputs=wide, graphs=graphs, working=working
            ),
        )
    drafting = _drafting(path, model, forward, storage, manager, config, progress) if config.drafts else None
    ends = (model.config.eos_token_id,)
    grammars, filler = checkpoint_grammars(Path(path), model.config.vocab_size, model.config.eos_token_id)
    runner = ModelRunner(
        forward,
        storage,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=ends,
        drafter=drafting and drafting.drafter,
        drafts=config.drafts,
        calibration=drafting and drafting.calibration,
        threads=partial(step_threads, model.device, model.numerics.dtype),
        filler=filler,
    )
    if config.graph_rows and select.gpu_twins(model.device, model.numerics.dtype):
        from deepinfer.engine.rounds import Rounds

        runner.rounds = Rounds(
            forward,
            storage,
            runner.sampling,
            runner.tokens,
            max_model_len=config.max_model_len,
            draft_model=model.draft if config.drafts else None,
            drafts=config.drafts,
            calibration=drafting and drafting.calibration,
        )
    return EngineCore(
        runner,
        manager,
        config,
        vocab_size=model.config.vocab_size,
        eos_token_ids=ends,
        refused_ids={model.config.image_token_id: "stands for a picture, and pictures are not built yet"},
        namespace=partial(namespace, model_digest(path), config.kv_format, LAYOUT_VERSION),
        planner=drafting and drafting.planner,
        drafting=drafting.lines if drafting else (),
        memory=memory,
        grammars=grammars,
        clock=clock,
    )


def _staged_rows(model: ModelConfig, config: EngineConfig) -> int:
    """Rows that a step may stage: of prompts, of a padded step, or of the blocks of a draft pass."""
    blocks = config.max_num_seqs * model.dspark_block_size if config.drafts else 0
    return max(config.graph_rows, config.max_num_batched_tokens, blocks)


def _used_memory(device: torch.device) -> int:
    free, total = free_memory(device)
    return total - free


class _Drafting(NamedTuple):
    drafter: Drafter
    calibration: Calibration
    planner: DraftPlanner
    lines: tuple[str, ...]  # for people: how drafts are chosen


def _drafting(
    path: str | Path,
    model: DeepseekV41,
    forward: GraphedModel,
    storage: CacheStorage,
    manager: CacheManager,
    config: EngineConfig,
    progress: bool,
) -> _Drafting:
    """What drafts, what its confidence is worth, and who decides how many drafts pay."""
    if model.draft is None:
        raise ValueError(f"drafts: {config.drafts} need the model's draft stages; load it with drafts=True")
    drafter = _drafter(model, model.draft, forward, storage, config, progress)
    calibration = Calibration.load(Path(path), config.drafts)
    costs = None
    if config.varlen:
        costs = measure_costs(
            forward,
            storage,
            manager,
            drafter,
            config,
            vocab_size=model.config.vocab_size,
            typical=typical_seconds(model.device),
            progress=progress,
        )
    planner = DraftPlanner(config.max_num_seqs, config.drafts, varlen=config.varlen, costs=costs)
    lines = describe_choice(planner.explanation, costs, calibration.is_fitted)
    return _Drafting(drafter, calibration, planner, lines)


def _drafter(
    model: DeepseekV41,
    draft: DraftModel,
    forward: GraphedModel,
    storage: CacheStorage,
    config: EngineConfig,
    progress: bool,
) -> Drafter:
    plain = DraftModelDrafter(draft, storage, config.drafts)
    if not config.graph_rows or not select.gpu_twins(model.device, model.numerics.dtype):
        return plain
    from deepinfer.engine.graphed_drafter import GraphedDrafter  # both need Triton
    from deepinfer.engine.rounds import RoundDraftModel

    drafter = GraphedDrafter(plain, RoundDraftModel(draft, storage, config.drafts), storage)
    if model.device.type == "cuda":
        drafter.capture(forward.memory_pool, progress=progress)
    return drafter


def describe(path: Path, settings: Settings, model: ModelConfig, core: EngineCore) -> str:
    """What is printed at start: the settings in force, drafting among them, and where a GPU's memory goes."""
    drafting = describe_drafting(settings, model, core.config, core.drafting)
    return settings.describe(path, model, core.config, (*drafting, *core.memory))
