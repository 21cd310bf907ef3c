"""Compressed KV latents: one per token (ratio 1) or one per pair of tokens (ratio 2), before RoPE (section 2.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.norm import rms_norm


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Gated mean of the two tokens of a group. first, second: float32 [G, 2, D] (value row, gate row) -> [G, D].

    Per channel: a softmax over the two gates weighs the two values.
    """
    values = torch.stack((first[:, 0], second[:, 0]))  # [2, G, D]
    gates = torch.stack((first[:, 1], second[:, 1]))
    return (torch.softmax(gates, dim=0) * values).sum(0)


def compress_pairs(first: Tensor, second: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Latents of closed groups: pooled in float32, rounded to `dtype`, then normalised -> [G, D] in `dtype`."""
    return rms_norm(pool_pairs(first, second).to(dtype), norm, eps)
