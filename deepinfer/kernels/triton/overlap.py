"""Kernels that start while the one before them still runs (programmatic dependent launch, sm_90).

A decode step is a chain of hundreds of kernels of a few microseconds; starting the next one behind the last program of
the one before costs 0.5 to 1 us each (measured on an H200: from heads to wo_b's output at one row, four launches, 33 us
one behind the other and 30 so). A kernel that is launched with OVERLAP calls `wait_for_previous` before it reads or
writes anything, and `start_next` when little is left to do: short ones right behind the wait, products behind their
loop. Every program has to call `wait_for_previous`: the kernel after next relies on it.

Two things cost more than they gained: `start_next` before the wait (programs of the kernel after next pile up on the
processors that are free first: the same four launches took 38 us), and bringing the first weights to the cache before
the wait (8 % slower at 40 MB).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl  # noqa: F401  # the interpreter looks for it beside a kernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.kernels.triton.runtime import INTERPRET

OVERLAP: dict[str, Any] = {"launch_pdl": True}
"""Options for `launch` of a kernel that calls both functions."""


@triton.jit
def start_next():
    """The next kernel may start as soon as every program of this one has said so."""
    if not INTERPRET:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Waits until the kernel before has ended and its results can be read."""
    if not INTERPRET:
        gdc_wait()
