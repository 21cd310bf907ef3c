"""Residual stream of several copies (mHC): mixing coefficients, Sinkhorn, collapse and expand.

Stream X is [N, H, D] (N tokens flattened, H copies) in the compute dtype; coefficients are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.sinkhorn import sinkhorn

__all__ = ["coefficients", "collapse_norm", "expand", "rms_norm", "sinkhorn"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dim in float32, result in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream [N, H, D] -> pre [N, H], post [N, H], comb logits [N, H, H] (row: source copy), all float32.

    fn is [(2 + H) * H, H * D]; in bf16 training it arrives as bf16, the only float32 rule bent during training.
    """
    n, h, _ = x.shape
    v = x.flatten(1)
    inv = torch.rsqrt(v.float().square().mean(-1, keepdim=True) + eps)
    m = (v @ fn.t().to(v.dtype)).float() * inv  # [N, (2+H)*H]
    pre = torch.sigmoid(m[:, :h] * scale[0] + base[:h]) + hc_eps
    post = 2 * torch.sigmoid(m[:, h : 2 * h] * scale[1] + base[h : 2 * h])
    comb = m[:, 2 * h :] * scale[2] + base[2 * h :]
    return pre, post, comb.view(n, h, h)


def collapse_norm(x: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weighted sum over the copies, rounded to the stream's dtype, then RMSNorm -> [N, D]."""
    u = sum(pre[:, j, None] * x[:, j].float() for j in range(x.shape[1])).to(x.dtype)
    return rms_norm(u, weight, eps)


def expand(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[k] * y + sum_j comb[j, k] * X[j] for every copy k -> new stream [N, H, D]."""
    out = post[:, :, None] * y[:, None, :].float()
    for j in range(x.shape[1]):
        out = out + comb[:, j, :, None] * x[:, None, j].float()
    return out.to(x.dtype)
