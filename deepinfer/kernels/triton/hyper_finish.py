"""What follows the pass over the stream: partial sums become the coefficients of mHC, and the collapsed rows are
normalised (model specification 2.2, steps 2, 3 and 4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from deepinfer.kernels.reference.quant import FP8_GROUP
from deepinfer.kernels.triton.quantize import Fp8Rows, fold_tile
from deepinfer.kernels.triton.runtime import INTERPRET, launch

WIDTH = 32  # columns of a partial sum: the 24 mixes of four copies, padded
_WIDTH = tl.constexpr(WIDTH)
_FP8_GROUP = tl.constexpr(FP8_GROUP)
WARPS = 8
COEFFICIENT_ROWS = (
    4  # of one program where few rows wait for it: two warps a row, whose lanes all hold its sixteen numbers
)
MANY_COEFFICIENT_ROWS = 32  # with four warps, eight lanes a row: an eighth of the instructions
BOTH, COEFFICIENTS_ONLY, ROWS_ONLY = 0, 1, 2  # what a launch does
_BOTH, _COEFFICIENTS_ONLY, _ROWS_ONLY = tl.constexpr(BOTH), tl.constexpr(COEFFICIENTS_ONLY), tl.constexpr(ROWS_ONLY)
# Up to here parts of columns leave the pass over the stream, so that all multiprocessors work on it, and one launch
# finishes, started while that runs; above it is groups, and two launches with registers for one thing each.
MOST_FINE_ROWS = 512


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
def _added_parts(pointers, mask, stride, LANES: tl.constexpr, PER_GROUP: tl.constexpr, X: tl.constexpr):
    """pointers [LANES, X] to the first part of every group; the next one is `stride` further -> sums [X].

    Groups are added in pairs of halves: two terms have one sum in any layout of threads, unlike eight.
    """
    part = tl.load(pointers, mask=mask, other=0.0)
    for place in tl.static_range(1, PER_GROUP):
        part += tl.load(pointers + place * stride, mask=mask, other=0.0)
    if LANES >= 16:
        part = tl.sum(tl.reshape(part, (2, 8, X)), axis=0)
    if LANES >= 8:
        part = tl.sum(tl.reshape(part, (2, 4, X)), axis=0)
    if LANES >= 4:
        part = tl.sum(tl.reshape(part, (2, 2, X)), axis=0)
    if LANES >= 2:
        part = tl.sum(tl.reshape(part, (2, 1, X)), axis=0)
    return tl.reshape(part, (X,))


@triton.jit
def _column(mixes, columns, k, scale, base):
    """Column k of mixes [R, 32], scaled and moved: [R], in every thread of a row."""
    picked = tl.sum(tl.where(columns[None, :] == k, mixes, 0.0), axis=1)
    return picked * tl.load(scale) + tl.load(base + k)


@triton.jit
def _reciprocal(x):
    """1 / x within a unit in the last place: one instruction of the chain of forty where a division takes nine."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _softmax(a, b, c, d, eps):
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    r = _reciprocal((a + b) + (c + d))
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@triton.jit
def _share(a, b, c, d, eps):
    """Four numbers over their sum."""
    r = _reciprocal(((a + b) + (c + d)) + eps)
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
    D: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, PER_GROUP: tl.constexpr, ITERATIONS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    row = block * R + tl.arange(0, R)
    live = row < rows
    columns = tl.arange(0, _WIDTH)
    group = tl.arange(0, LANES)[:, None]
    slot = (group * PER_GROUP).to(tl.int64) * rows  # of a group's first part, in rows
    place = tl.arange(0, R * _WIDTH)[None, :]
    at = (slot + block * R) * _WIDTH + place
    there = (group < GROUPS) & (block * R + place // _WIDTH < rows)
    sums = _added_parts(mixes + at, there, rows.to(tl.int64) * _WIDTH, LANES, PER_GROUP, R * _WIDTH)
    sums = tl.reshape(sums, (R, _WIDTH))
    there = (group < GROUPS) & live[None, :]
    square = _added_parts(squares + 2 * slot + row[None, :], there, rows.to(tl.int64) * 2, LANES, PER_GROUP, R)
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
    D: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, PER_GROUP: tl.constexpr, TILES: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, LANES)[:, None]
    at = 2 * (group * PER_GROUP).to(tl.int64) * rows + rows + row + tl.arange(0, 1)[None, :]
    square = tl.sum(_added_parts(squares + at, group < GROUPS, rows.to(tl.int64) * 2, LANES, PER_GROUP, 1), axis=0)
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


@triton.jit(do_not_specialize=["rows"])
def _finish_kernel(
    mixes, squares, u, scale, base, norm, x, codes, code_scale, pre, post, comb, rows, eps, norm_eps,
    D: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, PER_GROUP: tl.constexpr, ITERATIONS: tl.constexpr,
    R: tl.constexpr, TILES: tl.constexpr, QUANTIZE: tl.constexpr, ROLE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, R) if ROLE != _ROWS_ONLY else 0
    if CHAINED:
        gdc_wait()  # started early: what the kernel before writes is there from here on
    if ROLE == _COEFFICIENTS_ONLY or (ROLE == _BOTH and program < blocks):
        # first, because a chain of 2 x 20 sums and divisions takes longest
        _coefficients(
            program, mixes, squares, scale, base, pre, post, comb, rows, eps, norm_eps,
            D, GROUPS, LANES, PER_GROUP, ITERATIONS, R,
        )  # fmt: skip
    else:
        _norm_row(
            program - blocks, squares, u, norm, x, codes, code_scale, rows, norm_eps,
            D, GROUPS, LANES, PER_GROUP, TILES, QUANTIZE,
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
    together = rows <= MOST_FINE_ROWS
    blocks = triton.cdiv(rows, COEFFICIENT_ROWS if together else MANY_COEFFICIENT_ROWS)
    for role, programs in (
        ((BOTH, blocks + rows if rows else 0),)
        if together
        else (
            (COEFFICIENTS_ONLY, blocks),
            (ROWS_ONLY, rows),
        )
    ):
        launch(
            _finish_kernel,
            (programs,),
            *(parts.mixes, parts.squares, u, scale, base, norm, x),
            *(folded if folded is not None else (x, scale)),
            *(*found, rows, eps, norm_eps),
            D=width,
            GROUPS=parts.groups,
            LANES=triton.next_power_of_2(parts.groups),
            PER_GROUP=parts.per_group,
            ITERATIONS=iterations,
            R=COEFFICIENT_ROWS if together else MANY_COEFFICIENT_ROWS,
            TILES=triton.next_power_of_2(width // FP8_GROUP),
            QUANTIZE=quantize,
            ROLE=role,
            CHAINED=together and not INTERPRET.value,
            num_warps=4 if role == COEFFICIENTS_ONLY else WARPS,
            enable_fp_fusion=False,  # the same bits from every compilation
            **({"launch_pdl": True} if together and not INTERPRET.value else {}),
        )
    return x, folded, found
