"""Numeric formats of the checkpoint and the caches: exact rounding, straight-through fake quantisation, packing.

Formats: E4M3 values with a power-of-two scale (E8M0 byte, value 2^(byte-127)); E2M1 values with an E8M0 scale per 32
or an E4M3 scale per 16. "Fake" functions return the dequantised value in the input's dtype; their gradient is identity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def ceil_pow2(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal float32 x (exponent bits, plus one if the mantissa is not 0)."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value of float32 x, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value (0, .5, 1, 1.5, 2, 3, 4, 6) of float32 x, ties to the even code, saturating at 6."""
    a = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (-1, size))


def act_fp8(x: Tensor) -> Tensor:
    """Q8: E4M3 with a power-of-two scale per 32 values of the last dim."""
    g = _groups(x, 32)
    scale = ceil_pow2(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / E4M3_MAX))
    return (round_e4m3(g / scale) * scale).flatten(-2).to(x.dtype)


def act_fp4_e8m0(x: Tensor) -> Tensor:
    """Q4 of index queries and keys: E2M1 with a power-of-two scale per 32 values."""
    g = _groups(x, 32)
    scale = ceil_pow2(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) * (1 / E2M1_MAX))
    return (round_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)


def act_fp4_e4m3(x: Tensor) -> Tensor:
    """Q4 of compressed KV: E2M1 with an E4M3 scale per 16 values."""
    g = _groups(x, 16)
    scale = round_e4m3(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / E2M1_MAX)
    return (round_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)


# ---------------------------------------------------------------------- weights: (values on the grid, scales)


def quant_fp8_tiles(w: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] -> E4M3-grid values [..., N, K] and scales [..., N/32, K/32], one per 32x32 tile."""
    tiles = w.float().unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32))  # [..., N/32, 32, K/32, 32]
    amax = tiles.abs().amax((-3, -1), keepdim=True).clamp(min=1e-20)
    scale = ceil_pow2(amax / E4M3_MAX)
    return round_e4m3(tiles / scale).flatten(-2).flatten(-3, -2), scale[..., :, 0, :, 0]


def quant_fp8_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, K] -> E4M3-grid values and scales [rows, K/32]."""
    g = _groups(w, 32)
    scale = ceil_pow2(g.abs().amax(-1, keepdim=True).clamp(min=1e-20) / E4M3_MAX)
    return round_e4m3(g / scale).flatten(-2), scale[..., 0]


def quant_fp4_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> E2M1-grid values and power-of-two scales [..., K/32].

    Of the scale that covers the largest value and half of it (which saturates), the one with less squared error.
    """
    g = _groups(w, 32)
    wide = ceil_pow2(g.abs().amax(-1, keepdim=True).clamp(min=1e-20) / E2M1_MAX)
    narrow = wide * 0.5
    error = [((round_e2m1(g / s) * s - g) ** 2).sum(-1, keepdim=True) for s in (wide, narrow)]
    scale = torch.where(error[1] < error[0], narrow, wide)
    return round_e2m1(g / scale).flatten(-2), scale[..., 0]


def dequant_tiles(q: Tensor, scale: Tensor) -> Tensor:
    """Inverse of quant_fp8_tiles."""
    return q * scale.repeat_interleave(32, -2).repeat_interleave(32, -1)[..., : q.shape[-2], : q.shape[-1]]


def dequant_rows(q: Tensor, scale: Tensor) -> Tensor:
    """Inverse of quant_fp8_rows and quant_fp4_rows."""
    return q * scale.repeat_interleave(32, -1)


def weight_fp8(w: Tensor) -> Tensor:
    """Dequantised FP8 tiles of w."""
    return dequant_tiles(*quant_fp8_tiles(w))


def weight_fp8_rows(w: Tensor) -> Tensor:
    """Dequantised FP8 rows of w."""
    return dequant_rows(*quant_fp8_rows(w))


def weight_fp4(w: Tensor) -> Tensor:
    """Dequantised FP4 rows of w."""
    return dequant_rows(*quant_fp4_rows(w))


# ---------------------------------------------------------------------- straight-through


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, quantise: Callable[[Tensor], Tensor]) -> Tensor:
        return quantise(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight(x: Tensor, quantise: Callable[[Tensor], Tensor]) -> Tensor:
    """quantise(x) with the gradient of x."""
    return _Straight.apply(x, quantise)


# ---------------------------------------------------------------------- bytes


def pack_fp4(q: Tensor) -> Tensor:
    """E2M1-grid values [..., K] -> int8 [..., K/2]; the low nibble holds the even k, bit 3 of a nibble is the sign."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=q.device)
    code = torch.searchsorted(grid, q.abs().contiguous()).to(torch.uint8) | (torch.signbit(q).to(torch.uint8) << 3)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Inverse of pack_fp4, float32."""
    byte = packed.view(torch.uint8)
    code = torch.stack([byte & 15, byte >> 4], -1).flatten(-2).long()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=packed.device)
    return torch.where(code >= 8, -grid[code & 7], grid[code & 7])


def scale_bytes(scale: Tensor) -> Tensor:
    """Power-of-two scales -> float8_e8m0fnu."""
    byte = (scale.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return byte.view(torch.float8_e8m0fnu)


def scale_values(scale: Tensor) -> Tensor:
    """float8_e8m0fnu -> float32."""
    return (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
