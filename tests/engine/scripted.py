"""A model without weights in front of the real cache, for tests of scheduling, stopping and sampling.

Its logits are a function of the last token and its position, so any schedule gives the same tokens, and the real cache
checks every chunk: that it starts where its sequence ends and that its blocks are reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

from deepinfer.cache import Cache
from deepinfer.config import EngineConfig
from deepinfer.engine.loop import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model import Chunk
from deepinfer.model.batch import Batch
from deepinfer.model.presets import preset

VOCAB = 64
EOS = 1
CONFIG = preset("tiny")
_NOISE = torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def noise_row(token: int, position: int) -> Tensor:
    """Pseudo-random logits, float32 [VOCAB]; the end token is unlikely."""
    row = _NOISE[(token * 31 + position * 7) % 997].clone()
    row[EOS] = -30
    return row


def fixed_row(logits: Sequence[float]) -> Callable[[int, int], Tensor]:
    """The same logits at every position."""
    row = torch.full((VOCAB,), -torch.inf)
    row[: len(logits)] = torch.tensor(logits)
    return lambda token, position: row


class ScriptedModel:
    def __init__(self, row: Callable[[int, int], Tensor] = noise_row) -> None:
        self.row = row
        self.steps: list[list[Chunk]] = []

    def forward(self, chunks: Sequence[Chunk], cache: Cache) -> Tensor:
        self.steps.append(list(chunks))
        view = cache.begin(Batch.from_chunks(chunks, torch.device("cpu")))
        view.commit()
        rows = []
        for chunk in chunks:
            first = len(chunk.token_ids) - chunk.num_logits
            rows += [self.row(chunk.token_ids[i], chunk.start + i) for i in range(first, len(chunk.token_ids))]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


class Letters:
    """A text stream that spells id 33 as '!', 42 as '*', ...; enough to write stop strings by hand."""

    def push(self, token_id: int) -> str:
        return chr(token_id) if token_id >= 32 else ""

    def finish(self) -> str:
        return ""


def make_engine(
    model: ScriptedModel | None = None,
    *,
    max_model_len: int = 512,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    num_blocks: int = 16,
    **options,
) -> Engine:
    cache = Cache(
        CONFIG, max_num_seqs=max_num_seqs, num_blocks=num_blocks, dtype=torch.float32, device=torch.device("cpu")
    )
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        seed=0,
    )
    options.setdefault("detokenizer", lambda skip: Letters())
    return Engine(model or ScriptedModel(), cache, config, vocab_size=VOCAB, eos_token_ids=[EOS], **options)


_numbers = count()


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]):
    """Runs prompts to the end; their outputs in order."""
    listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    names = [f"r{next(_numbers)}" for _ in prompts]
    for name, prompt, own in zip(names, prompts, listed, strict=True):
        engine.add_request(name, list(prompt), own)
    drain(engine)
    return [engine.pop_output(name) for name in names]


def drain(engine: Engine, most: int = 20_000) -> None:
    for _ in range(most):
        if not engine.has_unfinished:
            return
        engine.step()
    raise AssertionError(f"the engine did not finish within {most} steps")


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_id for completion in output.outputs] for output in outputs]
