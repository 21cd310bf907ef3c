"""Drafts on the GPU: chains, verdicts, the choice of what is verified, and the rows of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from twins import DEVICE, poisoned

from deepinfer.cache.graph_step import StepRows
from deepinfer.kernels.prefixes import ranked_prefixes
from deepinfer.kernels.reference import markov as reference
from deepinfer.kernels.triton.draft_selection import select_lengths
from deepinfer.kernels.triton.markov import markov_chain
from deepinfer.kernels.triton.round_rows import fill_rows
from deepinfer.kernels.triton.sampling_rows import RowLaws
from deepinfer.kernels.triton.verify import Report, settle_coupled
from deepinfer.speculation.propose import DraftLaw, Rule, draw_drafts
from deepinfer.speculation.selection import select_lengths as plain_lengths
from deepinfer.speculation.verify import verify


def chain_inputs(rows: int, drafts: int, vocab: int, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anchors, embed, head, logits. Small whole numbers: every sum is exact in any order, and many are equal."""
    torch.manual_seed(seed)
    embed, head = (torch.randint(-2, 3, (vocab, rank)).bfloat16().to(DEVICE) for _ in range(2))
    logits = torch.randint(-9, 10, (rows, drafts, vocab)).float().to(DEVICE)
    return torch.randint(0, vocab, (rows,)).to(DEVICE), embed, head, logits


@pytest.mark.parametrize(("rows", "drafts", "vocab"), [(1, 5, 40), (5, 3, 163), (17, 2, 64), (70, 1, 33)])
def test_greedy_chains_are_the_references_with_ties(rows: int, drafts: int, vocab: int) -> None:
    anchors, embed, head, logits = chain_inputs(rows, drafts, vocab, 32, rows)
    logits[0, 0, 7] = logits[0, 0, vocab - 1] = torch.nan
    ids, embeddings = markov_chain(anchors, embed, head, logits)
    expected, its = reference.markov_chain(anchors, embed, head.float(), logits)
    assert ids.tolist() == expected.tolist() and ids[0, 0] == 7
    assert torch.equal(embeddings, its)


def test_a_chain_does_not_know_its_batch() -> None:
    anchors, embed, head, _ = chain_inputs(6, 3, 163, 32, 3)
    logits = torch.randn(6, 3, 163, generator=torch.manual_seed(0)).to(DEVICE)
    together = markov_chain(anchors, embed, head, logits)[0]
    assert markov_chain(anchors[4:5], embed, head, logits[4:5])[0].tolist() == together[4:5].tolist()


def test_drawn_chains_take_the_noise_of_the_targets_own_draw() -> None:
    rows, drafts, vocab = 5, 4, 163
    anchors, embed, head, _ = chain_inputs(rows, drafts, vocab, 32, 1)
    logits = (torch.randn(rows, drafts, vocab, generator=torch.manual_seed(2)) * 3).to(DEVICE)
    slots = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    heat = torch.tensor([0.0, 0.5, 1.0, 0.0, 40.0], device=DEVICE)
    key = tuple(torch.randint(0, 2**32, (5,), generator=torch.manual_seed(i)).to(DEVICE) for i in (4, 5))
    positions = torch.tensor([0, 17, 2**20, 3, 900], device=DEVICE)
    unused = torch.zeros(5, device=DEVICE)
    laws = RowLaws(slots, positions, heat, unused.long(), unused, unused, key[0], key[1])
    ids, _ = markov_chain(anchors, embed, head, logits, laws)
    greedy, _ = markov_chain(anchors, embed, head, logits, laws._replace(drawn=False))
    assert greedy.tolist() == markov_chain(anchors, embed, head, logits)[0].tolist() != ids.tolist()
    rules = np.where(heat[slots].cpu().numpy() > 0, Rule.COUPLED, Rule.GREEDY).astype(np.uint8)
    law = DraftLaw(rules, heat[slots], (key[0][slots], key[1][slots]))
    before = anchors
    for i in range(drafts):
        z = logits[:, i] + embed[before].float() @ head.float().T
        before = draw_drafts(z, law, positions + i, i + 1)
        assert ids[:, i].tolist() == before.tolist()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_which_drafts_are_verified_is_equal_in_every_tie(rows: int) -> None:
    torch.manual_seed(rows)
    for k in (1, 5):
        survivals = torch.randint(0, 4, (rows, k)).sort(1, descending=True).values / 4
        if rows > 2:
            survivals[1] = torch.nan
            survivals[2] = torch.tensor([torch.inf] + [0.0] * (k - 1))
        caps = torch.randint(0, k + 1, (rows,))
        for budget in (0, 1, int(caps.sum()) // 2, int(caps.sum()), 10**6):
            own = select_lengths(survivals.to(DEVICE), caps.to(DEVICE), torch.tensor([budget], device=DEVICE))
            assert own.tolist() == ranked_prefixes(survivals, caps, budget).tolist()
        every = select_lengths(survivals.to(DEVICE), caps.to(DEVICE), torch.tensor([-1], device=DEVICE))
        assert every.tolist() == plain_lengths(survivals, caps, None).tolist()


class _Drawn:
    """A target that has drawn already."""

    def __init__(self, ids: Tensor, valid: Tensor) -> None:
        self._ids, self._valid = ids, valid

    def draw(self, rows: Tensor) -> Tensor:
        return self._ids[rows]

    def finite(self, rows: Tensor) -> Tensor:
        return self._valid[rows]


def test_the_verdict_is_that_of_the_coupled_rule_and_is_booked() -> None:
    k, chunks, null_slot, width = 5, 40, 60, 64
    torch.manual_seed(0)
    lengths = torch.randint(0, k + 1, (chunks,))
    lengths[7] = lengths[39] = -1  # nobody's: no rows
    slots = torch.randperm(null_slot)[:chunks]
    slots[7] = slots[39] = null_slot
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), (lengths + 1).cumsum(0)))
    rows = int(bounds[-1])
    drawn, inputs = torch.randint(0, 2, (rows + 3,)), torch.randint(0, 2, (rows + 3,))
    logprobs, valid = torch.randn(rows + 3), torch.rand(rows + 3) < 0.95
    starts = torch.randint(0, 50, (null_slot + 1,))
    live = (lengths >= 0).nonzero()[:, 0]
    drafts = torch.zeros(chunks, k, dtype=torch.int64)
    for c in live.tolist():
        drafts[c, : lengths[c]] = inputs[bounds[c] + 1 : bounds[c + 1]]
    expected = verify(_Drawn(drawn, valid), bounds[:-1][live], lengths[live], drafts[live])  # type: ignore[arg-type]

    tokens = poisoned(null_slot, width, dtype=torch.int32)
    columns: Any = starts.to(DEVICE, copy=True), torch.full((null_slot + 1,), k, device=DEVICE)
    report = Report.of(poisoned(chunks, 3 + 3 * k + 2, dtype=torch.int32), k)
    given: Any = (each.to(DEVICE) for each in (inputs, drawn, logprobs, valid, slots, bounds))
    booked: Any = tokens, report, null_slot
    anchors = settle_coupled(*given, *columns, *booked)
    counts = expected.accepted + 1
    assert report.counts[live].tolist() == counts.tolist() and report.counts[7] == report.counts[39] == 0
    assert report.verified[live].tolist() == lengths[live].tolist()
    assert report.token_ids[live].tolist() == expected.token_ids.tolist()
    assert report.valid[live].bool().tolist() == expected.valid.tolist()
    last = bounds[:-1][live] + expected.accepted
    assert anchors[live].tolist() == drawn[last].tolist()
    own = slots[live]
    assert columns[0][own].tolist() == (starts[own] + counts).tolist() and columns[0][null_slot] == starts[null_slot]
    assert not columns[1][own].any()
    assert tokens[own, starts[own] + counts].tolist() == drawn[last].tolist()
    untouched = torch.ones(null_slot, width, dtype=torch.bool)
    untouched[own, starts[own] + counts] = False
    assert (tokens.cpu()[untouched] == torch.iinfo(torch.int32).max).all()
    for place, c in enumerate(live.tolist()):
        first, count = int(bounds[c]), int(counts[place])
        assert report.logprobs[c, :count].tolist() == logprobs[first : first + count].tolist()


@pytest.mark.parametrize("budget", [-1, 0, 4])
def test_rows_of_a_round_stand_where_the_columns_say(budget: int) -> None:
    k, null_slot, longest = 3, 6, 40
    lengths = torch.tensor([5, 0, 37, 38, 39, 9, 123])
    there = torch.tensor([3, 3, 3, 3, 3, 0, 3])
    limits = torch.tensor([100, 3, 100, 100, 100, 100, 100])
    survivals = torch.rand(7, k, generator=torch.manual_seed(1)).cumprod(1)
    tokens = torch.randint(0, 1000, (6, longest + 6), generator=torch.manual_seed(2)).int()
    slots, caps = torch.tensor([4, 0, 6, 5, 1, 6, 2]), torch.tensor([3, 2, 3, 3, 3, 3, 3])
    room = torch.minimum(limits, torch.tensor(longest))[slots] - lengths[slots] - 2
    most = torch.minimum(torch.minimum(caps, there[slots]), room).clamp(min=0)
    live = slots != null_slot
    most[~live] = 0
    assert most.tolist() == [0, 2, 0, 0, 1, 0, 1]
    chosen = plain_lengths(survivals[slots], most, None if budget < 0 else budget)
    counts = torch.where(live, 1 + chosen, 0)

    rows = StepRows(16, 7, null_slot, DEVICE)
    for buffer in (rows.token_ids, rows.positions, rows.slots, rows.row_starts, rows.floors, rows.chunk_rows):
        buffer.fill_(-77)
    order = torch.cat((torch.tensor([budget]), slots, caps)).to(DEVICE)
    columns: Any = [each.to(DEVICE) for each in (lengths, there, limits, survivals, tokens)] + [longest]
    fill_rows(rows, order, *columns)
    assert rows.chunk_slots.tolist() == slots.tolist()
    assert rows.chunk_rows.tolist() == [0, *counts.cumsum(0).tolist()]
    used = int(counts.sum())
    owner = torch.repeat_interleave(torch.arange(7), counts)
    starts = lengths[slots[owner]]
    positions = starts + torch.arange(used) - (counts.cumsum(0) - counts)[owner]
    nobody = [0] * (16 - used)
    assert rows.slots.tolist() == slots[owner].tolist() + [null_slot] * (16 - used)
    assert rows.row_starts.tolist() == starts.tolist() + nobody
    assert rows.positions.tolist() == positions.tolist() + nobody
    assert rows.token_ids.tolist() == tokens[slots[owner], positions].tolist() + nobody
    assert rows.floors.tolist() == [0] * 16
