"""From settings and a model to an engine core: sizes, cache, runner. Used by `LLM` and by the engine process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from deepinfer.cache.events import CacheEvent
from deepinfer.cache.formats import LAYOUT_VERSION, block_bytes, slot_bytes, staging_bytes, window_entry_bytes
from deepinfer.cache.hashing import namespace
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine.core import EngineCore
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.settings import Settings, check_keep_tokens, check_seed
from deepinfer.engine.sizing import divide_memory, fit
from deepinfer.kernels.device import free_memory
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.config import ModelConfig
from deepinfer.model.digest import model_digest


def engine_config(
    settings: Settings,
    model: ModelConfig,
    *,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.85,
    num_blocks: int | None = None,
    seed: int | None = 0,
) -> EngineConfig:
    """The sizes of an engine in the memory that is free now, after the weights were loaded. Arguments as of `LLM`.

    ValueError naming the argument that does not fit this model or this memory, with the nearest that does.
    """
    check_seed(seed)
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
        gpu_memory_utilization=gpu_memory_utilization,
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
    return fit(
        context=model.max_position_embeddings,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        bytes_per_block=per_block,
        bytes_per_slot=slot_bytes(model, settings.kv_format, 0, replicas=keeps_windows),
        memory=memory.blocks,
        bytes_per_step_token=staging_bytes(model, settings.kv_format, 1),
        num_blocks=num_blocks,
        bytes_per_window=per_window,
        window_memory=memory.windows,
        kv_format=settings.kv_format,
        prefix_caching=settings.prefix_caching,
        truncation=settings.truncation,
        keep_tokens=settings.keep_tokens,
        overlap=settings.overlap,
        queue_policy=settings.queue_policy,
        offload_bytes=memory.offload,
        seed=seed,
    )


def build_core(
    path: str | Path,
    model: DeepseekV41,
    config: EngineConfig,
    *,
    on_event: Callable[[CacheEvent], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """An engine core on a loaded model. path: the model's directory, which names the content of its cache. on_event:
    told what the prefix cache stores and loses."""
    storage = CacheStorage.for_model(
        model,
        max_num_seqs=config.max_num_seqs,
        num_blocks=config.num_blocks,
        drafts=config.drafts,
        kv_format=config.kv_format,
        window_entries=config.window_entries,
    )
    per_block = block_bytes(model.config, config.kv_format)
    manager = CacheManager.for_model(
        model.config, config, offload_blocks=config.offload_bytes // per_block, on_event=on_event
    )
    ends = (model.config.eos_token_id,)
    runner = ModelRunner(
        model,
        storage,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=ends,
    )
    return EngineCore(
        runner,
        manager,
        config,
        vocab_size=model.config.vocab_size,
        eos_token_ids=ends,
        refused_ids={model.config.image_token_id: "stands for a picture, and pictures are not built yet"},
        namespace=partial(namespace, model_digest(path), config.kv_format, LAYOUT_VERSION),
        clock=clock,
    )
