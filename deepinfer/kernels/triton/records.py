"""Packed cache records written on the device: latents in, bytes of `kernels/reference/records.py` out, at given rows.

A window record is Q8 per 32, a compressed record FP4 with an E4M3 scale per 16 (model specification 2.0 and 4.1). The
bytes are those of the reference's `pack_window` and `pack_compressed` of the values that its fake quantisers give: what
a cache holds does not depend on who wrote it. The one quotient is correctly rounded, because an approximate one moves
exact ties; the others are compared without being made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.quant import FP4_KV_GROUP, FP8_GROUP, FP8_MAX
from deepinfer.kernels.reference.records import compressed_bytes, window_bytes
from deepinfer.kernels.triton.quantize import to_fp8
from deepinfer.kernels.triton.runtime import launch

_FP8_GROUP = tl.constexpr(FP8_GROUP)
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP4_GROUP = tl.constexpr(FP4_KV_GROUP)
_FP4_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-9)  # six times e4m3's smallest denormal


def insert_window(latents: Tensor, pool: Tensor, rows: Tensor) -> None:
    """latents bf16 [N, D] (normed and rotated) as window records into pool uint8 [R, D + D / 32] at rows
    int [N]; -1 = written nowhere. No row twice."""
    _insert(_insert_window, latents, pool, rows, window_bytes(latents.shape[1]))


def insert_compressed(latents: Tensor, pool: Tensor, rows: Tensor) -> None:
    """latents bf16 [N, D] (rotated) as compressed records into pool uint8 [R, D / 2 + D / 16] at rows
    int [N]; -1 = written nowhere. No row twice."""
    _insert(_insert_compressed, latents, pool, rows, compressed_bytes(latents.shape[1]))


def _insert(kernel: triton.JITFunction, latents: Tensor, pool: Tensor, rows: Tensor, size: int) -> None:
    count, width = latents.shape
    if pool.dtype != torch.uint8 or pool.shape[1:] != (size,) or pool.stride(1) != 1:
        raise ValueError(f"pool {pool.dtype} {tuple(pool.shape)}: {width} values are a record of {size} bytes (uint8)")
    if width & (width - 1) or width < FP8_GROUP:
        raise ValueError(f"latents of {width} values: a power of two, at least {FP8_GROUP}, is served")
    if latents.dtype != torch.bfloat16 or latents.stride(1) != 1:
        raise ValueError(f"latents {latents.dtype}: bf16 with values side by side is served")
    if rows.shape != (count,):
        raise ValueError(f"{count} latents, but rows {tuple(rows.shape)}")
    options = {"WIDTH": width, "num_warps": max(1, width // 512)}  # 16 values a thread
    launch(kernel, (count,), latents, pool, rows, latents.stride(0), pool.stride(0), **options)


@triton.jit
def _insert_window(latents, pool, rows, latent_stride, record_bytes, WIDTH: tl.constexpr):
    GROUPS: tl.constexpr = WIDTH // _FP8_GROUP
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    if row >= 0:
        offsets = tl.arange(0, GROUPS)[:, None] * _FP8_GROUP + tl.arange(0, _FP8_GROUP)[None, :]
        v = tl.load(latents + n * latent_stride + offsets).to(tl.float32)
        store_window(v, pool + row * record_bytes, WIDTH)


@triton.jit
def store_window(v, record, WIDTH: tl.constexpr):
    """A latent's bf16 values as float32 [WIDTH / 32, 32] -> its window record, at a pointer."""
    GROUPS: tl.constexpr = WIDTH // _FP8_GROUP
    offsets = tl.arange(0, GROUPS)[:, None] * _FP8_GROUP + tl.arange(0, _FP8_GROUP)[None, :]
    codes, exponent = _quantize_fp8(tl.abs(v))  # what the release rounds to
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    # Packed like any values: a largest code of 224 becomes 448 under half the scale.
    codes, exponent = _quantize_fp8(codes.to(tl.float32) * scale[:, None])
    sign = ((v.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    tl.store(record + offsets, codes.to(tl.uint8, bitcast=True) | sign)
    tl.store(record + WIDTH + tl.arange(0, GROUPS), exponent.to(tl.uint8))


@triton.jit
def _quantize_fp8(magnitude):
    """float32 [GROUPS, 32], none negative -> e4m3 codes, and int32 [GROUPS] the biased exponents of the scales."""
    bits = (tl.maximum(tl.max(magnitude, axis=1), 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / scale, exact
    return to_fp8(tl.minimum(magnitude * inverse[:, None], _FP8_MAX)), exponent


@triton.jit
def _insert_compressed(latents, pool, rows, latent_stride, record_bytes, WIDTH: tl.constexpr):
    GROUPS: tl.constexpr = WIDTH // _FP4_GROUP
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    if row >= 0:
        offsets = tl.arange(0, GROUPS)[:, None] * _FP4_GROUP + tl.arange(0, _FP4_GROUP)[None, :]
        v = tl.load(latents + n * latent_stride + offsets).to(tl.float32)
        codes, scale = _quantize_fp4(v)  # what the release rounds to
        codes, scale = _pack_again(_magnitudes(codes) * scale[:, None], codes)
        low, high = tl.split(tl.reshape(codes, [GROUPS, _FP4_GROUP // 2, 2]))
        record = pool + row * record_bytes
        bytes_ = tl.arange(0, GROUPS)[:, None] * (_FP4_GROUP // 2) + tl.arange(0, _FP4_GROUP // 2)[None, :]
        tl.store(record + bytes_, (low | (high << 4)).to(tl.uint8))
        tl.store(record + WIDTH // 2 + tl.arange(0, GROUPS), to_fp8(scale).to(tl.uint8, bitcast=True))


@triton.jit
def _pack_again(magnitude, codes):
    """Magnitudes float32 [GROUPS, 16] that an FP4 group holds, and its codes with their signs -> codes and scales of
    the reference's `pack_compressed`. Where the e4m3 scale is a denormal, a group's largest code may be 4, and then
    amax / 6 may lose the group and amax / 4 finds it again."""
    again, scale = _quantize_fp4(magnitude)
    exact = _all(_magnitudes(again) * scale[:, None] == magnitude)
    larger = _e4m3(tl.max(magnitude, axis=1) / 4.0)  # exact quotient
    larger = tl.where(larger > 0.0, larger, scale)
    larger_codes = _fp4_code(magnitude, larger[:, None])
    found = _all(_magnitudes(larger_codes) * larger[:, None] == magnitude) & (exact == 0)
    again = tl.where(found[:, None], larger_codes, again)
    return again | (codes & 8), tl.where(found, larger, scale)


@triton.jit
def _quantize_fp4(v):
    """float32 [GROUPS, 16] -> codes int32 [GROUPS, 16] with the sign in bit 3, scales float32 [GROUPS] of e4m3."""
    amax = tl.maximum(tl.max(tl.abs(v), axis=1), _FP4_AMAX_FLOOR)
    scale = _e4m3(tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), _FP8_MAX))
    sign = (v.to(tl.int32, bitcast=True) >> 28) & 8
    return _fp4_code(tl.abs(v), scale[:, None]) | sign, scale


@triton.jit
def _fp4_code(magnitude, scale):
    """Magnitudes of bf16 values and their scales -> e2m1 codes 0..7 int32 of the quotients: to nearest, ties to the
    even code, saturating.

    No division: an edge between two codes times an e4m3 scale is exact, and a bf16 value that is not equal to it is
    at least 2^-9 of it away, much more than the rounding of a quotient could hide."""
    code = (magnitude > 0.25 * scale).to(tl.int32) + (magnitude >= 0.75 * scale).to(tl.int32)
    code += (magnitude > 1.25 * scale).to(tl.int32) + (magnitude >= 1.75 * scale).to(tl.int32)
    code += (magnitude > 2.5 * scale).to(tl.int32) + (magnitude >= 3.5 * scale).to(tl.int32)
    return code + (magnitude > 5.0 * scale).to(tl.int32)


@triton.jit
def _magnitudes(codes):
    """e2m1 codes (bit 3 ignored) -> 0, .5, 1, 1.5, 2, 3, 4, 6."""
    c = codes & 7
    return tl.where(c < 4, c * 0.5, tl.where(c < 6, c - 2, c * 2 - 8).to(tl.float32))


@triton.jit
def _e4m3(v):
    """float32 on e4m3's grid, to nearest, ties to even."""
    return to_fp8(v).to(tl.float32)


@triton.jit
def _all(condition):
    """bool [GROUPS, 16] -> bool [GROUPS]."""
    return tl.min(condition.to(tl.int32), axis=1) != 0
