"""Where the Triton kernels are tested: on the GPU, or in Triton's interpreter on a CPU; and how far off they may be."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.triton.runtime import INTERPRET

DEVICE = torch.device("cpu" if INTERPRET.value else "cuda")


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """What a kernel has to write over: NaN, or the largest number of a type that has none."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), device=DEVICE).to(dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype, device=DEVICE)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected| over all values, in float64. NaN stays NaN, so compare with `<`."""
    difference = (out.double().cpu() - expected.double().cpu()).norm()
    return float(difference / expected.double().cpu().norm().clamp_min(1e-300))
