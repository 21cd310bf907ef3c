"""Kernels that start while the one before them still runs (programmatic dependent launch, sm_90).

A decode step is a chain of hundreds of kernels of a few microseconds; the next one's start, and its first weights from
memory, cost as much as some of them. A kernel that is launched with OVERLAP calls `start_next` first, may then fetch
what no kernel of a step writes (weights), and calls `wait_for_previous` before it reads or writes anything else.
Every program has to call it: the kernel after next relies on it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
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


@triton.jit
def prefetch(places, BYTES: tl.constexpr):
    """Asks for BYTES (a multiple of 16) of memory from each of the places (pointers, 16-byte aligned) on to be brought
    to the second-level cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [places.to(tl.int64), BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
