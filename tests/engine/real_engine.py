"""The whole engine over the tiny random model: real weights, real cache, real runner; token ids only."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import engines
import numpy as np
import torch
from drafters import TableDrafter
from engines import MakeDrafter
from toy_grammar import AutomatonCompiler

from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.grammars import Grammars
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
    drafter: MakeDrafter | None = None,
    **options,
) -> Engine:
    """options: further fields of EngineConfig; exact prefix caching with 4 windows unless they say otherwise. drafter:
    where there are drafts; by default what earlier cold runs said, with some mistakes."""
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        **{"seed": 0, "window_entries": 4} | options,
    )
    if config.drafts and drafter is None:
        drafter = guess_from_cold_runs()
    vocab = model.config.vocab_size
    grammars = Grammars(AutomatonCompiler(vocab))
    return engines.make_engine(
        model, model.config, config, vocab_size=vocab, drafter=drafter, clock=clock, grammars=grammars
    )


def guess_from_cold_runs(right: float = 0.8) -> MakeDrafter:
    """Drafts what `cold` gave for the same sequence so far, if it did."""

    def make(storage: CacheStorage, k: int) -> TableDrafter:
        return TableDrafter(storage, k, _said, VOCAB_USED, right)

    return make


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
_models: list = []
_said: list[np.ndarray] = []  # prompts and answers of all cold runs


def cold(model, prompt: Sequence[int], params: SamplingParams, **options) -> list[list[int]]:
    """What a lone run in a fresh engine without any cache gives."""
    key = (id(model), tuple(prompt), repr(params), repr(sorted(options.items())))
    if key not in _cold:
        roomy = {"prefix_caching": "off", "num_blocks": 8 * max(1, params.n) + 8, "max_num_seqs": max(1, params.n)}
        _cold[key] = complete(make_real_engine(model, **roomy | options), [prompt], params)[0]
        _models.append(model)  # keeps it, and so its id
        _said.extend(np.array([*prompt, *answer]) for answer in _cold[key])
    return _cold[key]
