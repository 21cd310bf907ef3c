"""mHC of a sub-layer in one pass over the stream (model specification 2.2): take in the update of the sub-layer before,
write the stream, collapse it, and multiply it with fn, whose sums `hyper_finish.py` turns into coefficients.

The stream is exactly bfloat16, so float32 precision of the product takes only fn in three bfloat16 parts
(`split_fn`: what is left is below 2^-24 of a value) and float32 accumulators: three wgmma passes over a tile that is in
shared memory anyway. Sums go up in a fixed order of columns: chunks of 64, two chunks a part, five parts a group. The
number of rows only decides whether parts or groups leave the kernel, so a row's bits do not depend on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.triton.hyper_finish import WIDTH, Partials, finish
from deepinfer.kernels.triton.quantize import Fp8Rows, row_warps
from deepinfer.kernels.triton.runtime import INTERPRET, launch

COPIES = 4
CHUNK = 64  # columns of one product, of each copy
PER_GROUP = 10  # chunks: 640 columns, an eighth of 5120
MIXES = 24  # rows of fn
SPLIT = 3  # bfloat16 parts of a float32
TILE, WARPS, STAGES = 64, 8, 2
_WIDTH = tl.constexpr(WIDTH)
_MIXES = tl.constexpr(MIXES)
# Above, programs do a group each: with 64-row tiles and 8 groups 512 rows are 64 programs; up to here 40 parts of
# columns a tile keep all multiprocessors busy.
MOST_FINE_ROWS = 512

Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def split_fn(fn: Tensor) -> Tensor:
    """fn float32 [K, 24] -> bfloat16 [3, 24, K] whose sum over the first axis it is, up to 2^-24 of each value."""
    rest = fn.t()
    parts = []
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return torch.stack(parts).contiguous()


def fn_parts(w: HyperWeights) -> Tensor:
    """`split_fn` of the weights, made at the first call and kept with them (3.9 MB at 20480 x 24). Call it once before
    a graph is captured."""
    kept = vars(w)  # as functools.cached_property does, past the frozen fields
    if "_fn_parts" not in kept:
        kept["_fn_parts"] = split_fn(w.fn)
    return kept["_fn_parts"]


@triton.jit
def _times(fn, n, K: tl.constexpr, PARTS: tl.constexpr, acc):
    """acc [64, M] + fn's parts times n [M, C] of one copy. Row 16 i + 8 h + j is of mix 8 i + j: h = 0 the first and
    third part of fn, h = 1 the second, so that a thread of wgmma has both. fn: pointers to this copy's columns of part
    0, mix 0. The stream is the N side of wgmma: only there may it be computed and yet lie in shared memory, which
    leaves it in a layout that loads and stores 16 bytes."""
    lane = tl.arange(0, 64)[:, None]
    half = lane // 8 % 2
    mix = lane // 16 * 8 + lane % 8
    upper = tl.load(fn + (half * _MIXES + mix) * K, mask=mix < _MIXES, other=0.0)
    if INTERPRET:
        upper, n = upper.to(tl.float32), n.to(tl.float32)
    if PARTS == 3:
        lower = tl.load(fn + (2 * _MIXES + mix) * K, mask=(mix < _MIXES) & (half == 0), other=0.0)
        if INTERPRET:
            lower = lower.to(tl.float32)
        acc = tl.dot(lower, tl.trans(n), acc)
    return tl.dot(upper, tl.trans(n), acc)


@triton.jit
def _mixed(y, x0, x1, x2, x3, post, c0, c1, c2, c3, dtype: tl.constexpr):
    """One copy of the new stream."""
    v = post[:, None] * y + c0[:, None] * x0 + c1[:, None] * x1 + c2[:, None] * x2 + c3[:, None] * x3
    return v.to(dtype)


@triton.jit
def _advance_kernel(
    stream, y, post, comb, pre, fn, out, u, mixes, squares, rows, chunks,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, UPDATE: tl.constexpr,
    PROJECT: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (part, tile): M rows, SPAN chunks of C columns of every copy."""
    first = tl.program_id(0) * SPAN
    last = tl.minimum(first + SPAN, chunks)
    row = tl.program_id(1) * M + tl.arange(0, M)
    live = row < rows
    mask = live[:, None]
    dtype: tl.constexpr = stream.dtype.element_ty
    wide = row.to(tl.int64)
    if PROJECT:
        p0 = tl.load(pre + row * 4, mask=live, other=0.0)[:, None]
        p1 = tl.load(pre + row * 4 + 1, mask=live, other=0.0)[:, None]
        p2 = tl.load(pre + row * 4 + 2, mask=live, other=0.0)[:, None]
        p3 = tl.load(pre + row * 4 + 3, mask=live, other=0.0)[:, None]
    if UPDATE:
        q0 = tl.load(post + row * 4, mask=live, other=0.0)
        q1 = tl.load(post + row * 4 + 1, mask=live, other=0.0)
        q2 = tl.load(post + row * 4 + 2, mask=live, other=0.0)
        q3 = tl.load(post + row * 4 + 3, mask=live, other=0.0)
        c00 = tl.load(comb + row * 16, mask=live, other=0.0)
        c01 = tl.load(comb + row * 16 + 1, mask=live, other=0.0)
        c02 = tl.load(comb + row * 16 + 2, mask=live, other=0.0)
        c03 = tl.load(comb + row * 16 + 3, mask=live, other=0.0)
        c10 = tl.load(comb + row * 16 + 4, mask=live, other=0.0)
        c11 = tl.load(comb + row * 16 + 5, mask=live, other=0.0)
        c12 = tl.load(comb + row * 16 + 6, mask=live, other=0.0)
        c13 = tl.load(comb + row * 16 + 7, mask=live, other=0.0)
        c20 = tl.load(comb + row * 16 + 8, mask=live, other=0.0)
        c21 = tl.load(comb + row * 16 + 9, mask=live, other=0.0)
        c22 = tl.load(comb + row * 16 + 10, mask=live, other=0.0)
        c23 = tl.load(comb + row * 16 + 11, mask=live, other=0.0)
        c30 = tl.load(comb + row * 16 + 12, mask=live, other=0.0)
        c31 = tl.load(comb + row * 16 + 13, mask=live, other=0.0)
        c32 = tl.load(comb + row * 16 + 14, mask=live, other=0.0)
        c33 = tl.load(comb + row * 16 + 15, mask=live, other=0.0)
    # of a group, and of the part in it that is not finished
    group_mixes = tl.zeros((4, 8, M), tl.float32)
    group_stream = tl.zeros((M,), tl.float32)
    group_row = tl.zeros((M,), tl.float32)
    for chunk in tl.range(first, last, num_stages=STAGES):
        d = chunk * C + tl.arange(0, C)
        at = wide[:, None] * (4 * D) + d[None, :]
        n0 = tl.load(stream + at, mask=mask, other=0.0)
        n1 = tl.load(stream + at + D, mask=mask, other=0.0)
        n2 = tl.load(stream + at + 2 * D, mask=mask, other=0.0)
        n3 = tl.load(stream + at + 3 * D, mask=mask, other=0.0)
        if UPDATE:
            v = tl.load(y + wide[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
            x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
            n0 = _mixed(v, x0, x1, x2, x3, q0, c00, c10, c20, c30, dtype)
            n1 = _mixed(v, x0, x1, x2, x3, q1, c01, c11, c21, c31, dtype)
            n2 = _mixed(v, x0, x1, x2, x3, q2, c02, c12, c22, c32, dtype)
            n3 = _mixed(v, x0, x1, x2, x3, q3, c03, c13, c23, c33, dtype)
            tl.store(out + at, n0, mask=mask)
            tl.store(out + at + D, n1, mask=mask)
            tl.store(out + at + 2 * D, n2, mask=mask)
            tl.store(out + at + 3 * D, n3, mask=mask)
        if PROJECT:
            w = fn + d[None, :]
            acc = tl.zeros((64, M), tl.float32)
            acc = _times(w, n0, 4 * D, PARTS, acc)
            acc = _times(w + D, n1, 4 * D, PARTS, acc)
            acc = _times(w + 2 * D, n2, 4 * D, PARTS, acc)
            acc = _times(w + 3 * D, n3, 4 * D, PARTS, acc)
            x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
            collapsed = (p0 * x0 + p1 * x1 + p2 * x2 + p3 * x3).to(dtype)
            tl.store(u + wide[:, None] * D + d[None, :], collapsed, mask=mask)
            rounded = collapsed.to(tl.float32)
            group_mixes += tl.sum(tl.reshape(acc, (4, 2, 8, M)), axis=1)
            group_stream += tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, axis=1)
            group_row += tl.sum(rounded * rounded, axis=1)
    if PROJECT:
        place = tl.program_id(0).to(tl.int64) * rows
        sums = tl.trans(tl.reshape(group_mixes, (_WIDTH, M)))
        at = (place + row)[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
        tl.store(mixes + at, sums, mask=mask)
        tl.store(squares + 2 * place + row, group_stream, mask=live)
        tl.store(squares + 2 * place + rows + row, group_row, mask=live)


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
    fine = rows <= MOST_FINE_ROWS
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
    launch(
        _advance_kernel,
        (parts, triton.cdiv(rows, TILE)),
        *(stream, y.contiguous(), post.contiguous(), comb.contiguous()),
        *(pre.contiguous() if pre is not None else post, fn if fn is not None else stream),
        *(out, u, sums.mixes, sums.squares, rows, chunks),
        D=width,
        M=TILE,
        C=CHUNK,
        SPAN=span,
        UPDATE=update is not None,
        PROJECT=project,
        PARTS=SPLIT,
        STAGES=1 if fine else STAGES,
        num_warps=WARPS,
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
    [N, 4, 4]); pre float32 [N, 4] -> stream, x bf16 [N, D], pre, post, comb. Two launches. Mixes are within about 1e-6
    of float64's."""
    return _step(stream, update, pre, w, quantize=False)[0]


def hyper_step_quantized(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights
) -> tuple[Step, Fp8Rows]:
    """`hyper_step`, and Q8 of x folded to one scale per row, in the same two launches."""
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
