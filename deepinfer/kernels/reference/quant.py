"""The four number formats of the release: FP8 tiles and groups, FP4 groups with power-of-two or E4M3 scales.

Formulas: model specification section 2.0 (activations, records) and 3.1 (weights). A "fake" quantiser returns the
values that a record would hold, in the input's own dtype; bf16 holds every one of them exactly (an e2m1 value of 2
significant bits times an e4m3 scale of 4 needs 6 of bf16's 8).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FP8_GROUP = 32  # values that share one power-of-two scale, along the last dimension
FP4_KV_GROUP = 16  # values of a compressed record that share one E4M3 scale
WEIGHT_TILE = 32  # dense FP8 weights: one scale per 32 x 32 tile
FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
FP4_E8M0_AMAX_FLOOR = 6.0 * 2.0**-126  # smallest normal scale, 2^-126
FP4_E4M3_AMAX_FLOOR = 6.0 * 2.0**-9  # smallest e4m3 denormal, 2^-9

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Codes 0..7 as above, bit 3 is the sign.
FP4_TABLE = torch.tensor(_FP4_VALUES + tuple(-v for v in _FP4_VALUES))
# Midpoints between neighbouring magnitudes. A tie goes to the even code, so "greater than" at .25, 1.25, 2.5, 5
# (upper code odd) and "greater or equal" at .75, 1.75, 3.5 (upper code even).
_STRICT = torch.tensor([0.25, 1.25, 2.5, 5.0])
_INCLUSIVE = torch.tensor([0.75, 1.75, 3.5])


@cache
def _on(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The tables above on a device, copied once: a CUDA graph cannot copy them from the host."""
    return FP4_TABLE.to(device), _STRICT.to(device), _INCLUSIVE.to(device)


def _ceil_log2_scale(amax: Tensor, largest: float) -> Tensor:
    """2^ceil(log2(amax / largest)) from exponent bits: exponent, plus one when the mantissa is not zero. float32."""
    ratio = amax.float() * torch.full((), 1.0 / largest, dtype=torch.float32, device=amax.device)
    bits = ratio.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).int()  # amax > 0, so there is no sign bit
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def float_to_e8m0(scale: Tensor) -> Tensor:
    """Power-of-two float32 -> exponent byte (uint8), value = 2^(byte - 127)."""
    return (scale.float().view(torch.int32) >> 23).to(torch.uint8)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """E8M0 bytes (uint8 or float8_e8m0fnu, any shape) -> float32 2^(byte - 127). Byte 0 is the denormal 2^-127."""
    byte = scale.view(torch.uint8).int()
    return torch.where(byte > 0, byte << 23, 0x400000).view(torch.float32)


def _grouped(x: Tensor, group: int) -> Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"last dimension {x.shape[-1]} is not a multiple of the quantisation group {group}")
    return x.float().unflatten(-1, (-1, group))  # [..., groups, group]


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q8: [..., K] -> e4m3 codes [..., K] and float32 power-of-two scales [..., K / 32]. Section 2.0."""
    v = _grouped(x, FP8_GROUP)
    scale = _ceil_log2_scale(v.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR), FP8_MAX)
    codes = (v / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """e4m3 codes [..., K] and float32 scales [..., K / 32] -> float32 [..., K]."""
    return (codes.float().unflatten(-1, (-1, FP8_GROUP)) * scale.unsqueeze(-1)).flatten(-2)


def fake_quantize_fp8(x: Tensor) -> Tensor:
    """The values that an FP8 record of x holds, in x's dtype."""
    return dequantize_fp8(*quantize_fp8(x)).to(x.dtype)


def fp4_codes(v: Tensor) -> Tensor:
    """Scaled values -> e2m1 codes (uint8, bit 3 = sign), round to nearest, ties to the even code, saturating."""
    magnitude = v.abs()
    _, strict, inclusive = _on(v.device)
    code = torch.bucketize(magnitude, strict, right=False)  # boundaries strictly below the magnitude
    code += torch.bucketize(magnitude, inclusive, right=True)  # boundaries at or below it
    return (code + torch.signbit(v) * 8).to(torch.uint8)


def quantize_fp4_e8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries and keys: [..., K] -> unpacked e2m1 codes uint8 [..., K], power-of-two scales [..., K / 32]."""
    v = _grouped(x, FP8_GROUP)
    scale = _ceil_log2_scale(v.abs().amax(-1).clamp_min(FP4_E8M0_AMAX_FLOOR), FP4_MAX)
    return fp4_codes(v / scale.unsqueeze(-1)).flatten(-2), scale


def quantize_fp4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compressed KV: [..., K] -> unpacked e2m1 codes uint8 [..., K], float32 scales on the e4m3 grid [..., K / 16]."""
    v = _grouped(x, FP4_KV_GROUP)
    amax = v.abs().amax(-1).clamp_min(FP4_E4M3_AMAX_FLOOR)
    scale = (amax / FP4_MAX).clamp_max(FP8_MAX).to(torch.float8_e4m3fn).float()
    return fp4_codes(v / scale.unsqueeze(-1)).flatten(-2), scale


def dequantize_fp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Unpacked e2m1 codes [..., K] and float32 scales [..., groups] -> float32 [..., K]."""
    values = _on(codes.device)[0][codes.long()]
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)


def fake_quantize_fp4_e8m0(x: Tensor) -> Tensor:
    """The values that an index record of x holds, in x's dtype."""
    return dequantize_fp4(*quantize_fp4_e8m0(x)).to(x.dtype)


def fake_quantize_fp4_e4m3(x: Tensor) -> Tensor:
    """The values that a compressed KV record of x holds, in x's dtype."""
    return dequantize_fp4(*quantize_fp4_e4m3(x)).to(x.dtype)


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes uint8 [..., K] -> bytes uint8 [..., K / 2], even index in the low nibble."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes (uint8 or int8) [..., K / 2] -> codes uint8 [..., K]."""
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)


def dequantize_fp8_tiles(codes: Tensor, scale: Tensor) -> Tensor:
    """Dense weight: e4m3 [N, K] with E8M0 scales [ceil(N / 32), ceil(K / 32)] -> float32 [N, K]. Section 3.1."""
    rows, cols = codes.shape
    tiles = e8m0_to_float(scale)
    tiles = tiles.repeat_interleave(WEIGHT_TILE, 0)[:rows].repeat_interleave(WEIGHT_TILE, 1)[:, :cols]
    return codes.float().mul_(tiles)


def dequantize_fp4_groups(packed: Tensor, scale: Tensor) -> Tensor:
    """Expert weight: packed e2m1 [N, K / 2] (int8) with E8M0 scales [N, K / 32] -> float32 [N, K]. Section 3.1."""
    return dequantize_fp4(unpack_fp4(packed), e8m0_to_float(scale))
