"""Exact choice of the best entries, and of the candidate blocks, from scores and the maxima of their blocks.

Ties go to the lower position, as in kernels/reference/selection.py. The choice goes down a pyramid of maxima over 512,
64 and 8 entries, and keeps k blocks at every level, the lower one where two are equal. Nothing is lost: were a chosen
entry in a block that is not kept, the k kept ones would hold k entries that are better, or equal and lower. So every
level looks at 8 k values at most, all in registers, whatever the scores are; no buffer can overflow.

Inside a level: the k-th largest value by narrowing an interval of integers that are ordered like the scores (two counts
a round; it ends as soon as exactly k values lie above its lower end), then one running sum that gives every winner its
place. Positions come out ascending.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.index_plan import PASS, PLACE, SEEN, UNIT, VISIBLE, IndexPlan
from deepinfer.kernels.triton.index_scores import write
from deepinfer.kernels.triton.runtime import launch

_UNIT = tl.constexpr(UNIT)
BLOCK_ENTRIES = 8
_LOWEST = tl.constexpr(-2139095041)  # order key of -inf: not selectable
_FIRST = tl.constexpr(2139095040)  # order key of +inf, which a block that is forced in counts as


def select_entries(
    scores: Tensor, plan: IndexPlan, number: int, entries: Tensor, candidates: Tensor | None = None, **meta: int
) -> None:
    """Rows of pass `number`: the best `plan.topk` of their scores (`index_scores.score_memory`) -> entries int32
    [N, topk], ascending, -1 = empty. Also writes the maxima of 64 and 512 entries that it needs.

    candidates int32 [N, blocks], ascending, -1 = empty: choose inside these blocks. The scores of a gathered plan are
    theirs alone, and are turned into entries by them; of others, it looks at what the list names.
    """
    n, k = entries.shape
    size = triton.next_power_of_2(8 * k)
    blocks = 0 if candidates is None else candidates.shape[1]
    listed = 0 if plan.gathered or not blocks else max(triton.next_power_of_2(blocks), 16)
    if plan.offered > 512 * size or listed > size:
        raise ValueError(f"the best {k} of {plan.offered} entries: at most {512 * size} are served")
    launch(
        _select, (n,), scores, plan.rows, entries, entries if candidates is None else candidates, n,
        plan.units * UNIT, number, 0 if candidates is None else candidates.stride(0), blocks, K=k, SIZE=size, BASE=0,
        GATHERED=plan.gathered, LISTED=listed, TOPK=k, **{"num_warps": 4} | meta,
    )  # fmt: skip


def select_candidates(scores: Tensor, plan: IndexPlan, number: int, blocks: Tensor, **meta: int) -> None:
    """Rows of pass `number`, after `select_entries`: the best blocks of 8 entries -> blocks int32 [N, K], ascending,
    -1 = empty. A block's score is its best visible entry; the block of the newest one is always among them."""
    n, k = blocks.shape
    size = triton.next_power_of_2(8 * k)
    if plan.offered > 64 * size or k < plan.topk:
        raise ValueError(
            f"the best {k} blocks of {plan.offered} entries: at most {64 * size} are served, at least the "
            f"best {plan.topk} blocks"
        )
    launch(
        _select, (n,), scores, plan.rows, blocks, blocks, n, plan.units * UNIT, number, 0, 0, K=k, SIZE=size, BASE=1,
        GATHERED=False, LISTED=0, TOPK=plan.topk, **{"num_warps": 8} | meta,
    )  # fmt: skip


@triton.jit
def _order(x):
    """float32 -> int32 in the same order; -0 = 0, NaN as -inf."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x == x, key, _LOWEST)


@triton.jit
def _kth(key, low, high, K: tl.constexpr):
    """key int32 [R, 8]; low: no winner is below; high: none is above. -> the k-th largest (`low` where there are not k)
    and how many keys are at least that.

    Two counts a round. Their places come from the counts so far, as if keys lay evenly, every other time; else they cut
    the interval in three, so that no distribution takes more than 40 rounds. Random scores take 6 on average."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    count = tl.sum((key >= low.to(tl.int32)).to(tl.int32))
    above = 0  # keys above `high`
    even = 1
    while (count > K) & (low < high):
        span = high - low
        a, b = low + (span + 2) // 3, low + 2 * ((span + 2) // 3)
        if even == 0:
            inside = (count - above).to(tl.float32)
            share = (count - K + 0.5) / inside
            slack = 1.2 * tl.sqrt(share * tl.maximum(1.0 - share, 0.0) / inside) + 0.3 / inside
            length = span.to(tl.float32)
            a, b = low + (length * (share - slack)).to(tl.int64), low + (length * (share + slack)).to(tl.int64)
        even = 1 - even
        a = tl.minimum(tl.maximum(a, low + 1), high)
        b = tl.minimum(tl.maximum(b, a), high)
        # Two counts in one number: there are at most 16,384 keys.
        both = (key >= a.to(tl.int32)).to(tl.int32) + ((key >= b.to(tl.int32)).to(tl.int32) << 16)
        both = tl.sum(both)
        above_a, above_b = both & 0xFFFF, both >> 16
        if above_b >= K:
            low, count = b, above_b
        else:
            high, above = b - 1, above_b
            if above_a >= K:
                low, count = a, above_a
            else:
                high, above = a - 1, above_a
    return low.to(tl.int32), count


@triton.jit
def _range(key):
    """The least and the best key that can be selected: no round of the search is spent on where there is nothing."""
    high = tl.maximum(tl.max(key), _LOWEST + 1)
    return tl.minimum(tl.min(tl.where(key > _LOWEST, key, high)), high), high


@triton.jit
def _put_winners(key, index, low, high, mine, K: tl.constexpr):
    """Of positions `index` int32 [R, 8], those of the best K keys -> mine [K], in the order of the keys' places. -> how
    many they are, and what no winner is below inside of the blocks that they stand for."""
    low, count = _kth(key, low, high, K)
    # The winners: all above `low`, and of those equal to it the first ones.
    above = (key > low).to(tl.int32)
    counts = above + ((key == low).to(tl.int32) << 16)
    blocks = tl.sum(counts, 1)
    ends = tl.cumsum(blocks, 0)
    before = tl.cumsum(counts, 1) + (ends - blocks)[:, None]
    room = K - (tl.sum(blocks, 0) & 0xFFFF)
    equals = before >> 16
    wins = (above > 0) | ((key == low) & (equals <= room))
    place_of = (before & 0xFFFF) + tl.minimum(equals, room) - 1
    tl.debug_barrier()  # everyone has read what stood here
    write(mine + place_of, index, wins)
    tl.debug_barrier()
    low = tl.where(count < K, _LOWEST + 1, low)  # fewer blocks than K say nothing about the entries in them
    return tl.minimum(count, K), low


@triton.jit
def _pool_maxima(source, target, count, STEP: tl.constexpr, WHOLE: tl.constexpr):
    """target[i] = max(source[8 i .. 8 i + 7]) for the `count` values of source, and -inf up to the next multiple of 8.
    WHOLE: all 8 can be read everywhere, with -inf where there is nothing; then loads are wide ones."""
    for base in range(0, (count + 7) // 8, STEP):
        i = base + tl.arange(0, STEP)
        at = i[:, None] * 8 + tl.arange(0, 8)[None, :]
        there = (i[:, None] * 8 if WHOLE else at) < count
        values = tl.load(source + at, mask=there, other=float("-inf"))
        written = i < ((count + 63) // 64 * 8 if WHOLE else (count + 7) // 8)
        tl.store(target + i, tl.max(values, 1), mask=written)
    tl.debug_barrier()


@triton.jit
def _select(
    scores, plan, out, candidates, n, capacity, number, candidate_stride, offered,
    K: tl.constexpr, SIZE: tl.constexpr, BASE: tl.constexpr, GATHERED: tl.constexpr, LISTED: tl.constexpr,
    TOPK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(plan + PASS * n + row) == number:
        visible = tl.load(plan + VISIBLE * n + row)
        seen = tl.load(plan + SEEN * n + row)
        place = tl.load(plan + PLACE * n + row).to(tl.int64) * _UNIT
        mine = out + row.to(tl.int64) * K
        rank = tl.arange(0, SIZE // 8)
        if BASE == 0:
            total = visible
            everything = seen <= K
        else:
            total = (seen + 7) // 8
            everything = (total <= K) | (seen <= TOPK)  # of the latter there are no scores
        if everything:
            if BASE == 0:
                total = seen
            tl.store(mine + rank, tl.where(rank < total, rank, -1), mask=rank < K)
        else:
            # Where level l of this row's pyramid begins: scores, then maxima of 8, 64, 512 entries.
            eights = scores + capacity + place // 8
            sixty = scores + capacity + capacity // 8 + place // 64
            chosen = candidates + row.to(tl.int64) * candidate_stride
            top = BASE
            if LISTED == 0:
                if (total > SIZE) & (BASE == 0):
                    top = 1
                if visible > 8 * SIZE:
                    top = 2
                    if BASE == 0:  # candidates come behind it and find these maxima
                        _pool_maxima(eights, sixty, (visible + 7) // 8, SIZE // 4, True)
                if (BASE == 0) & (visible > 64 * SIZE):
                    top = 3
                    large = scores + capacity + capacity // 8 + capacity // 64 + place // 512
                    _pool_maxima(sixty, large, (visible + 63) // 64, SIZE // 8, False)
            eight = tl.arange(0, 8)
            low = _LOWEST + 1
            high = low
            kept = 0
            if LISTED > 0:  # the best blocks of the list; from here on they stand for their entries
                slot = tl.arange(0, LISTED // 8)[:, None] * 8 + eight[None, :]
                block = tl.load(chosen + slot, mask=slot < offered, other=-1)
                best = _order(tl.load(eights + block, mask=block >= 0, other=float("-inf")))
                low, high = _range(best)
                kept, low = _put_winners(best, block, low, high, mine, K)
            for step in range(top - BASE + 1):
                level = top - step
                offset = tl.where(level > 0, capacity, 0).to(tl.int64)
                offset += tl.where(level > 1, capacity // 8, 0) + tl.where(level > 2, capacity // 64, 0)
                values = scores + offset + (place >> (3 * level))
                there = ((visible - 1) >> (3 * level)) + 1
                first = (step == 0) & (LISTED == 0)
                parent = tl.load(mine + rank, mask=rank < kept, other=0)
                parent = tl.where(first, rank, parent)
                known = first | (rank < kept)
                index = parent[:, None] * 8 + eight[None, :]
                if first:
                    raw = tl.load(values + index, mask=index < there, other=float("-inf"))
                else:  # all eight of a block can be read, -inf where there is nothing: wide loads
                    raw = tl.load(tl.multiple_of(values, 16) + index, mask=known[:, None], other=float("-inf"))
                key = _order(raw)
                if BASE == 1:
                    newest = (visible - 1) >> (3 * level)
                    key = tl.where(known[:, None] & (index == newest), _FIRST, key)
                if first:
                    low, high = _range(key)
                if GATHERED:
                    block = tl.load(chosen + parent, mask=known & (level == BASE), other=0)
                    index = tl.where(level == BASE, block, parent)[:, None] * 8 + eight[None, :]
                kept, low = _put_winners(key, index, low, high, mine, K)
            tl.store(mine + rank, -1, mask=(rank >= kept) & (rank < K))
