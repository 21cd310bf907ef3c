"""min_p, top_k and top_p on the device, with the borders of `engine/truncation.py`, without sorting.

What a row keeps is a prefix of the order (logit descending, id ascending), so a smallest logit and, among its equals, a
largest id say it all. Four launches:

levels       counts tokens, or sums their exponentials, above LEVELS logits below the row's best: which of them is
             surely below the border;
collect      lists the tokens above that one, a few thousand of a peaked row, and sums the others for top_p;
short, cut   one program a row: which of the list stay, then the best of logit / temperature + noise.

Sums over a list are whole numbers of 2^-45, so they do not depend on its order; exponentials there are right to 1e-11.
Those of the tokens outside are float32 (1e-7), at most 1 - top_p of the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import launch
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    NO_ID,
    RowLaws,
    best_of_pieces,
    key_value,
    masked_logits,
    piece_tiles,
    quick_exp,
    tempered,
)
from deepinfer.kernels.triton.truncation_cut import cut_kernel, row_law
from deepinfer.kernels.triton.truncation_short import short_kernel

LEVELS = 8  # the last one is the sum of all
CAPACITY = 16384  # of a row's list; a row with more is read from its logits again and again: right, and slow
MARGIN = tl.constexpr(1.0001)  # float32 sums of 2^17 terms in a tree are right to 1e-5
SHORT = 1024  # candidates that are compared with each other
CUT_STRIP, CUT_WARPS = 512, 8  # of the last launches: few enough registers for two or three rows on a multiprocessor


@triton.jit
def _bounds(level, keys, row, pieces, heat, p, k, vocab, PIECES: tl.constexpr, LEVELS: tl.constexpr):
    """Distances below a row's best, over the temperature. top_k: growing by 1.45, from a quarter of how far the worst
    piece's best is below the best. top_p: closest at the top, down to where all of the vocabulary together weighs
    1 - p, below which no border can be."""
    at = tl.arange(0, PIECES)
    key = tl.load(keys + row * pieces + at, mask=at < pieces, other=NO_ID)
    top = key_value(tl.max(tl.where(at < pieces, key, -NO_ID), axis=0))
    spread = top - key_value(tl.min(key, axis=0))
    unit = tl.where(spread < 1e30, tl.maximum(spread * 0.25, 0.9), 0.9)
    share = (level + 1) / (LEVELS - 1.0)
    reach = tl.log(tl.maximum(1 - p, 1e-7) / vocab)
    return tl.where(k < vocab, -unit * tl.exp2(level * 0.5360529) / heat, reach * share * tl.sqrt(share))


@triton.jit(do_not_specialize=["pieces", "words"])
def _levels_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, levels, stride, vocab, pieces,
    words, MASKED: tl.constexpr, PIECES: tl.constexpr, LEVELS: tl.constexpr, STRIP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _slot, heat, k, p, least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    if cuts & ((k < vocab) | (p < 1)):
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        top, colder = key_value(best), 1 / heat
        level = tl.arange(0, LEVELS)[:, None]
        bound = _bounds(level, keys, row, pieces, heat, p, k, vocab, PIECES, LEVELS)
        bound = tl.where(level == LEVELS - 1, -1e38, bound)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        total = tl.zeros((LEVELS, STRIP), tl.float32)
        for strip in range(0, PIECE, STRIP):
            at = piece * PIECE + strip + tl.arange(0, STRIP)[None, :]
            z = tl.load(logits + row * stride + at, mask=at < vocab, other=-INFINITY)
            if MASKED:
                z = masked_logits(z, at, at < vocab, masks, mask_row, words)
            t = (z - top) * colder
            weight = tl.where(t >= least, tl.where(k < vocab, 1.0, quick_exp(t)), 0.0)
            total += tl.where(t >= bound, weight, 0.0)
        out = (row * pieces + piece) * LEVELS + tl.arange(0, LEVELS)
        tl.store(levels + out, tl.sum(total, axis=1))


@triton.jit(do_not_specialize=["pieces", "words"])
def _collect_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, levels,
    counts, listed_t, listed_ids, tails, stride, vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, LEVELS: tl.constexpr, CAPACITY: tl.constexpr, STRIP: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _slot, heat, k, p, least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    if cuts:
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        top = key_value(best)
        lowest = least
        if (k < vocab) | (p < 1):
            level, part = tl.arange(0, LEVELS), tl.arange(0, PIECES)
            place = (row * pieces + part[:, None]) * LEVELS + level[None, :]
            above = tl.sum(tl.load(levels + place, mask=part[:, None] < pieces, other=0.0), axis=0)
            whole = tl.sum(tl.where(level == LEVELS - 1, above, 0.0), axis=0)
            wanted = tl.where(k < vocab, k.to(tl.float32), p * MARGIN * whole)
            bound = _bounds(level, keys, row, pieces, heat, p, k, vocab, PIECES, LEVELS)
            enough = (above >= wanted) & (level < LEVELS - 1)
            # A little lower: here a temperature divides with another rounding than there.
            border = tl.max(tl.where(enough, bound - tl.abs(bound) * 1e-5, -INFINITY), axis=0)
            lowest = tl.maximum(lowest, border)
        weighed = (k == vocab) & (p < 1)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        tail = tl.zeros((STRIP,), tl.float32)
        for strip in range(0, PIECE, STRIP):
            at = piece * PIECE + strip + tl.arange(0, STRIP)
            z = tl.load(logits + row * stride + at, mask=at < vocab, other=-INFINITY)
            if MASKED:
                z = masked_logits(z, at, at < vocab, masks, mask_row, words)
            t = tempered(z, top, heat)
            is_taken = (t >= lowest) & (t > -INFINITY)
            if weighed:
                tail += tl.where((t >= least) & (t < lowest), quick_exp(t), 0.0)
            # Few are taken, so each asks for its own place: no step waits for all threads. Relaxed, or every one of
            # these would empty the first-level cache.
            place = tl.atomic_add(counts + row + at * 0, 1, mask=is_taken, sem="relaxed")
            held = is_taken & (place < CAPACITY)
            tl.store(listed_t + row * CAPACITY + place, t, mask=held)
            tl.store(listed_ids + row * CAPACITY + place, at, mask=held)
        tl.store(tails + row * pieces + piece, tl.sum(tail, axis=0))


def draw_truncated(
    logits: Tensor,
    laws: RowLaws,
    keys: Tensor,
    ids: Tensor,
    pieces: int,
    masks: Tensor | None,
    mask_rows: Tensor | None,
) -> Tensor:
    """Tokens int32 [rows] of rows that may drop some; unwritten for others. keys, ids int32 [rows, pieces]: of the best
    of each piece of the row."""
    rows, vocab = logits.shape
    tiles, device, stride = piece_tiles(vocab), logits.device, logits.stride(0)
    capacity, words = min(CAPACITY, triton.next_power_of_2(max(vocab // 2, 16))), (vocab + 31) // 32
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    levels = torch.empty(rows, pieces, LEVELS, device=device)
    listed_t = torch.empty(rows, capacity, device=device)
    listed_ids = torch.empty(rows, capacity, dtype=torch.int32, device=device)
    tails = torch.empty(rows, pieces, device=device)
    chosen = torch.empty(rows, dtype=torch.int32, device=device)
    constraints = (masks, mask_rows) if masks is not None else (keys, keys)
    parameters = (laws.temperature, laws.top_k, laws.top_p, laws.log_min_p)
    common = {"MASKED": masks is not None, "PIECES": triton.next_power_of_2(pieces)}
    grid, tail = (pieces, rows), (stride, vocab, pieces, words)
    half = tiles | {"STRIP": tiles["STRIP"] // 2}  # eight sums a lane: 56 registers, not 96
    launch(
        _levels_kernel, grid, logits, *constraints, laws.slots, *parameters, keys, ids, levels, *tail, **common,
        **half, LEVELS=LEVELS,
    )  # fmt: skip
    launch(
        _collect_kernel, grid, logits, *constraints, laws.slots, *parameters, keys, ids, levels, counts, listed_t,
        listed_ids, tails, *tail, **common, **tiles, LEVELS=LEVELS, CAPACITY=capacity,
    )  # fmt: skip
    short = min(SHORT, max(capacity // 4, 16))
    masses, befores = torch.empty(2, rows, short, dtype=torch.int64, device=device)
    ranks = torch.empty(rows, short, dtype=torch.int32, device=device)
    seeds = laws.seed_low, laws.seed_high
    launch(
        short_kernel, (rows,), laws.slots, laws.positions, *parameters, *seeds, ids, counts, listed_t, listed_ids,
        tails, masses, befores, ranks, chosen, vocab, pieces, PIECES=common["PIECES"], CAPACITY=capacity, SHORT=short,
        BLOCK=min(short, 32 * CUT_WARPS), OTHERS=8, num_warps=CUT_WARPS,
    )  # fmt: skip
    launch(
        cut_kernel, (rows,), logits, *constraints, laws.slots, laws.positions, *parameters, *seeds, keys, ids, counts,
        listed_t, listed_ids, tails, chosen, *tail, **common, CAPACITY=capacity, SHORT=short,
        STRIP=min(capacity, CUT_STRIP), num_warps=CUT_WARPS,
    )  # fmt: skip
    return chosen
