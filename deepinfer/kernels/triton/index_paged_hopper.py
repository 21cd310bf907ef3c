"""The paged scores of `index_scores.py` on Hopper: rows of a group, six at most, share the unpacking of their keys.

Six rows are a product of 128 columns (four rows) and one of 64 (two): 192 is no power of two. While one of them runs,
relu, weights and sums of the other are worked out and the next keys unpacked, so that neither has to wait long. Their
sums take 96 registers a thread; weights lie in shared memory, else two programs would not fit on a multiprocessor.
Never are both products under way: the assembler would run them one by one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from deepinfer.kernels.triton.index_plan import COST_END, COUNT, PLACE, SLOT, UNITS, VISIBLE
from deepinfer.kernels.triton.index_scores_hopper import (
    GROUPS,
    KEYS,
    SUMS_1,
    SUMS_2,
    SUMS_4,
    block_of,
    fetch_keys,
    finish,
    first_row,
    group_scores,
    load_queries,
    share,
    shown_entries,
    unpack,
)
from deepinfer.kernels.triton.index_warm_hopper import AHEAD, key_blocks, warm_keys

_M4 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_M2 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_W4 = gl.constexpr(gl.SliceLayout(0, _M4.value))
_W2 = gl.constexpr(gl.SliceLayout(0, _M2.value))
_O4 = gl.constexpr(gl.DotOperandLayout(0, _M4.value, 4))
_O2 = gl.constexpr(gl.DotOperandLayout(0, _M2.value, 4))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _start_two(left, right, zero):
    """The product of the last two rows, from the operand of the first four."""
    left = gl.convert_layout(left, _O2, assert_trivial=True)
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _six_rows(
    codes, weights, pool, tables, plan, out, n, capacity, row, count, begin, end, table_stride,
    PER_BLOCK: gl.constexpr,
):  # fmt: skip
    """Tiles begin .. end - 1 (begin < end, a whole number of pairs) of a group of five or six rows from `row` on."""
    u = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    all4 = u >= 0
    inside2 = u // 2 < count - 4
    there2 = inside2 & (u % 2 == 0)
    seen4 = gl.load(plan + VISIBLE * n + row + u)
    seen2 = gl.load(plan + VISIBLE * n + row + 4 + u // 2, mask=inside2, other=0)
    place4 = gl.load(plan + PLACE * n + row + u).to(gl.int64)
    place2 = gl.load(plan + PLACE * n + row + 4 + u // 2, mask=there2, other=0).to(gl.int64)
    scores4, maxima4 = out + place4 * 128, out + capacity + place4 * 16
    scores2, maxima2 = out + place2 * 128, out + capacity + place2 * 16
    most = gl.maximum(gl.max(seen4, 0), gl.max(seen2, 0))
    table = tables + gl.load(plan + SLOT * n + row).to(gl.int64) * table_stride
    x0, f0 = fetch_keys(pool, block_of(table, begin, most, PER_BLOCK), begin, PER_BLOCK)
    x1, s1 = fetch_keys(pool, block_of(table, begin + 1, most, PER_BLOCK), begin + 1, PER_BLOCK)
    block = block_of(table, begin + 2, most, PER_BLOCK)
    for pair in gl.static_range(1, AHEAD // 2):
        warm_keys(pool, key_blocks(table, begin + 2 * pair, most, PER_BLOCK), PER_BLOCK)
    ahead = key_blocks(table, begin + AHEAD, most, PER_BLOCK)
    right4, w4 = load_queries(codes, weights, row, 4, 4, _M4)
    right2, w2 = load_queries(codes, weights, row + 4, count - 4, 2, _M2)
    kept4 = gl.allocate_shared_memory(gl.float32, [128], _PLAIN, w4)
    kept2 = gl.allocate_shared_memory(gl.float32, [64], _PLAIN, w2)
    zero4 = gl.zeros([KEYS, 128], gl.float32, layout=_M4)
    zero2 = gl.zeros([KEYS, 64], gl.float32, layout=_M2)
    left = unpack(x0, f0, _O4)
    dots4 = warpgroup_mma_wait(0, deps=[warpgroup_mma(left, right4, zero4, use_acc=False, is_async=True)])
    run2 = _start_two(left, right2, zero2)
    x0, s0 = fetch_keys(pool, block, begin + 2, PER_BLOCK)
    block = block_of(table, begin + 3, most, PER_BLOCK)
    shown = shown_entries(begin, seen4)
    finish(dots4, f0, kept4.load(_W4), shown, begin, end, scores4, maxima4, all4, 4, SUMS_4)
    for tile in range(begin, end, 2):
        warm_keys(pool, ahead, PER_BLOCK)
        ahead = key_blocks(table, tile + AHEAD + 2, most, PER_BLOCK)
        # Under way: the product of this tile's last two rows.
        left = unpack(x1, s1, _O4)
        dots2 = warpgroup_mma_wait(0, deps=[run2])
        run4 = warpgroup_mma(left, right4, zero4, use_acc=False, is_async=True)
        shown = shown_entries(tile, seen2)
        finish(dots2, f0, kept2.load(_W2), shown, tile, end, scores2, maxima2, there2, 2, SUMS_2)
        f1 = s1
        x1, s1 = fetch_keys(pool, block, tile + 3, PER_BLOCK)
        block = block_of(table, tile + 4, most, PER_BLOCK)
        dots4 = warpgroup_mma_wait(0, deps=[run4])
        other2 = _start_two(left, right2, zero2)
        shown = shown_entries(tile + 1, seen4)
        finish(dots4, f1, kept4.load(_W4), shown, tile + 1, end, scores4, maxima4, all4, 4, SUMS_4)
        left = unpack(x0, s0, _O4)
        dots2 = warpgroup_mma_wait(0, deps=[other2])
        run4 = warpgroup_mma(left, right4, zero4, use_acc=False, is_async=True)
        shown = shown_entries(tile + 1, seen2)
        finish(dots2, f1, kept2.load(_W2), shown, tile + 1, end, scores2, maxima2, there2, 2, SUMS_2)
        f0 = s0
        x0, s0 = fetch_keys(pool, block, tile + 4, PER_BLOCK)
        block = block_of(table, tile + 5, most, PER_BLOCK)
        dots4 = warpgroup_mma_wait(0, deps=[run4])
        run2 = _start_two(left, right2, zero2)
        shown = shown_entries(tile + 2, seen4)  # of the next round, or none of the range
        finish(dots4, f0, kept4.load(_W4), shown, tile + 2, end, scores4, maxima4, all4, 4, SUMS_4)
    warpgroup_mma_wait(0, deps=[run2])


@gluon.jit
def paged_scores_hopper(
    codes, weights, pool, tables, plan, header, out, n, capacity, number, table_stride,
    PER_BLOCK: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """`index_scores._paged_scores`, argument for argument; codes as uint8."""
    position, last = share(header, number)
    if position < last:
        row = first_row(plan, position, n)
        while position < last:
            count = gl.load(plan + COUNT * n + row)
            units = gl.load(plan + UNITS * n + row)
            behind = gl.load(plan + COST_END * n + row)
            if behind > position:
                cost = 1
                if WIDTH > 1:
                    cost = gl.where(count > 4, 4, gl.where(count > 2, 3, 2))
                zero = behind - units * cost
                begin = (position - zero + cost - 1) // cost
                end = gl.minimum((last - zero + cost - 1) // cost, units)
                if begin < end:
                    if WIDTH == 1:
                        group_scores(
                            codes, weights, pool, tables, plan, out, n, capacity, row, count, 2 * begin, 2 * end,
                            table_stride, PER_BLOCK, 1, SUMS_1,
                        )  # fmt: skip
                    elif count > 4:
                        if WIDTH > 4:  # known when this is compiled, and always so here
                            _six_rows(
                                codes, weights, pool, tables, plan, out, n, capacity, row, count, 2 * begin, 2 * end,
                                table_stride, PER_BLOCK,
                            )  # fmt: skip
                    elif count > 2:
                        group_scores(
                            codes, weights, pool, tables, plan, out, n, capacity, row, count, 2 * begin, 2 * end,
                            table_stride, PER_BLOCK, 4, SUMS_4,
                        )  # fmt: skip
                    else:
                        group_scores(
                            codes, weights, pool, tables, plan, out, n, capacity, row, count, 2 * begin, 2 * end,
                            table_stride, PER_BLOCK, 2, SUMS_2,
                        )  # fmt: skip
                position = behind
            row += gl.maximum(count, 1)
