"""What a timed kernel is: its inputs, its check, its limit and the peer to beat. One module per area fills a list.

A module `kernels_<area>.py` beside this file has a function `cases() -> list[KernelCase]`; `kernels.py` finds, checks
and times them. A case at its real shape takes a GPU; `cases()` itself must not touch one (`--list` runs anywhere).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from deepinfer.kernels.timing import Rates

L2_BYTES = 60 << 20  # of an H200: inputs that real life reads from memory must not stay here between two launches
MOST_COPIES = 32

AREAS = ("dense", "experts", "attention", "indexer", "hyper", "sampling")
Rate = Literal["fp8", "bf16", "copy"]


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs on the device.

    run(copy): launches the operation once on copy 0 <= copy < copies of the inputs; capturable in a CUDA graph, nothing
    allocated but through torch, and its result kept by the caller of torch's allocator as in real life.
    check(): runs once into poisoned outputs and returns the relative error |out - expected| / |expected| (0.0 or 1.0
    where results must be equal); None where the operation has nothing to compare (a copy, a peer).
    tolerance: the largest error that passes; NaN never does.
    """

    run: Callable[[int], object]
    copies: int = 1
    check: Callable[[], float | None] = lambda: None
    tolerance: float = math.inf


@dataclass(frozen=True)
class KernelCase:
    """One line of the table.

    shape: what a reader needs to repeat it, as {"m": 64, "n": 1792, "k": 5120}; peers build their inputs from it.
    bytes: that must move at least once for one launch (weights, records, activations in and out). flops: 2 a
    multiply-add of the product as defined, not of padding. rate: which matrix rate bounds the flops ("copy": none, only
    bytes count). target_us: what the project wants. peer_us, peer: a figure known before, of the same shape on an H200,
    and where it is from ("FlashMLA, issue 6"). peer_key: a name in `peers.PEERS`, run beside it where there are peers.
    """

    name: str
    area: str
    shape: dict[str, int]
    make: Callable[[torch.device], Prepared]
    bytes: int
    flops: int = 0
    rate: Rate = "copy"
    target_us: float | None = None
    peer_us: float | None = None
    peer: str = ""
    peer_key: str | None = None
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.area not in AREAS:
            raise ValueError(f"{self.name}: area {self.area!r} is not one of {', '.join(AREAS)}")
        if self.bytes <= 0 or self.flops < 0 or (self.flops > 0) != (self.rate != "copy"):
            raise ValueError(f"{self.name}: bytes > 0, and flops > 0 exactly where a matrix rate bounds them")


def limit_us(case: KernelCase, rates: Rates) -> float:
    """The least time that bytes and operations allow, whichever is longer, in microseconds."""
    return 1e6 * rates.seconds(case.bytes, case.flops, case.rate)


def bound(case: KernelCase, rates: Rates) -> str:
    """Which of the two it is: "bytes", or the name of the matrix rate."""
    return case.rate if rates.seconds(case.bytes, case.flops, case.rate) > rates.seconds(case.bytes) else "bytes"


def copies_beyond_cache(nbytes: int) -> int:
    """How many copies of inputs of this size (bytes read by one launch) make each launch find them in memory: together
    three times the second-level cache, at least 1 and at most 32."""
    return max(1, min(MOST_COPIES, math.ceil(3 * L2_BYTES / max(nbytes, 1)) + (nbytes < 3 * L2_BYTES)))
