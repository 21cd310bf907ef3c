"""A row of logits behind drafts follows the law that it would follow if the drafts had been said."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from plans import bit_masks
from test_sampler import Row, admission, random_params

from deepinfer.engine.sampler import choose
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sampling_state import SamplingState
from deepinfer.engine.target import StepTarget

VOCAB = 60


class NotTheLast:
    """A constraint: no token twice in a row, and those in `never` never."""

    error = None

    def __init__(self, last: int, never: tuple[int, ...] = ()) -> None:
        self.last, self.never = last, never

    def masks(self, path):
        allowed = torch.ones(len(path) + 1, VOCAB, dtype=torch.bool)
        allowed[:, list(self.never)] = False
        for row, last in zip(allowed, [self.last, *path], strict=True):
            row[last] = False
        return bit_masks(allowed)

    def accept(self, token_ids) -> None:
        self.last = token_ids[-1]

    def copy(self):
        return NotTheLast(self.last, self.never)


def state_of(rows: list[Row], constrained: bool) -> SamplingState:
    state = SamplingState(len(rows), VOCAB, eos_token_ids=[1])
    admissions = [admission(slot, row) for slot, row in enumerate(rows)]
    if constrained:
        admissions = [a._replace(constraint=NotTheLast(int(a.token_ids[-1]))) for a in admissions]
    state.admit(admissions)
    return state


def verify_rows(rows: list[Row], drafts: list[list[int]], logits: torch.Tensor, constrained: bool) -> StepTarget:
    counts = np.array([len(path) + 1 for path in drafts])
    depths = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    positions = np.repeat([row.position for row in rows], counts) + depths
    inputs = torch.tensor([token for path in drafts for token in [59, *path]])
    slots = np.repeat(np.arange(len(rows)), counts)
    state = state_of(rows, constrained)
    masks = state.constraints.begin(range(len(rows)), drafts).result() if constrained else None
    return StepTarget(logits, slots, positions, state, inputs=inputs, depths=depths, masks=masks)


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_a_row_behind_drafts_draws_what_it_draws_when_they_were_said(constrained: bool) -> None:
    rng = Random(5)
    for trial in range(20):
        rows, drafts = [], []
        for _ in range(rng.choice([1, 3, 8])):
            prompt, output = ([rng.randrange(VOCAB) for _ in range(rng.randint(low, 5))] for low in (1, 0))
            drafts.append([rng.choice([3, 4, rng.randrange(2, VOCAB)]) for _ in range(rng.randint(0, 5))])
            position = len(prompt + output) - 1
            rows.append(Row(random_params(rng), position, rng.getrandbits(64), tuple(prompt), tuple(output)))
        logits = torch.randn(sum(len(path) + 1 for path in drafts), VOCAB, generator=torch.manual_seed(trial)) * 3
        target = verify_rows(rows, drafts, logits, constrained)
        every = torch.arange(len(logits))
        order = torch.randperm(len(logits), generator=torch.manual_seed(trial))
        ids, valid = target.draw(every).tolist(), target.finite(every).tolist()
        assert target.draw(order).tolist() == [ids[i] for i in order.tolist()]
        at = 0
        for row, path in zip(rows, drafts, strict=True):
            for depth in range(len(path) + 1):
                said = row._replace(output=row.output + tuple(path[:depth]), position=row.position + depth)
                known = [*row.prompt, *row.output][-1:] + path[:depth]
                if constrained and any(a == b for a, b in pairwise(known)):
                    at += 1  # behind a token that was not allowed: no row that counts
                    continue
                state = state_of([said], constrained)
                masks = state.constraints.begin([0], [[]]).result() if constrained else None
                chosen = choose(logits[at : at + 1], np.array([0]), np.array([said.position]), state, masks)
                assert chosen.valid.tolist() == [valid[at]]
                assert not valid[at] or chosen.token_ids.tolist() == [ids[at]]
                at += 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=9),
        SamplingParams(top_p=0.8, min_p=0.01, frequency_penalty=0.5, repetition_penalty=1.2),
    ],
)
def test_log_probabilities_are_those_of_the_law_that_is_drawn_from(params: SamplingParams) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.manual_seed(3)).expand(20_000, -1) * 2
    row = Row(params, 0, 5, (3, 4), (9, 9, 12))
    state = state_of([row], False)
    positions = np.arange(20_000)
    target = StepTarget(logits, np.zeros(20_000, np.int64), positions, state)
    drawn = torch.bincount(target.draw(), minlength=VOCAB) / 20_000
    law = target.logprobs(torch.zeros(VOCAB, dtype=torch.int64), torch.arange(VOCAB)).exp()
    assert law.sum() == pytest.approx(1, abs=1e-5)
    assert (drawn[law == 0] == 0).all()
    assert (drawn - law).abs().max() < 0.015
    # Nothing was drafted: what is left of p is p. Everything was: so it is, too.
    nothing = torch.full((20_000, VOCAB), -torch.inf)
    for q in (nothing, law.log().expand(20_000, -1)):
        again = torch.bincount(target.draw_residual(torch.arange(20_000), q), minlength=VOCAB) / 20_000
        assert (again[law == 0] == 0).all()
        assert (again - law).abs().max() < 0.015


def test_a_constraint_holds_where_bans_and_biases_leave_nothing_of_it() -> None:
    """Only id 1, the end, may follow, and min_tokens holds it back: the constraint wins. Where it allows nothing the
    row says so."""
    params = SamplingParams(temperature=0, min_tokens=5, logit_bias={7: -float("inf")})
    logits = torch.randn(2, VOCAB, generator=torch.manual_seed(4))
    for allowed, valid in ((1, True), (7, True), (None, False)):
        state = SamplingState(1, VOCAB, eos_token_ids=[1])
        never = tuple(i for i in range(VOCAB) if i != allowed)
        state.admit([admission(0, Row(params))._replace(constraint=NotTheLast(0, never))])
        masks = state.constraints.begin([0], [[]]).result()
        target = StepTarget(logits[:1], np.array([0]), np.array([0]), state, masks=masks)
        assert target.finite().tolist() == [valid]
        assert not valid or target.draw().tolist() == [allowed]
