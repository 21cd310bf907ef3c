"""Matrix products (section 2.0). Weights arrive dequantised to float32; what differs is the activation's rounding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.reference.quant import fake_quantize_fp8


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] @ weight [N, K]^T, float32 accumulation, x's dtype out: the BF16 linear, or the plain float32 one."""
    return F.linear(x.float(), weight.float()).to(x.dtype)


def quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear whose weight is stored in FP8 or FP4 (given here as float32 [N, K]).

    A float32 x means the parity mode: no rounding. Any other dtype means the official numerics: x is rounded to FP8 in
    groups of 32 first. The sum over K runs in float32; its order is free (at most 1 bf16 ulp, golden_official README).
    """
    if x.dtype.itemsize < 4:
        x = fake_quantize_fp8(x)
    return linear(x, weight)
