"""The pass of mHC over the stream (model specification 2.2): columns of rows are taken through the update of the
sub-layer before, written, collapsed, and multiplied with fn."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.hyper_parts import add_parts
from deepinfer.kernels.triton.hyper_values import rounded, widened


@triton.jit
def _weighted(v, x0, x1, x2, x3, c0, c1, c2, c3):
    """v + c0 x0 + .. + c3 x3 of rows, added in this order. Fused by hand: left to the compiler, which product joins
    which sum differs between two compilations, and with it a row's last bit."""
    v = tl.fma(c0[:, None], x0, v)
    v = tl.fma(c1[:, None], x1, v)
    v = tl.fma(c2[:, None], x2, v)
    return tl.fma(c3[:, None], x3, v)


@triton.jit
def mixed(y, x0, x1, x2, x3, post, c0, c1, c2, c3, dtype: tl.constexpr):
    """One copy of the new stream."""
    return rounded(_weighted(post[:, None] * y, x0, x1, x2, x3, c0, c1, c2, c3), dtype)


@triton.jit
def of_rows(pointers, COUNT: tl.constexpr, live):
    """COUNT numbers of every row: a tuple of [M]."""
    found = ()
    for k in tl.static_range(COUNT):
        found += (tl.load(pointers + k, mask=live, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def expanded(n0, n1, n2, n3, y, post, comb):
    """The new stream: four tiles [M, C]."""
    dtype: tl.constexpr = n0.dtype
    v = widened(y)
    x0, x1, x2, x3 = widened(n0), widened(n1), widened(n2), widened(n3)
    n0 = mixed(v, x0, x1, x2, x3, post[0], comb[0], comb[4], comb[8], comb[12], dtype)
    n1 = mixed(v, x0, x1, x2, x3, post[1], comb[1], comb[5], comb[9], comb[13], dtype)
    n2 = mixed(v, x0, x1, x2, x3, post[2], comb[2], comb[6], comb[10], comb[14], dtype)
    n3 = mixed(v, x0, x1, x2, x3, post[3], comb[3], comb[7], comb[11], comb[15], dtype)
    return n0, n1, n2, n3


@triton.jit
def load_copies(stream, at, mask, D: tl.constexpr):
    n0 = tl.load(stream + at, mask=mask, other=0.0)
    n1 = tl.load(stream + at + D, mask=mask, other=0.0)
    n2 = tl.load(stream + at + 2 * D, mask=mask, other=0.0)
    n3 = tl.load(stream + at + 3 * D, mask=mask, other=0.0)
    return n0, n1, n2, n3


@triton.jit
def store_copies(out, at, mask, n0, n1, n2, n3, D: tl.constexpr):
    tl.store(out + at, n0, mask=mask)
    tl.store(out + at + D, n1, mask=mask)
    tl.store(out + at + 2 * D, n2, mask=mask)
    tl.store(out + at + 3 * D, n3, mask=mask)


@triton.jit
def load_chunk(stream, y, chunk, wide, live, D: tl.constexpr, C: tl.constexpr, UPDATE: tl.constexpr):
    """C columns of M rows: four copies and the update (without one, a copy in its place), [M, C] each."""
    d = chunk * C + tl.arange(0, C)[None, :]
    mask = live[:, None]
    if D % (2 * C) != 0:
        mask = mask & (d < D)
    n0, n1, n2, n3 = load_copies(stream, wide * (4 * D) + d, mask, D)
    v = n0
    if UPDATE:
        v = tl.load(y + wide * D + d, mask=mask, other=0.0)
    return n0, n1, n2, n3, v


@triton.jit
def chunk_sums(
    tiles, parts, chunk, acc, squares, row_squares, largest, norm, out, u, wide, live, pre, post, comb,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, UPDATE: tl.constexpr, PARTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """What `load_chunk` gave and fn's parts of it, added to sums: products by parts [64, M], squares of the new stream
    [M], of the collapsed row [M]; and the largest |value times norm| of that [M]."""
    n0, n1, n2, n3, v = tiles
    dtype: tl.constexpr = n0.dtype
    d = chunk * C + tl.arange(0, C)[None, :]
    mask = live[:, None]
    if D % (2 * C) != 0:
        mask = mask & (d < D)
    if UPDATE:
        n0, n1, n2, n3 = expanded(n0, n1, n2, n3, v, post, comb)
        store_copies(out, wide * (4 * D) + d, mask, n0, n1, n2, n3, D)
    x0, x1, x2, x3 = widened(n0), widened(n1), widened(n2), widened(n3)
    collapsed = rounded(_weighted(tl.zeros((M, C), tl.float32), x0, x1, x2, x3, pre[0], pre[1], pre[2], pre[3]), dtype)
    tl.store(u + wide * D + d, collapsed, mask=mask)
    c = widened(collapsed)
    squares += tl.sum(tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0))), axis=1)
    row_squares += tl.sum(c * c, axis=1)
    if QUANTIZE:
        w = tl.load(norm + d, mask=d < D, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(c * w), axis=1))
    acc = add_parts(acc, parts[0], parts[1], n0, n1, n2, n3, M, 4 * C, PARTS)
    return acc, squares, row_squares, largest


@triton.jit
def products(acc, M: tl.constexpr):
    """Both parts of fn together: [64, M] -> [4, 8, M], 24 mixes and 8 zeros. A thread of wgmma has both."""
    return tl.sum(tl.reshape(acc, (4, 2, 8, M)), axis=1)
