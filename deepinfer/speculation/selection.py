"""Which drafts of the batch are verified when the step has room for so many: the likeliest, whosever they are."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.prefixes import top_prefixes


def select_lengths(survivals: Tensor, caps: Tensor, budget: int | None) -> Tensor:
    """How many drafts of each request to verify, int64 [R]; they sum to `budget`, or to the caps if that is less.

    survivals float32 [R, k]: probability that draft i and all before it are accepted, never rising along a row; caps
    int64 [R], at most k. The budget goes to the largest survivals of all, and of equal ones to the lower draft index,
    then the lower row. So what is taken of a row is a prefix, and no draft is outranked by a later one of its own
    request: with a budget that was fixed before, whether a draft is verified cannot depend on what it is. A NaN counts
    as 0, as does what follows it in a product. No host sync.
    """
    if budget is None:
        return caps
    return top_prefixes(survivals, caps, budget)
