"""A model without weights in front of the real cache, for tests of scheduling, stopping and sampling.

Its logits are a function of the last token and its position, so any schedule gives the same tokens, and the real cache
checks every chunk: that it starts where its sequence ends and that its blocks are reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import engines
import torch
from drafters import RowDrafter
from torch import Tensor

from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.grammars import Grammars
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.batch import Batch
from deepinfer.model.presets import preset

VOCAB = 64
EOS = 1
CONFIG = preset("tiny")
DEFAULTS: dict = {"seed": 0, "prefix_caching": "off"}  # of EngineConfig; a fixture may change them for its tests
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
    device = torch.device("cpu")

    def __init__(self, row: Callable[[int, int], Tensor] = noise_row) -> None:
        self.row = row
        self.steps: list[Batch] = []

    def forward(self, batch: Batch, storage: CacheStorage) -> Tensor:
        self.steps.append(batch)
        storage.begin(batch).commit()
        rows = batch.logit_rows
        pairs = zip(batch.token_ids[rows].tolist(), batch.positions[rows].tolist(), strict=True)
        logits = [self.row(token, position) for token, position in pairs]
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)


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
    detokenizer=lambda skip: Letters(),
    clock: Callable[[], float] | None = None,
    refused_ids: dict[int, str] | None = None,
    right: float = 0.8,
    grammars: Grammars | None = None,
    **options,
) -> Engine:
    """options: further fields of EngineConfig. Prefix caching is off unless asked for: the counts of blocks in tests
    are easier to follow. right: how often a draft is the model's own token, where there are drafts."""
    model = model or ScriptedModel()
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        **DEFAULTS | options,
    )
    return engines.make_engine(
        model,
        CONFIG,
        config,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        drafter=partial(RowDrafter, row=model.row, right=right) if config.drafts else None,
        detokenizer=detokenizer,
        refused_ids=refused_ids,
        clock=clock,
        offload_unit=1024,
        grammars=grammars,
    )


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
