"""The exact choice of entries and candidate blocks against kernels/reference/selection.py: equal in every case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from twins import DEVICE, poisoned

from deepinfer.kernels.reference import selection
from deepinfer.kernels.triton.index_plan import PASS, PLACE, UNIT, UNITS, IndexPlan, plan_rows
from deepinfer.kernels.triton.index_scores import score_memory
from deepinfer.kernels.triton.index_select import select_candidates, select_entries

CUDA = DEVICE.type == "cuda"
NEVER = float("-inf")


def planned(visible: list[int], topk: int, memory: int = 1 << 30) -> IndexPlan:
    positions = torch.tensor(visible, device=DEVICE) - 1
    slots = torch.arange(len(visible), device=DEVICE)
    most = max(visible)
    return plan_rows(
        positions, slots, positions, chunks=len(visible), ratio=1, topk=topk, max_entries=most, memory=memory
    )


def finite_order(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=NEVER, posinf=float("inf"), neginf=NEVER)


def put(rows: list[Tensor], plan: IndexPlan, number: int = 0) -> Tensor:
    """Scores of a pass and their maxima of 8 as the scores' kernel leaves them; everything else is NaN."""
    memory = score_memory(plan).fill_(float("nan"))
    for row, scores in enumerate(rows):
        units = int(plan.field(UNITS)[row])
        if units and int(plan.field(PASS)[row]) == number:
            place = int(plan.field(PLACE)[row]) * UNIT
            padded = pad(scores, (0, units * UNIT - len(scores)), value=NEVER)
            memory[place : place + units * UNIT] = padded
            best = finite_order(padded).view(-1, 8).amax(1)
            memory[plan.units * UNIT + place // 8 :][: len(best)] = best
    return memory


def expected_entries(rows: list[Tensor], topk: int) -> Tensor:
    whole = torch.full((len(rows), max(topk, *map(len, rows))), NEVER, device=DEVICE)
    for row, scores in enumerate(rows):
        whole[row, : len(scores)] = 0.0 if len(scores) <= topk else scores
    return selection.top_entries(whole, topk)


def expected_blocks(scores: Tensor, count: int) -> Tensor:
    mask = selection.candidate_mask(
        scores.unsqueeze(0), torch.tensor([len(scores)], device=DEVICE), block_size=8, topk_blocks=count
    )
    return pad(mask[0], (0, -len(scores) % 8)).view(-1, 8).any(1).nonzero().flatten()


def with_infinities(n: int) -> Tensor:
    scores, chance = torch.randn(n), torch.rand(n)
    scores[chance < 0.4] = float("inf")
    scores[chance < 0.2] = NEVER
    scores[chance < 0.05] = float("nan")
    return scores


SCORES: dict[str, Callable[[int], Tensor]] = {
    "random": torch.randn,
    "all zero": torch.zeros,
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, 0.0, -0.0),
    "negative": lambda n: -torch.rand(n) - 1,
    "few values": lambda n: torch.randint(-2, 3, (n,)).float(),
    "mostly zero": lambda n: torch.randn(n).relu() * (torch.rand(n) < 0.001),
    "rising": lambda n: torch.arange(n).float(),
    "falling": lambda n: -torch.arange(n).float(),
    "best ones side by side": lambda n: (torch.arange(n) // 8 % 50 == 7).float() * (1 + torch.rand(n)) - torch.rand(n),
    "neighbouring floats": lambda n: (torch.randint(0, 40, (n,)) + 0x3F800000).int().view(torch.float32),
    "whole range": lambda n: torch.exp2(torch.rand(n) * 250 - 125) * torch.randn(n).sign(),
    "infinities and NaN": with_infinities,
}


@pytest.mark.parametrize("kind", SCORES)
def test_chosen_entries_and_blocks_equal_the_reference(kind: str) -> None:
    """Lengths around every step of the pyramid (topk 16: 128, 1,024 and 8,192 entries), and one that fits whole."""
    torch.manual_seed(len(kind))
    topk, count = (512, 2048) if CUDA else (16, 32)
    lengths = [5, topk, topk + 1, 8 * topk, 8 * topk + 1, 40 * topk, 64 * topk, 64 * topk + 3, 530 * topk]
    lengths += [600 * topk - 7] if CUDA else []
    rows = [SCORES[kind](n).to(DEVICE) for n in lengths]
    plan = planned(lengths, topk)
    memory = put(rows, plan)
    entries = poisoned(len(rows), topk, dtype=torch.int32)
    select_entries(memory, plan, 0, entries)
    assert torch.equal(entries.long(), expected_entries(rows, topk))
    blocks = poisoned(len(rows), count, dtype=torch.int32)
    select_candidates(memory, plan, 0, blocks)
    for scores, chosen in zip(rows, blocks.long(), strict=True):
        many = -(-len(scores) // 8)
        if len(scores) <= topk or many <= count:  # all of them, whatever their scores
            wanted = torch.arange(min(many, count), device=DEVICE)
        else:
            wanted = expected_blocks(scores, count)
        missing = torch.isin(wanted, chosen).logical_not()
        assert not missing.any()
        found = chosen[chosen >= 0]
        assert (chosen[len(found) :] == -1).all() and (found.diff() > 0).all()
        if len(scores) <= topk or many <= count:
            assert len(found) == len(wanted)
        else:  # the reference's mask shows no block whose entries are all -inf
            padded = pad(finite_order(scores), (0, -len(scores) % 8), value=NEVER).view(-1, 8)
            extra = found[~torch.isin(found, wanted)]
            assert padded[extra].isneginf().all() and len(extra) <= 1


def test_a_row_of_another_pass_is_left_alone() -> None:
    torch.manual_seed(1)
    lengths = [700, 900, 800, 650]
    rows = [torch.randn(n).to(DEVICE) for n in lengths]
    plan = planned(lengths, 16, memory=4 * 1024)
    assert plan.passes > 1
    entries = poisoned(len(rows), 16, dtype=torch.int32)
    before = entries.clone()
    done = torch.zeros(len(rows), dtype=torch.bool, device=DEVICE)
    for number in range(plan.passes):
        select_entries(put(rows, plan, number), plan, number, entries)
        done |= plan.field(PASS) == number
        assert torch.equal(entries[~done], before[~done])
    assert torch.equal(entries.long(), expected_entries(rows, 16))


def test_too_many_entries_are_refused() -> None:
    rows = poisoned(1, 16, dtype=torch.int32)
    plan = planned([70_000], 16)
    with pytest.raises(ValueError, match="at most 65536"):
        select_entries(torch.empty(1, device=DEVICE), plan, 0, rows)
    with pytest.raises(ValueError, match="at most 16384"):
        select_candidates(torch.empty(1, device=DEVICE), plan, 0, poisoned(1, 32, dtype=torch.int32))
