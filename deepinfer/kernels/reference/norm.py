"""RMSNorm (section 2.0)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] any float dtype, weight [K] -> x * rsqrt(mean(x^2) + eps) * weight, float32 inside, x's dtype out."""
    v = x.float()
    scale = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return (v * scale * weight.float()).to(x.dtype)
