"""Plans written by hand, for tests of the device's side of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import engines
import numpy as np
import torch
from scripted import CONFIG, EOS, VOCAB, ScriptedModel, noise_row
from torch import Tensor

from deepinfer.cache.manager import CacheManager
from deepinfer.config import EngineConfig
from deepinfer.engine.plan import Admission, Fork, PromptScore, StepPlan
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.speculation.constraint import Masks

MAX_LEN, SLOTS = 600, 6
GREEDY = SamplingParams(temperature=0)


class Chunk(NamedTuple):
    slot: int
    start: int
    length: int = 1
    num_logits: int = 1


class Host:
    """Plans by hand. The cache is the real one, so a chunk out of place is an error, not another number."""

    def __init__(
        self,
        model: ScriptedModel | None = None,
        *,
        drafts: int = 0,
        drafter: engines.MakeDrafter | None = None,
        slots: int = SLOTS,
        vocab: int = VOCAB,
    ) -> None:
        self.model = model or ScriptedModel()
        config = EngineConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=slots,
            max_num_batched_tokens=max(512, slots),
            num_blocks=max(40, slots),
            prefix_caching="off",
            drafts=drafts,
        )
        self.manager = CacheManager.for_model(CONFIG, config)
        self.runner = engines.make_runner(
            self.model, CONFIG, config, vocab_size=vocab, eos_token_ids=(EOS,), drafter=drafter
        )
        self.admissions: list[Admission] = []
        self.number = 0

    def admit(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        seed: int = 1,
        output: Sequence[int] = (),
        room: int = 500,
        **options: Any,
    ) -> int:
        """room: tokens to reserve blocks for. options: further fields of Admission."""
        slot = self.manager.open()
        self.manager.reserve(slot, room)
        known = np.array([*prompt, *output], np.int32)
        self.admissions.append(Admission(slot, known, len(prompt), params, seed, **options))
        return slot

    def plan(
        self,
        *chunks: Chunk,
        forks: Sequence[Fork] = (),
        scores: Sequence[PromptScore] = (),
        caps: Sequence[int] | None = None,
        budget: int | None = None,
        propose: bool = False,
    ) -> StepPlan:
        """Every chunk with logits draws from its last row, and so do its forks. caps: the first chunks are decodes with
        so many drafts at most; where they start only the runner knows."""
        columns = np.array(chunks, np.int64).reshape(-1, 4).T
        last = np.cumsum(columns[3]) - 1
        draws = [(chunk.slot, row) for chunk, row in zip(chunks, last, strict=True) if chunk.num_logits]
        draws += [(fork.child, row) for fork in forks for slot, row in draws if slot == fork.parent]
        draw_slots, draw_rows = np.array(draws, np.int64).reshape(-1, 2).T
        decodes = 0 if caps is None else len(caps)
        draw_rows -= decodes
        none = np.zeros(len(chunks), np.int64)
        self.number += 1
        admissions, self.admissions = self.admissions, []
        return StepPlan(
            number=self.number,
            edits=self.manager.take_edits(),
            admissions=admissions,
            slots=columns[0],
            starts=columns[1],
            lengths=columns[2],
            num_logits=columns[3],
            window_floors=none,
            write_from=none,
            keep_from=none,
            draw_slots=draw_slots,
            draw_rows=draw_rows,
            draw_epochs=np.zeros_like(draw_slots),
            forks=list(forks),
            scores=list(scores),
            num_decodes=decodes,
            draft_caps=np.array(caps or [], np.int64),
            draft_budget=budget,
            propose=propose,
        )

    def run(self, *chunks: Chunk, **options) -> list[int]:
        """The tokens that the step draws."""
        result = self.runner.run(self.plan(*chunks, **options))
        assert result.error is None and result.valid.all()
        return result.token_ids.tolist()

    def speculate(self, *chunks: Chunk, **options) -> list[list[int]]:
        """The tokens that the step draws, draw by draw; it drafts for the next one."""
        result = self.runner.run(self.plan(*chunks, **{"propose": True} | options))
        assert result.valid.all() and result.counts is not None
        return [part.tolist() for part in np.split(result.token_ids, result.counts.cumsum()[:-1])]

    def generate(self, slot: int, start: int, count: int) -> list[int]:
        """`count` tokens of one sequence whose tokens from `start` on are not computed yet: one known token."""
        return [self.run(Chunk(slot, start + i))[0] for i in range(count)]

    @property
    def last(self) -> list[int]:
        """Token ids of the last step's rows."""
        return self.model.steps[-1].token_ids.tolist()


def greedy_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the scripted model says after a prompt, worked out without a runner."""
    known = list(prompt)
    for _ in range(count):
        known.append(int(noise_row(known[-1], len(known) - 1).argmax()))
    return known[len(prompt) :]


def alone(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    count: int,
    model: ScriptedModel | None = None,
    **options: Any,
) -> list[int]:
    """What a lone sequence says without drafts. options: further fields of Admission."""
    host = Host(model)
    slot = host.admit(prompt, params, seed, **options)
    first = host.run(Chunk(slot, 0, len(prompt)))
    return first + host.generate(slot, len(prompt), count - 1)


def bit_masks(allowed: Tensor) -> Masks:
    """Bool [n, vocab] as constraints give it: int32 [n, (vocab + 31) // 32]."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32))
    return (padded.view(len(allowed), -1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32).numpy()


@functools.cache
def _allowed_by_state(vocab: int) -> Masks:
    """Six rows; the last one is behind a token that was not allowed."""
    return bit_masks(torch.arange(vocab) % 5 != torch.arange(6)[:, None])


class Automaton:
    """A constraint of five states: in state s ids that leave the rest s when divided by five may not come."""

    def __init__(self, state: int = 0, vocab: int = VOCAB) -> None:
        self.state, self.vocab = state, vocab
        self.allowed = _allowed_by_state(vocab)
        self.accepted: list[int] = []
        self.error: str | None = None

    def masks(self, path: Sequence[int]) -> Masks:
        state, rows = self.state, [self.state]
        for token in path:
            state = 5 if state == 5 or token % 5 == state else (state + token) % 5
            rows.append(state)
        return self.allowed[rows]

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert token % 5 != self.state
            self.state = (self.state + token) % 5
            self.accepted.append(token)

    def copy(self) -> Automaton:
        return Automaton(self.state, self.vocab)
