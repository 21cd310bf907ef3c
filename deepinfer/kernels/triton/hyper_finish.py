"""What follows the pass over the stream: partial sums become the coefficients of mHC, and the collapsed rows are
normalised (model specification 2.2, steps 2, 3 and 4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.quant import FP8_GROUP
from deepinfer.kernels.triton.quantize import Fp8Rows, fold_tile
from deepinfer.kernels.triton.runtime import launch

WIDTH = 32  # columns of a partial sum: the 24 mixes of four copies, padded
_WIDTH = tl.constexpr(WIDTH)
_FP8_GROUP = tl.constexpr(FP8_GROUP)
COEFFICIENT_ROWS = 16  # of one program: 8 threads a row, which all hold its sixteen numbers


class Partials(NamedTuple):
    """Sums of one sub-layer over parts of the stream's columns, to be added in order: first within a group, then over
    groups. Whether a group comes as several parts or as their sum changes no bit."""

    mixes: Tensor  # float32 [groups * per_group, N, 32]: the stream times fn^T; columns 24 .. 31 are zero
    squares: Tensor  # float32 [groups * per_group, 2, N]: squares of all copies; squares of the collapsed row
    groups: int
    per_group: int


class Coefficients(NamedTuple):
    pre: Tensor  # float32 [N, 4]
    post: Tensor  # float32 [N, 4]
    comb: Tensor  # float32 [N, 4, 4], from, to


@triton.jit
def _ordered_sum(pointers, mask, zero, stride, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr):
    """zero: of the shape of the pointers."""
    total = zero
    for group in tl.static_range(GROUPS):
        part = zero
        for place in tl.static_range(PER_GROUP):
            part += tl.load(pointers + (group * PER_GROUP + place) * stride, mask=mask, other=0.0)
        total += part
    return total


@triton.jit
def _column(mixes, columns, k, scale, base):
    """Column k of mixes [R, 32], scaled and moved: [R], in every thread of a row."""
    picked = tl.sum(tl.where(columns[None, :] == k, mixes, 0.0), axis=1)
    return picked * tl.load(scale) + tl.load(base + k)


@triton.jit
def _softmax(a, b, c, d, eps):
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    r = 1.0 / ((a + b) + (c + d))
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@triton.jit
def _share(a, b, c, d, eps):
    """Four numbers over their sum."""
    r = 1.0 / (((a + b) + (c + d)) + eps)
    return a * r, b * r, c * r, d * r


@triton.jit
def _columns(m, eps):
    """Every column of the 4 x 4 matrix m (a tuple, row by row) over its sum."""
    m00, m10, m20, m30 = _share(m[0], m[4], m[8], m[12], eps)
    m01, m11, m21, m31 = _share(m[1], m[5], m[9], m[13], eps)
    m02, m12, m22, m32 = _share(m[2], m[6], m[10], m[14], eps)
    m03, m13, m23, m33 = _share(m[3], m[7], m[11], m[15], eps)
    return m00, m01, m02, m03, m10, m11, m12, m13, m20, m21, m22, m23, m30, m31, m32, m33


@triton.jit
def _rows(m, eps):
    """Every row over its sum."""
    m00, m01, m02, m03 = _share(m[0], m[1], m[2], m[3], eps)
    m10, m11, m12, m13 = _share(m[4], m[5], m[6], m[7], eps)
    m20, m21, m22, m23 = _share(m[8], m[9], m[10], m[11], eps)
    m30, m31, m32, m33 = _share(m[12], m[13], m[14], m[15], eps)
    return m00, m01, m02, m03, m10, m11, m12, m13, m20, m21, m22, m23, m30, m31, m32, m33


@triton.jit
def _coefficients(
    block, mixes, squares, scale, base, pre, post, comb, rows, eps, norm_eps,
    D: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, ITERATIONS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = block * R + tl.arange(0, R)
    live = row < rows
    columns = tl.arange(0, _WIDTH)
    at = row[:, None] * _WIDTH + columns[None, :]
    sums = _ordered_sum(mixes + at, live[:, None], tl.zeros((R, _WIDTH), tl.float32), rows * _WIDTH, GROUPS, PER_GROUP)
    square = _ordered_sum(squares + row, live, tl.zeros((R,), tl.float32), 2 * rows, GROUPS, PER_GROUP)
    sums = sums * tl.rsqrt(square / (4 * D) + norm_eps)[:, None]
    for k in tl.static_range(4):
        tl.store(pre + row * 4 + k, tl.sigmoid(_column(sums, columns, k, scale, base)) + eps, mask=live)
        gate = tl.sigmoid(_column(sums, columns, 4 + k, scale + 1, base))
        tl.store(post + row * 4 + k, 2.0 * gate, mask=live)
    m = ()
    for j in tl.static_range(4):
        at = 8 + 4 * j
        a = _column(sums, columns, at, scale + 2, base)
        b = _column(sums, columns, at + 1, scale + 2, base)
        c = _column(sums, columns, at + 2, scale + 2, base)
        d = _column(sums, columns, at + 3, scale + 2, base)
        m = m + _softmax(a, b, c, d, eps)
    m = _columns(m, eps)
    for _ in range(ITERATIONS - 1):
        m = _columns(_rows(m, eps), eps)
    for k in tl.static_range(16):
        tl.store(comb + row * 16 + k, m[k], mask=live)


@triton.jit
def _norm_row(
    row, squares, u, norm, x, codes, code_scale, rows, norm_eps,
    D: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, TILES: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    square = _ordered_sum(squares + rows + row, row < rows, 0.0, 2 * rows, GROUPS, PER_GROUP)
    factor = tl.rsqrt(square / D + norm_eps)
    at = tl.arange(0, TILES)[:, None] * _FP8_GROUP + tl.arange(0, _FP8_GROUP)[None, :]
    inside = at < D
    start = row.to(tl.int64) * D
    v = tl.load(u + start + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    y = (v * factor * w).to(x.dtype.element_ty)
    tl.store(x + start + at, y, mask=inside)
    if QUANTIZE:
        folded, top = fold_tile(y.to(tl.float32))
        tl.store(codes + start + at, folded, mask=inside)
        tl.store(code_scale + row, top)


@triton.jit
def _finish_kernel(
    mixes, squares, u, scale, base, norm, x, codes, code_scale, pre, post, comb, rows, eps, norm_eps,
    D: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, ITERATIONS: tl.constexpr,
    R: tl.constexpr, TILES: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, R)
    if program < blocks:  # first, because a chain of 2 x 20 sums and divisions takes longest
        _coefficients(
            program, mixes, squares, scale, base, pre, post, comb, rows, eps, norm_eps,
            D, GROUPS, PER_GROUP, ITERATIONS, R,
        )  # fmt: skip
    else:
        _norm_row(
            program - blocks, squares, u, norm, x, codes, code_scale, rows, norm_eps,
            D, GROUPS, PER_GROUP, TILES, QUANTIZE,
        )  # fmt: skip


def finish(
    parts: Partials,
    u: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    quantize: bool,
) -> tuple[Tensor, Fp8Rows | None, Coefficients]:
    """One launch. u bf16 [N, D]: collapsed rows, not normalised; scale float32 [3], base float32 [24], norm float32 [D]
    -> x bf16 [N, D] normalised, Q8 of it folded per row if asked for, the coefficients."""
    rows, width = u.shape
    x, new = torch.empty_like(u), u.new_empty
    folded = None
    if quantize:
        folded = Fp8Rows(new(rows, width, dtype=torch.float8_e4m3fn), new(rows, dtype=torch.float32))
    found = Coefficients(
        *(new(rows, *shape, dtype=torch.float32) for shape in ((4,), (4,), (4, 4))),
    )
    launch(
        _finish_kernel,
        (triton.cdiv(rows, COEFFICIENT_ROWS) + rows if rows else 0,),
        *(parts.mixes, parts.squares, u, scale, base, norm, x),
        *(folded if folded is not None else (x, scale)),
        *(*found, rows, eps, norm_eps),
        D=width,
        GROUPS=parts.groups,
        PER_GROUP=parts.per_group,
        ITERATIONS=iterations,
        R=COEFFICIENT_ROWS,
        TILES=triton.next_power_of_2(width // FP8_GROUP),
        QUANTIZE=quantize,
        num_warps=4,
    )
    return x, folded, found
