"""The gathered scores of `index_scores.py` with explicit layouts, as `index_scores_hopper.py` has the paged ones.

A key's address takes three loads, one after the other: candidate, page, key. Keys are on their way for three tiles,
pages for two, candidates for four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from deepinfer.kernels.triton.index_plan import COST_END, PLACE, SEEN, SLOT, UNITS, VISIBLE
from deepinfer.kernels.triton.index_scores_hopper import (
    GROUPS,
    KEYS,
    LOADED,
    SUMS_1,
    WORDS,
    finish,
    first_row,
    load_queries,
    share,
    unpack,
)


@gluon.jit
def _candidate(chosen, tile, offered):
    """The entry of every key of a tile, int32 [64], negative where there is none."""
    i = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, GROUPS))
    return gl.load(chosen + i // 8, mask=i < offered, other=-1) * 8 + i % 8


@gluon.jit
def _page(table, entry, seen, PER_BLOCK: gl.constexpr):
    """The block of every entry, int32 [64]; the null block where there is none."""
    there = (entry >= 0) & (entry < seen)
    return gl.load(table + entry // PER_BLOCK, mask=there, other=0).to(gl.int32)


@gluon.jit
def _shown(entry, limit):
    return (entry[:, None] >= 0) & (entry[:, None] < limit[None, :])


@gluon.jit
def _fetch_rows(pool, entry, block, PER_BLOCK: gl.constexpr):
    """As `index_scores_hopper.fetch_keys`, for 64 entries each in a block of its own."""
    inside = entry & (PER_BLOCK - 1)
    base = pool + block.to(gl.int64) * (PER_BLOCK * 17)
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    scales = gl.load((base + PER_BLOCK * 16 + inside)[:, None] + group[None, :] * 0)
    row = gl.convert_layout(base + inside * 16, gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LOADED)))
    words = gl.load((row[:, None] + (t * 4)[None, :]).expand_dims(2) + w.expand_dims(0).expand_dims(0))
    return gl.convert_layout(words, WORDS), scales


@gluon.jit
def _start(x, scales, right, zero, OPERAND: gl.constexpr):
    return warpgroup_mma(unpack(x, scales, OPERAND), right, zero, use_acc=False, is_async=True)


@gluon.jit
def _gathered_row(
    codes, weights, pool, tables, candidates, plan, out, n, capacity, row, begin, end, table_stride, candidate_stride,
    PER_BLOCK: gl.constexpr,
):  # fmt: skip
    """Tiles begin .. end - 1 (begin < end) of a row's candidates."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    u = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    there = u == 0
    offered, seen = gl.load(plan + VISIBLE * n + row), gl.load(plan + SEEN * n + row)
    place = gl.load(plan + PLACE * n + row).to(gl.int64)
    scores, maxima = out + place * 128 + u * 0, out + capacity + place * 16 + u * 0
    table = tables + gl.load(plan + SLOT * n + row).to(gl.int64) * table_stride
    chosen = candidates + row.to(gl.int64) * candidate_stride
    limit = seen + u * 0
    e0, e1 = _candidate(chosen, begin, offered), _candidate(chosen, begin + 1, offered)
    e2, e3 = _candidate(chosen, begin + 2, offered), _candidate(chosen, begin + 3, offered)
    e4, e5 = _candidate(chosen, begin + 4, offered), _candidate(chosen, begin + 5, offered)
    e6, e7 = _candidate(chosen, begin + 6, offered), _candidate(chosen, begin + 7, offered)
    p0, p1 = _page(table, e0, seen, PER_BLOCK), _page(table, e1, seen, PER_BLOCK)
    p2, p3 = _page(table, e2, seen, PER_BLOCK), _page(table, e3, seen, PER_BLOCK)
    p4 = _page(table, e4, seen, PER_BLOCK)
    right, w = load_queries(codes, weights, row, 1, 1, MMA)
    x0, s0 = _fetch_rows(pool, e0, p0, PER_BLOCK)
    x1, s1 = _fetch_rows(pool, e1, p1, PER_BLOCK)
    x2, s2 = _fetch_rows(pool, e2, p2, PER_BLOCK)
    zero = gl.zeros([KEYS, 32], gl.float32, layout=MMA)
    for tile in range(begin, end, 4):
        x3, s3 = _fetch_rows(pool, e3, p3, PER_BLOCK)
        p5 = _page(table, e5, seen, PER_BLOCK)
        dots = warpgroup_mma_wait(0, deps=[_start(x0, s0, right, zero, OPERAND)])
        f = s0
        x0, s0 = _fetch_rows(pool, e4, p4, PER_BLOCK)
        p6 = _page(table, e6, seen, PER_BLOCK)
        e8 = _candidate(chosen, tile + 8, offered)
        finish(dots, f, w, _shown(e0, limit), tile, end, scores, maxima, there, 1, SUMS_1)
        dots = warpgroup_mma_wait(0, deps=[_start(x1, s1, right, zero, OPERAND)])
        f = s1
        x1, s1 = _fetch_rows(pool, e5, p5, PER_BLOCK)
        p7 = _page(table, e7, seen, PER_BLOCK)
        e9 = _candidate(chosen, tile + 9, offered)
        finish(dots, f, w, _shown(e1, limit), tile + 1, end, scores, maxima, there, 1, SUMS_1)
        dots = warpgroup_mma_wait(0, deps=[_start(x2, s2, right, zero, OPERAND)])
        f = s2
        x2, s2 = _fetch_rows(pool, e6, p6, PER_BLOCK)
        p4 = _page(table, e8, seen, PER_BLOCK)
        e10 = _candidate(chosen, tile + 10, offered)
        finish(dots, f, w, _shown(e2, limit), tile + 2, end, scores, maxima, there, 1, SUMS_1)
        dots = warpgroup_mma_wait(0, deps=[_start(x3, s3, right, zero, OPERAND)])
        e11 = _candidate(chosen, tile + 11, offered)
        finish(dots, s3, w, _shown(e3, limit), tile + 3, end, scores, maxima, there, 1, SUMS_1)
        e0, e1, e2, e3 = e4, e5, e6, e7
        e4, e5, e6, e7 = e8, e9, e10, e11
        p3 = p7


@gluon.jit
def gathered_scores_hopper(
    codes, weights, pool, tables, candidates, plan, header, out, n, capacity, number, table_stride, candidate_stride,
    PER_BLOCK: gl.constexpr,
):  # fmt: skip
    """`index_scores._gathered_scores`, argument for argument; codes as uint8."""
    position, last = share(header, number)
    if position < last:
        row = first_row(plan, position, n)
        while position < last:
            units = gl.load(plan + UNITS * n + row)
            behind = gl.load(plan + COST_END * n + row)
            if behind > position:
                begin = position - behind + units
                end = gl.minimum(last - behind + units, units)
                _gathered_row(
                    codes, weights, pool, tables, candidates, plan, out, n, capacity, row, 2 * begin, 2 * end,
                    table_stride, candidate_stride, PER_BLOCK,
                )  # fmt: skip
                position = behind
            row += 1
