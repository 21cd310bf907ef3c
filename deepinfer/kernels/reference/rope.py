"""Rotary positions on the last dimensions of a vector, with YaRN for layers that read compressed KV (section 2.0)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope_frequencies(dim: int, base: float) -> Tensor:
    """Plain frequencies base^(-2i / dim), float32 [dim / 2]: layers of ratio 0."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def yarn_frequencies(
    dim: int, base: float, *, factor: float, original_length: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """YaRN frequencies, float32 [dim / 2]: fast pairs kept, slow pairs divided by `factor`, a ramp between.

    No attention factor goes with them: the release scales neither cos/sin nor the softmax.
    """

    def pair_of(rotations: float) -> float:  # the pair that turns `rotations` times over the original length
        return dim * math.log(original_length / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = rope_frequencies(dim, base)
    return plain / factor * ramp + plain * (1 - ramp)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Positions int [N] -> cos, sin float32 [N, dim / 2]; the angle is the float32 product position * frequency."""
    angle = positions.float().unsqueeze(-1) * frequencies
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `dim` values of x [N, D] or [N, heads, D]; adjacent values form a pair. Same dtype out.

    cos, sin: float32 [N, dim / 2]. `inverse` turns by the negative angle.
    """
    half = cos.shape[-1]
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [N, 1, dim / 2]
    if inverse:
        sin = -sin
    keep = x.shape[-1] - 2 * half
    even, odd = x[..., keep:].float().unflatten(-1, (half, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :keep], turned.to(x.dtype)), dim=-1)
