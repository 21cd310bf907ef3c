"""How long a prefix of each row is taken when the largest values of all rows are. Two versions with the same answer:
torch's for any device, without a host sync, and numpy's for the CPU, five times as fast there (256 rows of 5: 145 -> 30
us, one core), because at this size a call costs more than its work."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def top_prefixes(values: Tensor, caps: Tensor, count: int) -> Tensor:
    """values float32 [R, k], at least 0 and never rising along a row; caps int64 [R] -> int64 [R]: how many of each
    row's first caps[r] values are among the `count` largest of all such, of equal ones first the lower column, then the
    lower row. NaN counts as 0."""
    if values.device.type == "cpu":
        return torch.from_numpy(_numpy(values.numpy(), caps.numpy(), count))
    return ranked_prefixes(values, caps, count)


def ranked_prefixes(values: Tensor, caps: Tensor, count: int) -> Tensor:
    """The same for any device."""
    rows, k = values.shape
    allowed = torch.arange(k, device=values.device) < caps[:, None]
    order = values.nan_to_num(0.0).masked_fill(~allowed, -1.0).T.flatten().argsort(descending=True, stable=True)
    taken = torch.zeros(k * rows, dtype=torch.bool, device=values.device)
    taken[order[:count]] = True
    return (taken.view(k, rows).T & allowed).sum(1)


def _numpy(values: npt.NDArray[np.float32], caps: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    if count <= 0:
        return np.zeros_like(caps)
    # The bits of floats from 0 on are ordered as the floats are. With the place below them no two keys are equal, and
    # the smallest key that is taken decides all.
    bits = np.ascontiguousarray(values).view(np.int32)
    columns, rank = _places(*values.shape)
    keys = (bits.astype(np.int64) << 32) + rank
    if bits.max(initial=0) > _INFINITY:
        keys = np.where(bits > _INFINITY, rank, keys)
    if caps.min(initial=values.shape[1]) < values.shape[1]:
        keys[columns >= caps[:, None]] = -1
    below = keys.size - count
    last = np.partition(keys, below, axis=None)[below] if below > 0 else 0
    taken = (keys >= max(last, 0)).view(np.int8)
    return (taken @ np.ones(taken.shape[1], np.int8)).astype(np.int64)  # a third of the time of sum(1)


_INFINITY = 0x7F800000  # bits; those of a NaN are larger


@functools.lru_cache(maxsize=512)
def _places(rows: int, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Column numbers [k], and a number [rows, k] for each place: the earlier in the order of ties, the larger."""
    columns = np.arange(k)
    return columns, rows * k - (columns * rows + np.arange(rows)[:, None])
