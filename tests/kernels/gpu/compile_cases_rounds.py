"""What padded steps do besides the model's layers, at the released sizes, for the compile test."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfer.kernels.triton.replicas import copy_replicas

META = torch.device("meta")


def replicas() -> None:
    pool = torch.empty(43, 65 * 134 + 384, 528, dtype=torch.uint8, device=META)
    kept = torch.empty(40, 2 * 65 * 128, 528, dtype=torch.uint8, device=META)
    numbers = [torch.empty(size, dtype=torch.int64, device=META) for size in (384, 64, 65)]
    copy_replicas(pool, kept, *numbers, 64, window=128, ring=134)


CASES: dict[str, Callable[[], object]] = {"replicas": replicas}
