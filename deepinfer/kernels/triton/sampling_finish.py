"""The last launch of a draw: a row's token, its log-probability and whether it means anything."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.noise import margin, weighed_again, winner_of
from deepinfer.kernels.triton.overlap import start_next, wait_for_previous
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    LOWEST,
    NOT_A_NUMBER,
    best_of_pieces,
    keeps_all,
    key_value,
    quick_exp,
    row_law,
)

HIGHEST = tl.constexpr(1e30)  # of a sum of exponentials over the largest of its first ones


@triton.jit
def log_sum(tops, sums, row, parts, PARTS: tl.constexpr):
    """(base, log of the sum of exponentials of what is above the base) of a row, from its parts'."""
    at = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + at, mask=at < parts, other=-INFINITY)
    part = tl.load(sums + row * parts + at, mask=at < parts, other=0.0)
    base = tl.max(top, axis=0)
    return base, tl.log(tl.sum(tl.where(at < parts, part * tl.exp(top - base), 0.0), axis=0))


@triton.jit
def _sum_from_the_top(own, first, vocab, PART: tl.constexpr, STRIP: tl.constexpr):
    """Largest raw logit of PART ids, and the sum of exponentials of what is above it."""
    most, total = tl.full((STRIP,), LOWEST, tl.float32), tl.zeros((STRIP,), tl.float32)
    for strip in range(first, min(first + PART, vocab), STRIP):
        at = strip + tl.arange(0, STRIP)
        most = tl.maximum(most, tl.load(own + at, mask=at < vocab, other=-INFINITY))
    base = tl.max(most, axis=0)
    for strip in range(first, min(first + PART, vocab), STRIP):
        at = strip + tl.arange(0, STRIP)
        total += quick_exp(tl.load(own + at, mask=at < vocab, other=-INFINITY) - base)
    return base, tl.sum(total, axis=0)


@triton.jit
def _sum_again(own, tops, sums, row, vocab, parts, PART: tl.constexpr, STRIP: tl.constexpr):
    """Sums of parts in which some logit is so far above the first ones that exponentials over those are no numbers."""
    for part in range(parts):
        place = row * parts + part
        if tl.load(sums + place) > HIGHEST:
            base, total = _sum_from_the_top(own, part * PART, vocab, PART, STRIP)
            tl.store(tops + place, base)
            tl.store(sums + place, total)
    tl.debug_barrier()


@triton.jit
def _whole_row(
    own, masks, mask_row, slot, row, positions, temperature, seed_low, seed_high, bests, scores, winners, vocab, parts,
    programs, words,
    MASKED: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Token of a row that keeps every token, from what `noise_kernel` found, and whether its best is finite."""
    at = tl.arange(0, PARTS)
    best = tl.load(bests + row * parts + at, mask=at < parts, other=-INFINITY)
    top, odd = tl.max(best, axis=0), tl.max((best != best).to(tl.int32), axis=0)
    finite = (odd == 0) & (tl.abs(top) < INFINITY)
    heat, position = tl.load(temperature + slot), tl.load(positions + row).to(tl.uint32)
    low, high = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
    two = tl.arange(0, 2 * PROGRAMS)
    inside = two < 2 * programs
    ids = tl.load(winners + row * 2 * programs + two, mask=inside, other=-1)
    rough = tl.load(scores + row * programs + (two >> 1), mask=inside, other=-INFINITY)
    highest = tl.max(rough, axis=0)
    crowded = (ids < 0) & (rough >= highest - 2 * margin(highest)) & inside
    named = inside & (ids >= 0)
    score = weighed_again(own, masks, mask_row, words, ids, top, heat, position, low, high, named, MASKED)
    best_score, token = winner_of(score, ids, named)
    if finite & (tl.max(crowded.to(tl.int32), axis=0) > 0):
        # Once in thousands of steps, or where a tiny temperature makes all scores large: the plain way.
        for first in range(0, vocab, STRIP):
            which = first + tl.arange(0, STRIP)
            all_scores = weighed_again(
                own, masks, mask_row, words, which, top, heat, position, low, high, which < vocab, MASKED
            )
            better, its = winner_of(all_scores, which, which < vocab)
            token = tl.where(better > best_score, its, tl.where(better == best_score, tl.minimum(its, token), token))
            best_score = tl.maximum(better, best_score)
    return tl.minimum(token, vocab - 1), finite  # a row of NaN has none


@triton.jit(do_not_specialize=["pieces", "parts", "programs", "words"])
def finish_kernel(
    logits, masks, mask_rows, slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high,
    keys, ids, tops, sums, chosen, part_tops, bests, part_sums, scores, winners, token_ids, logprobs, valid,
    stride, vocab, pieces, parts, programs, words,
    MASKED: tl.constexpr, DRAWN: tl.constexpr, TRUNCATED: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, PART: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    mine, slot = False, 0
    if DRAWN:
        slot = tl.load(slots + row)
        mine = keeps_all(slot, temperature, top_k, top_p, log_min_p)
    base, log_total, token, finite = 0.0, 0.0, 0, True
    if mine:
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        token, finite = _whole_row(
            own, masks, mask_row, slot, row, positions, temperature, seed_low, seed_high, bests, scores, winners, vocab,
            parts, programs, words, MASKED, PARTS, PROGRAMS, STRIP,
        )  # fmt: skip
        at = tl.arange(0, PARTS)
        if tl.max(tl.load(part_sums + row * parts + at, mask=at < parts, other=0.0), axis=0) > HIGHEST:
            _sum_again(own, part_tops, part_sums, row, vocab, parts, PART, STRIP)
        base, log_total = log_sum(part_tops, part_sums, row, parts, PARTS)
    else:
        best, token = best_of_pieces(keys, ids, row, pieces, PIECES)
        finite = (best < NOT_A_NUMBER) & (tl.abs(key_value(best)) < INFINITY)
        if TRUNCATED:
            _slot, _heat, _k, _p, _least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
            if cuts & finite:
                token = tl.load(chosen + row)
        base, log_total = log_sum(tops, sums, row, pieces, PIECES)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(own + token) - base - log_total)
    tl.store(valid + row, finite)
