"""Packed cache records: codes and scales of one record side by side in one row of bytes (spec/engine.md 2.1).

| record | codes | scales | bytes of D values | D = 512, 128 |
|---|---|---|---|---|
| window | e4m3, one byte a value | E8M0, one per 32 | D + D / 32 | 528 |
| compressed KV | e2m1, two a byte | e4m3, one per 16 | D / 2 + D / 16 | 288 |
| index key | e2m1, two a byte | E8M0, one per 32 | D / 2 + D / 32 | 68 |

These are the formats that the release's numerics round to before anything is stored, so values that went through the
matching `fake_quantize` come back as they were. Packing such values again must not round a second time; the one place
where that takes care is `pack_compressed`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference import quant


def window_bytes(size: int) -> int:
    return size + size // quant.FP8_GROUP


def compressed_bytes(size: int) -> int:
    return size // 2 + size // quant.FP4_KV_GROUP


def key_bytes(size: int) -> int:
    return size // 2 + size // quant.FP8_GROUP


def pack_window(kv: Tensor) -> Tensor:
    """[..., D] -> uint8 [..., D + D / 32]."""
    codes, scale = quant.quantize_fp8(kv)
    return torch.cat((codes.view(torch.uint8), quant.float_to_e8m0(scale)), dim=-1)


def unpack_window(record: Tensor) -> Tensor:
    """uint8 [..., D + D / 32] -> float32 [..., D]."""
    size = record.shape[-1] * 32 // 33
    codes, scale = record.split((size, record.shape[-1] - size), dim=-1)
    return quant.dequantize_fp8(codes.view(torch.float8_e4m3fn), quant.e8m0_to_float(scale))


def pack_compressed(kv: Tensor) -> Tensor:
    """[..., D] -> uint8 [..., D / 2 + D / 16].

    The e4m3 scales have denormals, where amax / 6 may round up so far that the largest code of a group is 4. Read back,
    such a group has the largest value 4 x scale, from which amax / 6 would find a smaller scale and lose it. So where
    amax / 4 gives the group exactly and amax / 6 does not, amax / 4 is its scale.
    """
    codes, scale = quant.quantize_fp4_e4m3(kv)
    values = kv.float().unflatten(-1, (-1, quant.FP4_KV_GROUP))
    wrong = (quant.dequantize_fp4(codes, scale).view(values.shape) != values).any(-1)
    if bool(wrong.any()):
        larger = (values.abs().amax(-1) / 4.0).to(torch.float8_e4m3fn).float()
        larger = torch.where(wrong & (larger > 0), larger, scale)
        again = quant.fp4_codes(values / larger.unsqueeze(-1)).flatten(-2)
        exact = (quant.dequantize_fp4(again, larger).view(values.shape) == values).all(-1)
        scale = torch.where(exact, larger, scale)
        codes = torch.where(exact.repeat_interleave(quant.FP4_KV_GROUP, -1), again, codes)
    return torch.cat((quant.pack_fp4(codes), scale.to(torch.float8_e4m3fn).view(torch.uint8)), dim=-1)


def unpack_compressed(record: Tensor) -> Tensor:
    """uint8 [..., D / 2 + D / 16] -> float32 [..., D]."""
    half = record.shape[-1] * 8 // 9
    codes, scale = record.split((half, record.shape[-1] - half), dim=-1)
    return quant.dequantize_fp4(quant.unpack_fp4(codes), scale.view(torch.float8_e4m3fn).float())


def pack_key(key: Tensor) -> Tensor:
    """[..., D] -> uint8 [..., D / 2 + D / 32]."""
    codes, scale = quant.quantize_fp4_e8m0(key)
    return torch.cat((quant.pack_fp4(codes), quant.float_to_e8m0(scale)), dim=-1)


def unpack_key(record: Tensor) -> Tensor:
    """uint8 [..., D / 2 + D / 32] -> float32 [..., D]."""
    half = record.shape[-1] * 16 // 17
    codes, scale = record.split((half, record.shape[-1] - half), dim=-1)
    return quant.dequantize_fp4(quant.unpack_fp4(codes), quant.e8m0_to_float(scale))


def window_values(pool_rows: Tensor) -> Tensor:
    """Rows of a window pool of any format as float32 values."""
    return unpack_window(pool_rows) if pool_rows.dtype == torch.uint8 else pool_rows.float()


def compressed_values(pool_rows: Tensor) -> Tensor:
    """Rows of a compressed KV pool of any format as float32 values."""
    return unpack_compressed(pool_rows) if pool_rows.dtype == torch.uint8 else pool_rows.float()


def key_values(pool_rows: Tensor) -> Tensor:
    """Rows of an index key pool: packed ones unpacked to float32, others as they are."""
    return unpack_key(pool_rows) if pool_rows.dtype == torch.uint8 else pool_rows
