"""The whole engine over the tiny random model: real weights, real cache, real runner; token ids only."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine.core import EngineCore
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.sampling_params import SamplingParams

VOCAB_USED = 400  # ids 3 .. 399 are plain tokens in the tiny preset


def make_real_engine(
    model,
    *,
    max_model_len: int = 640,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 256,
    num_blocks: int = 24,
    clock=None,
    **options,
) -> Engine:
    """options: further fields of EngineConfig; exact prefix caching with 4 windows unless they say otherwise."""
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        **{"seed": 0, "window_entries": 4} | options,
    )
    storage = CacheStorage(
        model.config,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        window_entries=config.window_entries,
        device=model.device,
    )
    runner = ModelRunner(
        model,
        storage,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=(),
    )
    timed = {} if clock is None else {"clock": clock}
    manager = CacheManager.for_model(model.config, config, offload_blocks=config.offload_bytes // 1000)
    return Engine(EngineCore(runner, manager, config, vocab_size=model.config.vocab_size, **timed), **timed)


@functools.cache
def text(seed: int, count: int = 640) -> tuple[int, ...]:
    """Pseudo-random token ids."""
    return tuple(torch.randint(3, VOCAB_USED, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def finish(engine: Engine, most: int = 5000) -> None:
    for _ in range(most):
        if not engine.has_unfinished:
            return
        engine.step()
    raise AssertionError(f"the engine did not finish within {most} steps")


def complete(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]):
    """Runs prompts together to the end -> token ids per prompt and completion."""
    listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    names = [f"p{i}" for i in range(len(prompts))]
    for name, prompt, own in zip(names, prompts, listed, strict=True):
        engine.add_request(name, list(prompt), own)
    finish(engine)
    return [[completion.token_id for completion in engine.pop_output(name).outputs] for name in names]


_cold: dict = {}


def cold(model, prompt: Sequence[int], params: SamplingParams, **options) -> list[list[int]]:
    """What a lone run in a fresh engine without any cache gives."""
    key = (tuple(prompt), repr(params), repr(sorted(options.items())))
    if key not in _cold:
        roomy = {"prefix_caching": "off", "num_blocks": 8 * max(1, params.n) + 8, "max_num_seqs": max(1, params.n)}
        _cold[key] = complete(make_real_engine(model, **roomy | options), [prompt], params)[0]
    return _cold[key]
