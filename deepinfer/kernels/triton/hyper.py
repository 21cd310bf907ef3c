"""mHC of a sub-layer in one pass over the stream (model specification 2.2): take in the update of the sub-layer before,
write the stream, collapse it, and multiply it with fn, whose sums `hyper_finish.py` turns into coefficients.

Sums go up in a fixed order of columns: chunks of 64, ten chunks a group. The number of rows only decides whether sums
of chunks or of groups leave the kernel, so a row's bits do not depend on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.triton import hyper_finish, hyper_parts
from deepinfer.kernels.triton.hyper_finish import WIDTH, Partials, finish
from deepinfer.kernels.triton.hyper_parts import CHUNK, COPIES, fn_parts, load_parts, times_parts
from deepinfer.kernels.triton.quantize import Fp8Rows, row_warps
from deepinfer.kernels.triton.runtime import INTERPRET, launch

PER_GROUP = 10  # chunks: 640 columns, an eighth of 5120
# Rows of a tile, warps, stages of the pipeline. Measured on an H200, us of a pass with an update and two parts of fn:
# 384 rows 17.8 (64 rows and 8 warps about 25, 16 and 4 19.4), 64 rows 5.6; 4,096 rows 146 (64 and 8 178), 32,768 1,114.
FINE = (32, 4, 1)
COARSE = (32, 8, 2)
_WIDTH = tl.constexpr(WIDTH)
Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _weighted(v, x0, x1, x2, x3, c0, c1, c2, c3):
    """v + c0 x0 + .. + c3 x3 of rows, added in this order. Fused by hand: left to the compiler, which product joins
    which sum differs between two compilations, and with it a row's last bit."""
    v = tl.fma(c0[:, None], x0, v)
    v = tl.fma(c1[:, None], x1, v)
    v = tl.fma(c2[:, None], x2, v)
    return tl.fma(c3[:, None], x3, v)


@triton.jit
def _mixed(y, x0, x1, x2, x3, post, c0, c1, c2, c3, dtype: tl.constexpr):
    """One copy of the new stream."""
    return _weighted(post[:, None] * y, x0, x1, x2, x3, c0, c1, c2, c3).to(dtype)


@triton.jit
def _of_row(pointers, k: tl.constexpr, live):
    return tl.load(pointers + k, mask=live, other=0.0)


@triton.jit
def _chunk(
    chunk, stream, y, fn, out, u, at, wide, mask, pre, post, comb,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, UPDATE: tl.constexpr, PROJECT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """C columns of every copy of M rows -> products [4, 8, M], squares of the new stream [M], of the collapsed row."""
    dtype: tl.constexpr = stream.dtype.element_ty
    d = chunk * C + tl.arange(0, C)[None, :]
    at += d
    n0 = tl.load(stream + at, mask=mask, other=0.0)
    n1 = tl.load(stream + at + D, mask=mask, other=0.0)
    n2 = tl.load(stream + at + 2 * D, mask=mask, other=0.0)
    n3 = tl.load(stream + at + 3 * D, mask=mask, other=0.0)
    if UPDATE:
        v = tl.load(y + wide * D + d, mask=mask, other=0.0).to(tl.float32)
    if PROJECT:
        upper, lower = load_parts(fn, chunk, 4 * C, PARTS)
    if UPDATE:
        x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        n0 = _mixed(v, x0, x1, x2, x3, post[0], comb[0], comb[4], comb[8], comb[12], dtype)
        n1 = _mixed(v, x0, x1, x2, x3, post[1], comb[1], comb[5], comb[9], comb[13], dtype)
        n2 = _mixed(v, x0, x1, x2, x3, post[2], comb[2], comb[6], comb[10], comb[14], dtype)
        n3 = _mixed(v, x0, x1, x2, x3, post[3], comb[3], comb[7], comb[11], comb[15], dtype)
        tl.store(out + at, n0, mask=mask)
        tl.store(out + at + D, n1, mask=mask)
        tl.store(out + at + 2 * D, n2, mask=mask)
        tl.store(out + at + 3 * D, n3, mask=mask)
    if PROJECT:
        x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        collapsed = _weighted(tl.zeros((M, C), tl.float32), x0, x1, x2, x3, pre[0], pre[1], pre[2], pre[3]).to(dtype)
        tl.store(u + wide * D + d, collapsed, mask=mask)
        rounded = collapsed.to(tl.float32)
        squares = tl.sum(tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0))), axis=1)
        row_squares = tl.sum(rounded * rounded, axis=1)
        products = times_parts(upper, lower, n0, n1, n2, n3, M, 4 * C, PARTS)
    else:
        products = tl.zeros((4, 8, M), tl.float32)
        squares = tl.zeros((M,), tl.float32)
        row_squares = squares
    return products, squares, row_squares


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(
    stream, y, post, comb, pre, fn, out, u, mixes, squares, rows,
    D: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    UPDATE: tl.constexpr, PROJECT: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (part, tile): M rows, SPAN chunks of C columns of every copy."""
    if CHAINED:
        gdc_launch_dependents()  # the next kernel may start, and waits for this one's end
    place = tl.program_id(0)
    row = tl.program_id(1) * M + tl.arange(0, M)
    live = row < rows
    mask = live[:, None]
    wide = row.to(tl.int64)[:, None]
    at = wide * (4 * D)
    p = ()
    q = ()
    c = ()
    if PROJECT:
        for k in tl.static_range(4):
            p += (_of_row(pre + row * 4, k, live),)  # type: ignore[assignment]
    if UPDATE:
        for k in tl.static_range(4):
            q += (_of_row(post + row * 4, k, live),)  # type: ignore[assignment]
        for k in tl.static_range(16):
            c += (_of_row(comb + row * 16, k, live),)  # type: ignore[assignment]
    if SPAN == 1:
        sums, whole, collapsed = _chunk(
            place, stream, y, fn, out, u, at, wide, mask, p, q, c, D, M, C, UPDATE, PROJECT, PARTS
        )  # fmt: skip
    else:
        sums = tl.zeros((4, 8, M), tl.float32)
        whole = tl.zeros((M,), tl.float32)
        collapsed = tl.zeros((M,), tl.float32)
        for chunk in tl.range(place * SPAN, tl.minimum(place * SPAN + SPAN, CHUNKS), num_stages=STAGES):
            more, square, row_square = _chunk(
                chunk, stream, y, fn, out, u, at, wide, mask, p, q, c, D, M, C, UPDATE, PROJECT, PARTS
            )  # fmt: skip
            if PROJECT:
                sums += more
                whole += square
                collapsed += row_square
    if PROJECT:
        first = place.to(tl.int64) * rows
        to = (first + row)[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
        tl.store(mixes + to, tl.trans(tl.reshape(sums, (_WIDTH, M))), mask=mask)
        tl.store(squares + 2 * first + row, whole, mask=live)
        tl.store(squares + 2 * first + rows + row, collapsed, mask=live)


@triton.jit
def _collapse_kernel(
    stream, pre, norm, out, norm_eps, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    v = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(4):
        x = tl.load(stream + row * (4 * D) + copy * D + d, mask=inside, other=0.0).to(tl.float32)
        v += tl.load(pre + row * 4 + copy) * x
    u = v.to(out.dtype.element_ty)
    if NORM:
        v = u.to(tl.float32)
        w = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        u = (v * tl.rsqrt(tl.sum(v * v, axis=0) / D + norm_eps) * w).to(out.dtype.element_ty)
    tl.store(out + row * D + d, u, mask=inside)


def _advance(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor | None, fn: Tensor | None
) -> tuple[Tensor, Tensor, Partials]:
    """The new stream (the old one without an update), collapsed rows, sums. pre or fn None: the stream alone."""
    rows, copies, width = stream.shape
    if copies != COPIES or width % CHUNK:
        raise ValueError(f"a stream [N, {copies}, {width}]: these kernels take 4 copies and widths in steps of {CHUNK}")
    stream = stream.contiguous()
    project = pre is not None and fn is not None
    chunks = width // CHUNK
    fine = rows <= hyper_finish.MOST_FINE_ROWS
    span = 1 if fine else PER_GROUP
    groups = triton.cdiv(chunks, PER_GROUP)
    parts = triton.cdiv(chunks, span)
    # parts of a last group that has fewer than five are zero
    new = stream.new_zeros if fine and parts < groups * PER_GROUP else stream.new_empty
    slots = groups * PER_GROUP if fine else groups
    sums = Partials(
        new(slots, rows, WIDTH, dtype=torch.float32),
        new(slots, 2, rows, dtype=torch.float32),
        groups,
        PER_GROUP if fine else 1,
    )
    out = torch.empty_like(stream) if update is not None else stream
    u = stream.new_empty(rows, width) if project else stream
    y, post, comb = update if update is not None else (stream, sums.squares, sums.squares)
    tile, warps, stages = FINE if fine else COARSE
    launch(
        _advance_kernel,
        (parts, triton.cdiv(rows, tile)),
        *(stream, y.contiguous(), post.contiguous(), comb.contiguous()),
        *(pre.contiguous() if pre is not None else post, fn if fn is not None else stream),
        *(out, u, sums.mixes, sums.squares, rows),
        D=width,
        CHUNKS=chunks,
        M=tile,
        C=CHUNK,
        SPAN=span,
        UPDATE=update is not None,
        PROJECT=project,
        PARTS=hyper_parts.SPLIT,
        STAGES=stages,
        CHAINED=fine and project and not INTERPRET.value,
        num_warps=warps,
        enable_fp_fusion=False,  # see `_weighted`
    )
    return out, u, sums


def _step(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights, quantize: bool
) -> tuple[Step, Fp8Rows | None]:
    stream, u, sums = _advance(stream, update, pre, fn_parts(w))
    x, folded, found = finish(
        sums,
        u,
        w.scale,
        w.base,
        w.norm,
        iterations=w.iterations,
        eps=w.eps,
        norm_eps=w.norm_eps,
        quantize=quantize,
    )
    return (stream, x, *found), folded


def hyper_step(stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights) -> Step:
    """stream bf16 [N, 4, D], D a multiple of 64; update None or (y bf16 [N, D], post float32 [N, 4], comb float32
    [N, 4, 4]); pre float32 [N, 4] -> stream, x bf16 [N, D], pre, post, comb. Two launches up to 512 rows, else three.
    The mixes' error is `hyper_parts.SPLIT`'s."""
    return _step(stream, update, pre, w, quantize=False)[0]


def hyper_step_quantized(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights
) -> tuple[Step, Fp8Rows]:
    """`hyper_step`, and Q8 of x folded to one scale per row, in the same launches."""
    step, folded = _step(stream, update, pre, w, quantize=True)
    assert folded is not None
    return step, folded


def hyper_expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """stream bf16 [N, 4, D], y bf16 [N, D], post float32 [N, 4], comb float32 [N, 4, 4] -> bf16 [N, 4, D]."""
    return _advance(stream, (y, post, comb), None, None)[0]


def _collapse(stream: Tensor, pre: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    rows, _, width = stream.shape
    out = stream.new_empty(rows, width)
    launch(
        _collapse_kernel,
        (rows,),
        *(stream.contiguous(), pre.contiguous(), pre if norm is None else norm, out, eps),
        D=width,
        BLOCK=triton.next_power_of_2(width),
        NORM=norm is not None,
        num_warps=row_warps(width),
    )
    return out


def hyper_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: bf16 [N, 4, D], float32 [N, 4] -> bf16 [N, D]."""
    return _collapse(stream, pre, None, 0.0)


def hyper_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of it, times weight [D]."""
    return _collapse(stream, pre, weight, eps)
