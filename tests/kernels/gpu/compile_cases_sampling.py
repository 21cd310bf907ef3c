"""Sampling and drafting at the full vocabulary, for the compile test."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.triton import markov, sampling

VOCAB = 129280
META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def whole(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def laws(rows: int, slots: int = 65) -> sampling.RowLaws:
    numbers = empty(slots), whole(slots), empty(slots), empty(slots)
    return sampling.RowLaws(whole(rows), whole(rows), *numbers, whole(slots), whole(slots))


def sample(drawn: bool, truncated: bool, masked: bool = False) -> None:
    masks = {}
    if masked:
        masks = {"masks": empty(384, VOCAB // 32, dtype=torch.int32), "mask_rows": whole(384)}
    sampling.sample(empty(384, VOCAB), laws(384), drawn=drawn, truncated=truncated, **masks)


def chain(rows: int, drawn: bool) -> None:
    matrices = [empty(VOCAB, 256, dtype=torch.bfloat16) for _ in range(2)]
    markov.markov_chain(whole(rows), *matrices, empty(rows, 5, VOCAB), laws(rows) if drawn else None)


CASES: dict[str, Callable[[], None]] = {
    "greedy": lambda: sample(False, False),
    "drawn": lambda: sample(True, False),
    "truncated": lambda: sample(True, True),
    "truncated under masks": lambda: sample(True, True, True),
    "markov chain of 64": lambda: chain(64, False),
    "markov chain of 8": lambda: chain(8, False),
    "drawn markov chain of 64": lambda: chain(64, True),
}
WGMMA = {"markov chain of 64", "drawn markov chain of 64"}
