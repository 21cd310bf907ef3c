"""The gathered scores of `index_scores.py` with explicit layouts, as `index_scores_hopper.py` has the paged ones.

A key's address takes three loads, one after the other: candidate, page, key. Each is made one tile before the next
needs it.
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
    there = (entry >= 0) & (entry < seen)
    return gl.load(table + entry // PER_BLOCK, mask=there, other=0).to(gl.int64)


@gluon.jit
def _fetch_rows(pool, entry, block, PER_BLOCK: gl.constexpr):
    """As `index_scores_hopper._fetch`, for 64 entries each in a block of its own."""
    base = block * (PER_BLOCK * 17)
    inside = gl.where(entry >= 0, entry, 0) % PER_BLOCK
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    scales = gl.load(pool + (base + PER_BLOCK * 16 + inside)[:, None] + group[None, :] * 0)
    row = gl.convert_layout(base + inside * 16, gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LOADED)))
    words = gl.load(pool + (row[:, None] + t[None, :] * 4).expand_dims(2) + w.expand_dims(0).expand_dims(0))
    return gl.convert_layout(words, WORDS), scales


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
    right, w = load_queries(codes, weights, row, 1, 1, MMA)
    zero = gl.zeros([KEYS, 32], gl.float32, layout=MMA)
    limit = seen + u * 0
    e0, e1 = _candidate(chosen, begin, offered), _candidate(chosen, begin + 1, offered)
    e2, e3 = _candidate(chosen, begin + 2, offered), _candidate(chosen, begin + 3, offered)
    x0, s0 = _fetch_rows(pool, e0, _page(table, e0, seen, PER_BLOCK), PER_BLOCK)
    x1, s1 = _fetch_rows(pool, e1, _page(table, e1, seen, PER_BLOCK), PER_BLOCK)
    block = _page(table, e2, seen, PER_BLOCK)
    running = warpgroup_mma(unpack(x0, s0, OPERAND), right, zero, use_acc=False, is_async=True)
    f0 = s0
    for tile in range(begin, end, 2):
        x0, s0 = _fetch_rows(pool, e2, block, PER_BLOCK)
        block = _page(table, e3, seen, PER_BLOCK)
        e4 = _candidate(chosen, tile + 4, offered)
        left = unpack(x1, s1, OPERAND)
        dots = warpgroup_mma_wait(0, deps=[running])
        other = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
        shown = (e0[:, None] >= 0) & (e0[:, None] < limit[None, :])
        finish(dots, f0, w, shown, tile, end, scores, maxima, there, 1, SUMS_1)
        f1 = s1
        x1, s1 = _fetch_rows(pool, e3, block, PER_BLOCK)
        block = _page(table, e4, seen, PER_BLOCK)
        e5 = _candidate(chosen, tile + 5, offered)
        left = unpack(x0, s0, OPERAND)
        dots = warpgroup_mma_wait(0, deps=[other])
        running = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
        shown = (e1[:, None] >= 0) & (e1[:, None] < limit[None, :])
        finish(dots, f1, w, shown, tile + 1, end, scores, maxima, there, 1, SUMS_1)
        f0 = s0
        e0 = e2
        e1 = e3
        e2 = e4
        e3 = e5
    warpgroup_mma_wait(0, deps=[running])


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
