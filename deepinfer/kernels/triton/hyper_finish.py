"""What follows the pass over the stream, for a program's columns and its share of the rows: sums become x with its FP8
codes, and coefficients (model specification 2.2, steps 2, 3 and 4)."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.reference.quant import FP8_GROUP, FP8_MAX
from deepinfer.kernels.triton.hyper_coefficients import put_coefficients
from deepinfer.kernels.triton.hyper_parts import MIXES
from deepinfer.kernels.triton.hyper_sums import SQUARES, WIDTH, most, total
from deepinfer.kernels.triton.hyper_values import rounded, widened
from deepinfer.kernels.triton.quantize import to_fp8

_WIDTH, _SQUARES, _MIXES = tl.constexpr(WIDTH), tl.constexpr(SQUARES), tl.constexpr(MIXES)
_GROUP, _FP8_MAX = tl.constexpr(FP8_GROUP), tl.constexpr(FP8_MAX)


@triton.jit
def _exponent(amax):
    """Biased exponent of Q8's scale for the largest of some values."""
    bits = (tl.maximum(amax, 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def load_collapsed(u, norm, unit, wide, live, D: tl.constexpr, U: tl.constexpr):
    """Columns of collapsed rows, which lie where x will, and their norm: bf16 [M, U], float32 [1, U]."""
    d = unit * U + tl.arange(0, U)[None, :]
    mask = live[:, None]
    if D % U != 0:
        mask = mask & (d < D)
    w = tl.load(norm + d, mask=d < D, other=0.0)
    return tl.load(u + wide * D + d, mask=mask, other=0.0), w


@triton.jit
def factors_of_rows(
    squares, row, live, rows, code_scale, place, norm_eps, dtype: tl.constexpr,
    D: tl.constexpr, SLOTS: tl.constexpr, PER: tl.constexpr, M: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """[M]: what values times norm are still to be multiplied with, and the exponent of a row's FP8 scale. Its largest
    value is the rounded product of the largest before, since rounding keeps the order."""
    stride = rows.to(tl.int64) * _SQUARES
    square = total(squares + rows + row, live, stride, SLOTS, PER, M)
    factor = tl.rsqrt(square / D + norm_eps)
    top = tl.zeros((M,), tl.int32)
    if QUANTIZE:
        largest = most(squares + 2 * rows + row, live, stride, SLOTS, PER)
        top = _exponent(widened(rounded(largest * factor, dtype)))
        if place == 0:
            tl.store(code_scale + row, (top << 23).to(tl.float32, bitcast=True), mask=live)
    return factor, top


@triton.jit
def put_normed(
    u, w, unit, wide, live, factor, top, x, codes, D: tl.constexpr, M: tl.constexpr, U: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    d = unit * U + tl.arange(0, U)[None, :]
    mask = live[:, None]
    if D % U != 0:
        mask = mask & (d < D)
    v = rounded(widened(u) * w * factor[:, None], x.dtype.element_ty)
    tl.store(x + wide * D + d, v, mask=mask)
    if QUANTIZE:
        v = tl.reshape(widened(v), (M, U // _GROUP, _GROUP))
        exponent = _exponent(tl.max(tl.abs(v), axis=2))  # [M, groups]
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = tl.minimum(tl.maximum(v * inverse[:, :, None], -_FP8_MAX), _FP8_MAX)
        # as `quantize.fold_tile`: codes of the group's scale, then moved to the row's
        shift = (tl.maximum(127 + exponent - top[:, None], 0) << 23).to(tl.float32, bitcast=True)
        folded = to_fp8(to_fp8(scaled).to(tl.float32) * shift[:, :, None])
        tl.store(codes + wide * D + d, tl.reshape(folded, (M, U)), mask=mask)


@triton.jit
def load_affine(scale, base):
    """What mixes are multiplied with and moved by: [32] each."""
    lane = tl.arange(0, _WIDTH)
    factors = tl.load(scale + tl.where(lane < 4, 0, tl.where(lane < 8, 1, 2)))
    return factors, tl.load(base + lane, mask=lane < _MIXES, other=0.0)


@triton.jit
def put_row_coefficients(
    first, mixes, squares, rows, factors, offsets, pre, post, comb, eps, norm_eps,
    D: tl.constexpr, SLOTS: tl.constexpr, PER: tl.constexpr, R: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Of rows first .. first + R - 1."""
    row = first + tl.arange(0, R)
    live = row < rows
    lane = tl.arange(0, R * _WIDTH)
    at = mixes + first.to(tl.int64) * _WIDTH + lane
    sums = total(at, first + lane // _WIDTH < rows, rows.to(tl.int64) * _WIDTH, SLOTS, PER, R * _WIDTH)
    square = total(squares + row, live, rows.to(tl.int64) * _SQUARES, SLOTS, PER, R)
    sums = tl.reshape(sums, (R, _WIDTH)) * tl.rsqrt(square / (4 * D) + norm_eps)[:, None]
    put_coefficients(sums * factors[None, :] + offsets[None, :], row, live, pre, post, comb, eps, ITERATIONS)
