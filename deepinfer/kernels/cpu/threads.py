"""How many threads the CPU kernels use, and who else may use them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lent = 0  # threads that torch gave up for the kernels; 0 = none, kernels take torch's number


def num_threads() -> int:
    """Threads of the next kernel."""
    return _lent or torch.get_num_threads()


@contextmanager
def lend_torch_threads() -> Iterator[None]:
    """Inside, the kernels have torch's threads and torch's own operations run on one.

    Two pools on the same cores wait for each other: between kernels torch's operations are too small to gain from
    threads, but its workers, once woken, keep spinning on the cores that the kernels' helpers need (a decode step of 32
    rows on 2 cores took 44 ms so, and 30 ms with this).
    """
    global _lent
    if _lent or torch.get_num_threads() == 1:
        yield
        return
    _lent = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_lent)
        _lent = 0
