"""Which drafts of the batch are verified when the step has room for so many: the likeliest, whosever they are."""

from __future__ import annotations

import torch
from torch import Tensor


def select_lengths(survivals: Tensor, caps: Tensor, budget: int | None) -> Tensor:
    """How many drafts of each request to verify, int64 [R]; they sum to `budget`, or to the caps if that is less.

    survivals float32 [R, k]: probability that draft i and all before it are accepted, never rising along a row; caps
    int64 [R], at most k. The budget goes to the largest survivals of all, and of equal ones to the lower draft index,
    then the lower row. So what is taken of a row is a prefix, and no draft is outranked by a later one of its own
    request: with a budget that was fixed before, whether a draft is verified cannot depend on what it is. No host sync.
    """
    if budget is None:
        return caps
    rows, k = survivals.shape
    index = torch.arange(k, device=survivals.device)
    allowed = index < caps[:, None]
    # A NaN says nothing for its draft, nor for those behind it.
    known = survivals.nan_to_num(0.0).cummin(1).values.masked_fill(~allowed, -1.0)
    order = known.T.flatten().argsort(descending=True, stable=True)  # by index, then by row
    taken = torch.zeros(k * rows, dtype=torch.bool, device=survivals.device)
    taken[order[:budget]] = True
    return (taken.view(k, rows).T & allowed).sum(1)
