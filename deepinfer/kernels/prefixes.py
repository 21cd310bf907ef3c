"""How long a prefix of each row is taken when the largest values of all rows are. Two versions with the same answer:
torch's for any device, without a host sync, and the CPU kernel, ten times as fast there (256 rows of 5: 145 -> 15 us,
one core), because at this size a call costs more than its work."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.select import cpu_twins


def top_prefixes(values: Tensor, caps: Tensor, count: int) -> Tensor:
    """values float32 [R, k], at least 0 and never rising along a row; caps int64 [R] -> int64 [R]: how many of each
    row's first caps[r] values are among the `count` largest of all such, of equal ones first the lower column, then the
    lower row. NaN counts as 0."""
    run = cpu.top_prefixes if cpu_twins(values.device, values.dtype) else ranked_prefixes
    return run(values, caps, count)


def ranked_prefixes(values: Tensor, caps: Tensor, count: int) -> Tensor:
    """The same for any device."""
    rows, k = values.shape
    allowed = torch.arange(k, device=values.device) < caps[:, None]
    order = values.nan_to_num(0.0).masked_fill(~allowed, -1.0).T.flatten().argsort(descending=True, stable=True)
    taken = torch.zeros(k * rows, dtype=torch.bool, device=values.device)
    taken[order[:count]] = True
    return (taken.view(k, rows).T & allowed).sum(1)
