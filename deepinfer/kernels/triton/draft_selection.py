"""Which drafts of a step are verified, on the device: the twin of `speculation/selection.py`, equal in every tie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import launch

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def chosen_lengths(survivals, rows, inside, caps, budget, count, DRAFTS: tl.constexpr, WIDTH: tl.constexpr):
    """int32 [R]: how many of each row's first caps[r] survivals are among the `budget` largest of all such, of equal
    ones first the lower column, then the lower row. budget < 0: no bound.

    survivals: pointer to float32 [.., DRAFTS]; rows int64 [R]: which of them; inside bool [R]; caps int32 [R]; count: a
    number above every row's place in R.
    """
    column = tl.arange(0, WIDTH)
    allowed = inside[:, None] & (column[None, :] < caps[:, None])
    value = tl.load(survivals + rows[:, None] * DRAFTS + column[None, :], mask=allowed, other=0.0)
    value = tl.where(value == value, value + 0.0, 0.0)
    key = tl.minimum(value, LARGEST_FLOAT).to(tl.int32, bitcast=True)  # ordered: survivals are at least 0
    place = column[None, :] * count + tl.arange(0, caps.shape[0])[:, None]
    total = tl.sum(tl.sum(allowed.to(tl.int32), axis=1), axis=0)
    everything = (budget < 0) | (budget >= total)
    # The smallest key above which there are fewer than `budget`: the last one taken.
    low, border = tl.full((), -1, tl.int32), tl.where(everything, -1, 0x7F7FFFFF).to(tl.int32)
    while low < border:
        middle = low + ((border - low) >> 1)
        above = tl.sum(tl.sum((allowed & (key > middle)).to(tl.int32), axis=1), axis=0)
        low = tl.where(above < budget, low, middle + 1)
        border = tl.where(above < budget, middle, border)
    room = budget - tl.sum(tl.sum((allowed & (key > border)).to(tl.int32), axis=1), axis=0)
    # Of the equal ones the first `room`: the smallest place below which there are enough.
    low, last = tl.zeros((), tl.int32), tl.where(everything, 0, WIDTH * count).to(tl.int32)
    while low < last:
        middle = (low + last) >> 1
        below = tl.sum(tl.sum((allowed & (key == border) & (place < middle)).to(tl.int32), axis=1), axis=0)
        low = tl.where(below >= room, low, middle + 1)
        last = tl.where(below >= room, middle, last)
    taken = allowed & ((key > border) | ((key == border) & (place < last)))
    return tl.sum((taken & ((budget > 0) | everything)).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["rows"])
def _select_kernel(
    survivals, caps, budget, lengths, rows,
    ROWS: tl.constexpr, DRAFTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    inside = row < rows
    own = tl.load(caps + row, mask=inside, other=0).to(tl.int32)
    chosen = chosen_lengths(survivals, row.to(tl.int64), inside, own, tl.load(budget).to(tl.int32), ROWS, DRAFTS, WIDTH)
    tl.store(lengths + row, chosen.to(tl.int64), mask=inside)


def select_lengths(survivals: Tensor, caps: Tensor, budget: Tensor) -> Tensor:
    """How many drafts of each request to verify, int64 [R]: as `speculation.selection.select_lengths`, with the budget
    on the device (int64 [1], negative = none). survivals float32 [R, k] at least 0, NaN counts as 0; caps int64 [R]."""
    rows, drafts = survivals.shape
    lengths = torch.empty(rows, dtype=torch.int64, device=survivals.device)
    launch(
        _select_kernel, (1,), survivals.contiguous(), caps, budget, lengths, rows,
        ROWS=triton.next_power_of_2(rows), DRAFTS=drafts, WIDTH=triton.next_power_of_2(drafts), num_warps=8,
    )  # fmt: skip
    return lengths
