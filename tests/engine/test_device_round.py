"""Rounds of the device alone bring what the runner brings, step by step: tokens, counts, logarithms, survivals."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from drafters import RowDrafter
from plans import Chunk, Host
from scripted import VOCAB, noise_row
from torch import Tensor

from deepinfer.cache.graph_step import StepRows
from deepinfer.engine.device_round import DeviceRound, DraftsOfRound, Round, RoundColumns, serves
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sampling_state import (
    BIASED,
    CONSTRAINED,
    DRAWN,
    LISTED,
    MASKED,
    PENALISED,
    RESIDUAL,
    TRUNCATED,
    SamplingState,
)
from deepinfer.kernels.triton.runtime import INTERPRET
from deepinfer.kernels.triton.sampling_rows import RowLaws
from deepinfer.speculation.propose import DraftLaw, Rule

DEVICE = torch.device("cpu" if INTERPRET.value else "cuda")
RIGHT = 0.75
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=1.5, min_p=0.05, top_p=0.9, top_k=30),
]


class _Lengths:
    """In the storage's place: where sequences stand is in the columns."""

    def __init__(self, columns: RoundColumns) -> None:
        self._columns = columns

    def lengths(self, slots: np.ndarray) -> np.ndarray:
        return self._columns.lengths.cpu().numpy()[slots]


class HostDrafter:
    """The tests' drafter behind the round's interface: the same drafts as the runner's."""

    def __init__(self, columns: RoundColumns, k: int, null_slot: int) -> None:
        self._inner = RowDrafter(_Lengths(columns), k, noise_row, RIGHT)  # type: ignore[arg-type]
        self._null_slot = null_slot

    def propose(self, slots: Tensor, anchors: Tensor, laws: RowLaws) -> DraftsOfRound:
        own = slots.cpu()
        live = (own != self._null_slot).nonzero()[:, 0]
        at = own[live]
        heat = laws.temperature.cpu()[at]
        assert laws.positions.cpu()[live].tolist() == self._inner._storage.lengths(at.numpy()).tolist()
        rules = np.where(heat.numpy() > 0, Rule.COUPLED, Rule.GREEDY).astype(np.uint8)
        law = DraftLaw(rules, heat, (laws.seed_low.cpu()[at], laws.seed_high.cpu()[at]))
        proposal = self._inner.propose(at.numpy(), anchors.cpu()[live], law)
        drafts = torch.full((len(own), self._inner.k), -7)
        confidence = torch.full((len(own), self._inner.k), torch.nan)
        drafts[live], confidence[live] = proposal.token_ids, proposal.confidence
        return DraftsOfRound(drafts.to(DEVICE), confidence.to(DEVICE))


def scripted_logits(rows: StepRows) -> Tensor:
    """Of the rows; NaN where they are nobody's: nothing of it may leak."""
    used = int(rows.chunk_rows[-1])
    logits = torch.full((rows.rows, VOCAB), torch.nan)
    for i, pair in enumerate(zip(rows.token_ids[:used].tolist(), rows.positions[:used].tolist(), strict=True)):
        logits[i] = noise_row(*pair)
    return logits.to(DEVICE)


class Twins:
    """A runner and rounds over the same sequences, each `prompt_len` tokens and one drawn one in."""

    def __init__(self, params: list[SamplingParams], drafts: int, limits: list[int] | None = None) -> None:
        drafter = (lambda storage, k: RowDrafter(storage, k, noise_row, RIGHT)) if drafts else None
        self.host = Host(drafts=drafts, drafter=drafter)
        self.drafts, prompt = drafts, [5, 6, 7]
        rest: list[dict[str, Any]] = [{} if limits is None else {"limit": limit} for limit in limits or params]
        self.slots = np.array([self.host.admit(prompt, p, 1000 + i, **rest[i]) for i, p in enumerate(params)], np.int64)
        self.starts = np.full(len(params), len(prompt))
        self.host.run(*(Chunk(int(slot), 0, len(prompt)) for slot in self.slots))
        runner = self.runner
        self.null_slot = len(runner.tokens)
        self.columns = RoundColumns(self.null_slot, drafts, DEVICE)
        state = runner.sampling
        assert serves(state.flags[self.slots], drafts)
        if DEVICE.type == "cuda":  # `enter` takes a state beside the columns
            state = _moved(state)
        self.columns.enter(state, self.slots, self.starts)
        self.rounds = DeviceRound(
            self.columns,
            runner.tokens.to(DEVICE, copy=True),
            max_model_len=runner._max_model_len,
            drafter=HostDrafter(self.columns, drafts, self.null_slot) if drafts else None,
        )

    @property
    def runner(self) -> ModelRunner:
        return self.host.runner

    def step(self, which: list[int], caps: list[int], budget: int | None, propose: bool, rows: StepRows) -> int:
        """One step of both, compared -> its tokens."""
        slots = self.slots[which]
        options: dict[str, Any] = {"caps": caps, "budget": budget, "propose": propose} if self.drafts else {}
        chunks = [Chunk(int(slot), int(start)) for slot, start in zip(slots, self.starts[which], strict=True)]
        expected = self.runner.run(self.host.plan(*chunks, **options))
        order = Round.of(self.runner.sampling.flags[slots], slots, np.array(caps, np.int64), budget, propose)
        result = self.rounds.run(order, rows, lambda: scripted_logits(rows)).result()
        assert result.token_ids.tolist() == expected.token_ids.tolist()
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert result.valid.tolist() == expected.valid.tolist()
        for own, theirs in (
            (result.counts, expected.counts),
            (result.num_verified, expected.num_verified),
            (result.survivals, expected.survivals),
        ):
            assert (own is None) == (theirs is None)
            assert own is None or theirs is None or np.allclose(own, theirs, atol=1e-6)
        self.starts[which] += 1 if result.counts is None else result.counts
        assert self.columns.lengths.cpu().numpy()[slots].tolist() == self.starts[which].tolist()
        return len(result.token_ids)


def _moved(state: SamplingState) -> SamplingState:
    moved = copy(state)
    moved.device = DEVICE
    for name in ("temperature", "top_p", "min_p", "top_k", "seed_low", "seed_high"):
        setattr(moved, name, getattr(state, name).to(DEVICE))
    return moved


def test_rounds_without_drafts_bring_the_runners_tokens() -> None:
    twins = Twins(MIXED, 0)
    rows = StepRows(6, 6, twins.null_slot, DEVICE)
    for which in ([4, 0, 3], [0, 1, 2, 3, 4]):
        twins.step(which, [0] * len(which), None, False, rows)


def test_rounds_with_drafts_bring_the_runners_tokens_counts_and_survivals() -> None:
    twins, tokens = Twins([MIXED[0], MIXED[1], MIXED[2]], 3), 0
    rows = StepRows(12, 4, twins.null_slot, DEVICE)
    for caps, budget, propose in (
        ([3, 3, 3], None, True),  # no drafts are there yet
        ([3, 1, 3], None, True),
        ([3, 3, 2], 4, True),
        ([3, 3, 3], 0, True),
        ([3, 2, 3], 100, False),
        ([3, 3, 3], None, True),
    ):
        tokens += twins.step([2, 0, 1], caps, budget, propose, rows)
    assert tokens > 24  # drafts were accepted


def test_a_greedy_batch_with_drafts_takes_the_short_way_to_the_same_tokens() -> None:
    twins = Twins([SamplingParams(temperature=0)] * 2, 5)
    rows = StepRows(12, 2, twins.null_slot, DEVICE)
    assert sum(twins.step([0, 1], [5, 5], None, True, rows) for _ in range(4)) > 16


def test_a_sequence_near_its_limit_verifies_no_more_than_fits() -> None:
    twins = Twins([SamplingParams(temperature=0), SamplingParams()], 5, limits=[9, 40])
    rows = StepRows(12, 2, twins.null_slot, DEVICE)
    for _ in range(3):
        twins.step([0, 1], [5, 5], None, True, rows)


def test_an_order_that_does_not_fit_is_refused() -> None:
    twins = Twins([SamplingParams(temperature=0)] * 3, 5)
    caps = np.full(3, 5)
    order = Round(twins.slots, caps)
    for rows in (StepRows(17, 3, twins.null_slot, DEVICE), StepRows(18, 2, twins.null_slot, DEVICE)):
        with pytest.raises(ValueError, match=r"a round of 3 slots and up to 18 rows"):
            twins.rounds.begin(order, rows)
    twins.rounds.begin(order._replace(budget=14), StepRows(17, 3, twins.null_slot, DEVICE))


def test_results_may_be_read_some_rounds_later() -> None:
    twins = Twins([SamplingParams()] * 2, 0)
    rows = StepRows(4, 3, twins.null_slot, DEVICE)
    order = Round(twins.slots, np.zeros(2, np.int64))
    pending = [twins.rounds.run(order, rows, lambda: scripted_logits(rows)) for _ in range(3)]
    late = [p.result().token_ids.tolist() for p in pending]
    expected = [twins.host.run(*(Chunk(int(slot), 3 + i) for slot in twins.slots)) for i in range(3)]
    assert late == expected


@pytest.mark.parametrize("flag", [PENALISED, BIASED, MASKED, LISTED, CONSTRAINED])
def test_what_changes_logits_or_is_listed_keeps_the_runners_path(flag: int) -> None:
    plain = np.array([0, DRAWN, DRAWN | TRUNCATED], np.uint8)
    assert serves(plain, 5)
    assert not serves(np.append(plain, np.uint8(flag)), 0)


def test_the_residual_rule_is_served_where_nothing_is_drafted() -> None:
    flags = np.array([DRAWN | RESIDUAL], np.uint8)
    assert serves(flags, 0) and not serves(flags, 5)
