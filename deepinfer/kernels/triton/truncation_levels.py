"""Two levels with the border of a row between them and few tokens, whatever its logits are (for truncation_long.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.overlap import start_next, wait_for_previous
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    best_of_pieces,
    key_value,
    masked_logits,
    quick_exp,
    row_law,
    tempered,
)

SPARSE = 16
LEVELS = tl.constexpr(8)  # the last one is below everything
# Tokens from the sample's border to the farthest levels, in CAPACITIES: 5,120. A sample of 8,080 of 129,280 tells a
# border's rank to 600 or so, and there are six steps of 1,700 in a list's 4,096.
FAR = tl.constexpr(1.25)
SURE = tl.constexpr(3e-6)  # of the whole: float32 sums in a tree


@triton.jit
def _rank_border(t, wanted, weight, lowest):
    """The highest t above which, itself included, `weight` sums to `wanted`; lowest if none."""
    low, high = lowest, tl.full((), 0.0, tl.float32)
    for _ in range(24):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.where(t >= middle, weight, 0.0), axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit(do_not_specialize=["pieces", "words"])
def guess_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, queue, lengths, levels, stride,
    vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, SPARSE: tl.constexpr, SAMPLE: tl.constexpr,
    CAPACITY: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """levels float32 [rows, LEVELS], falling; lengths int32 [rows]: 0."""
    wait_for_previous()
    start_next()
    if tl.program_id(0) < tl.load(queue):
        row = tl.load(queue + 1 + tl.program_id(0)).to(tl.int64)
        _slot, heat, k, p, least, _cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        at = tl.arange(0, SAMPLE)
        at = (at // GROUP) * (GROUP * SPARSE) + GROUP * (SPARSE // 2) + at % GROUP
        z = tl.load(logits + row * stride + at, mask=at < vocab, other=-INFINITY)
        if MASKED:
            z = masked_logits(z, at, at < vocab, masks, tl.load(mask_rows + row), words)
        t = tempered(z, key_value(best), heat)
        is_one = (at < vocab) & (t >= least) & (t > -INFINITY)
        one = is_one.to(tl.float32)
        lowest = tl.maximum(tl.min(tl.where(is_one, t, 0.0), axis=0), -1e30)
        wanted = k.to(tl.float32) / SPARSE
        if k == vocab:
            weight = tl.where(is_one, quick_exp(t), 0.0)
            border = _rank_border(t, p * tl.sum(weight, axis=0), weight, lowest)
            wanted = tl.sum(tl.where(t >= border, one, 0.0), axis=0)
        border = _rank_border(t, wanted, one, lowest)
        above = _rank_border(t, wanted - FAR * CAPACITY / SPARSE, one, lowest)
        below = _rank_border(t, wanted + FAR * CAPACITY / SPARSE, one, lowest)
        level = tl.arange(0, LEVELS)
        share = (level - 3) * (1 / 3.0)  # -1 .. 1 for all but the last one
        place = tl.where(share < 0, border - (above - border) * share, border + (below - border) * share)
        tl.store(levels + row * LEVELS + level, tl.where(level == LEVELS - 1, -INFINITY, place))
        tl.store(lengths + row, 0)


@triton.jit(do_not_specialize=["pieces", "words"])
def levels_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, queue, levels, sums, stride,
    vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, LEVELS: tl.constexpr, STRIP: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """sums float32 [rows, pieces, LEVELS]: how many, with top_k, or what weigh the tokens at a level or above."""
    wait_for_previous()
    start_next()
    for work in range(tl.program_id(0), tl.load(queue) * pieces, tl.num_programs(0)):
        row, piece = tl.load(queue + 1 + work // pieces).to(tl.int64), work % pieces
        _slot, heat, k, p, least, _cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
        if (k < vocab) | (p < 1):
            best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
            top = key_value(best)
            level = tl.arange(0, LEVELS)
            bound = tl.load(levels + row * LEVELS + level)[:, None]
            mask_row = tl.load(mask_rows + row) if MASKED else 0
            total = tl.zeros((LEVELS, STRIP), tl.float32)
            for strip in range(0, PIECE, STRIP):
                at = piece * PIECE + strip + tl.arange(0, STRIP)[None, :]
                z = tl.load(logits + row * stride + at, mask=at < vocab, other=-INFINITY)
                if MASKED:
                    z = masked_logits(z, at, at < vocab, masks, mask_row, words)
                t = tempered(z, top, heat)
                weight = tl.where((t >= least) & (t > -INFINITY), tl.where(k < vocab, 1.0, quick_exp(t)), 0.0)
                total += tl.where(t >= bound, weight, 0.0)
            tl.store(sums + (row * pieces + piece) * LEVELS + level, tl.sum(total, axis=1))


@triton.jit
def bracket(row, levels, sums, k, p, least, vocab, pieces, PIECES: tl.constexpr, LEVELS: tl.constexpr):
    """(low, high): tokens at high or above are surely kept, those below low surely not."""
    low, high = least, least
    if (k < vocab) | (p < 1):
        level, part = tl.arange(0, LEVELS), tl.arange(0, PIECES)
        place = (row * pieces + part[:, None]) * LEVELS + level[None, :]
        above = tl.sum(tl.load(sums + place, mask=part[:, None] < pieces, other=0.0), axis=0)
        bound = tl.load(levels + row * LEVELS + level)
        whole = tl.sum(tl.where(level == LEVELS - 1, above, 0.0), axis=0)
        wanted, slack = k.to(tl.float32), 0.0
        if k == vocab:
            wanted, slack = p * whole, SURE * whole
        high = tl.maximum(tl.min(tl.where(above < wanted - slack, bound, INFINITY), axis=0), least)
        low = tl.maximum(tl.max(tl.where(above >= wanted + slack, bound, -INFINITY), axis=0), least)
    return low, high
