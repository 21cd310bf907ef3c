"""The draw of a row that keeps thousands of tokens, in two more reads of it, whatever its logits are like.

guess        one program a row: from one group in SPARSE, where about the border is, and LEVELS logits around it;
levels       counts tokens, or sums their exponentials, above each level;
gather       between two levels that have the border between them a thousand tokens or two are left, which are listed.
             Those above are surely kept: the best of them with its noise, how many they are and what they weigh; those
             below are surely not;
settle_long  one program a row: the border in the list, and the best of what is kept.

Such rows stand in a queue int32 [1 + rows], behind their number; where there are none, all of this ends at once. Rows
with both top_k and top_p have two borders: those that keep as many go to `cut_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.noise import (
    LOG2E,
    PAIRS,
    is_packed,
    logit_pairs,
    margin,
    name_winners,
    rough_gumbel,
    shift_of,
    weighed_again,
    winner_of,
    with_scores,
)
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.philox import TARGET, philox_words, unit_interval
from deepinfer.kernels.triton.runtime import launch, num_sms
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    NO_ID,
    RowLaws,
    best_of_pieces,
    group_size,
    key_value,
    masked_logits,
    ordered_key,
    piece_tiles,
    quick_exp,
    quick_exp2,
    row_law,
    tempered,
)
from deepinfer.kernels.triton.truncation_cut import ONE, exp_double
from deepinfer.kernels.triton.truncation_levels import LEVELS, SPARSE, bracket, guess_kernel, levels_kernel
from deepinfer.kernels.triton.truncation_short import border_of

LOOKERS, GATHERERS = 8, 16  # programs of `levels` and `gather` for each multiprocessor
SPANS = 4  # programs of `gather` for a piece


@triton.jit(do_not_specialize=["pieces", "programs", "words"])
def gather_kernel(
    logits, masks, mask_rows, slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high, keys, ids,
    queue, levels, sums, lengths, listed_t, listed_ids, numbers, masses, tails, scores, winners, stride, vocab, pieces,
    programs, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, LEVELS: tl.constexpr, SPAN: tl.constexpr,
    PAIRS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Lists of `lengths` int32 [rows] (0 before) tokens between the levels; of each SPAN ids numbers int32 and masses
    float64 of those above, tails float64 of those below, scores and winners as `noise_kernel` [rows, programs]."""
    wait_for_previous()
    start_next()
    for work in range(tl.program_id(0), tl.load(queue) * programs, tl.num_programs(0)):
        row, program = tl.load(queue + 1 + work // programs).to(tl.int64), work % programs
        slot, heat, k, p, least, _cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        top, weighed = key_value(best), p < 1
        bottom, line = bracket(row, levels, sums, k, p, least, vocab, pieces, PIECES, LEVELS)
        position = tl.load(positions + row).to(tl.uint32)
        low, high = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        own, evens = logits + row * stride, 2 * tl.arange(0, PAIRS)
        first = tl.full((PAIRS,), -INFINITY, tl.float32)
        second, winner = first, tl.zeros((PAIRS,), tl.int32)
        number = tl.zeros((PAIRS,), tl.int32)
        mass, tail = tl.zeros((PAIRS,), tl.float64), tl.zeros((PAIRS,), tl.float64)
        shift = tl.full((), INFINITY, tl.float32)
        for strip in range(program * SPAN, program * SPAN + SPAN, 2 * PAIRS):
            _raw, _raw_odd, z, z_odd = logit_pairs(own, strip, vocab, masks, mask_row, words, MASKED, PACKED, PAIRS)
            even = strip + evens
            t, t_odd = tempered(z, top, heat), tempered(z_odd, top, heat)
            kept, kept_odd = (t >= line) & (t > -INFINITY), (t_odd >= line) & (t_odd > -INFINITY)
            number += kept.to(tl.int32) + kept_odd.to(tl.int32)
            if weighed:
                e, e_odd = quick_exp(t), quick_exp(t_odd)
                mass += (tl.where(kept, e, 0.0) + tl.where(kept_odd, e_odd, 0.0)).to(tl.float64)
                e = tl.where((t >= least) & (t < bottom), e, 0.0)
                e_odd = tl.where((t_odd >= least) & (t_odd < bottom), e_odd, 0.0)
                tail += (e + e_odd).to(tl.float64)
            for odd in tl.static_range(2):
                its = t_odd if odd else t
                listed = (its >= bottom) & (its < line) & (its > -INFINITY)
                place = tl.atomic_add(lengths + row + evens * 0, 1, mask=listed, sem="relaxed")
                held = listed & (place < CAPACITY)
                tl.store(listed_t + row * CAPACITY + place, its, mask=held)
                tl.store(listed_ids + row * CAPACITY + place, even + odd, mask=held)
            t, t_odd = tl.where(kept, t, -INFINITY), tl.where(kept_odd, t_odd, -INFINITY)
            w0, w1, w2, w3 = philox_words((even >> 1).to(tl.uint32), 0, position, TARGET, low, high)
            closest = tl.maximum(
                quick_exp2(t * LOG2E + shift) - w1.to(tl.float32),
                quick_exp2(t_odd * LOG2E + shift) - w3.to(tl.float32),
            )
            if (shift == INFINITY) | (tl.max(closest.to(tl.int32, bitcast=True), axis=0) >= 0):
                score = t + rough_gumbel(unit_interval(w0, w1))
                first, second, winner = with_scores(first, second, winner, score, even)
                score = t_odd + rough_gumbel(unit_interval(w2, w3))
                first, second, winner = with_scores(first, second, winner, score, even + 1)
                shift = shift_of(first)
        out = row * programs + program
        tl.store(numbers + out, tl.sum(number, axis=0))
        tl.store(masses + out, tl.sum(mass, axis=0))
        tl.store(tails + out, tl.sum(tail, axis=0))
        name_winners(first, second, winner, scores, winners, out, vocab)


@triton.jit(do_not_specialize=["pieces", "programs", "words"])
def settle_long_kernel(
    logits, masks, mask_rows, slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high, keys, ids,
    queue, counts, levels, sums, lengths, listed_t, listed_ids, numbers, masses, tails, scores, winners, chosen, stride,
    vocab, pieces, programs, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, LEVELS: tl.constexpr,
    PROGRAMS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """The token; counts is 0 from there on, or as it was where the list was too short."""
    wait_for_previous()
    start_next()
    index, queued = tl.program_id(0), tl.load(queue)
    row = tl.load(queue + 1 + index, mask=index < queued, other=0).to(tl.int64)
    length = tl.load(lengths + row)
    if (index < queued) & (length <= CAPACITY):
        slot, heat, k, p, least, _cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
        best, best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        top = key_value(best)
        _bottom, line = bracket(row, levels, sums, k, p, least, vocab, pieces, PIECES, LEVELS)
        part = tl.arange(0, PROGRAMS)
        place = row * programs + part
        number = tl.sum(tl.load(numbers + place, mask=part < programs, other=0), axis=0)
        mass = tl.sum(tl.load(masses + place, mask=part < programs, other=0.0), axis=0)
        tail = tl.sum(tl.load(tails + place, mask=part < programs, other=0.0), axis=0)
        at = tl.arange(0, CAPACITY)
        is_one = at < length
        t = tl.load(listed_t + row * CAPACITY + at, mask=is_one, other=-INFINITY)
        its = tl.load(listed_ids + row * CAPACITY + at, mask=is_one, other=NO_ID)
        key, own_mass = ordered_key(t), tl.zeros((CAPACITY,), tl.int64)
        bound = tl.full((), INFINITY, tl.float64)
        lowest = tl.min(tl.where(is_one, key, 0), axis=0)
        border, last_id = lowest - 1, tl.full((), NO_ID, tl.int32)
        if p < 1:
            own_mass = tl.where(is_one, exp_double(t) * ONE, 0.0).to(tl.int64)
            whole = (mass + tail) * ONE + tl.sum(own_mass, axis=0).to(tl.float64)
            bound = p.to(tl.float64) * whole - mass * ONE
        if ((k < vocab) | (p < 1)) & (length > 0):
            border, last_id, _kept = border_of(key, its, own_mass, is_one, k - number, bound, p < 1, lowest, vocab)
        stays = is_one & ((key > border) | ((key == border) & (its < last_id)))
        position = tl.load(positions + row).to(tl.uint32)
        low, high = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        own = logits + row * stride
        score = weighed_again(own, masks, mask_row, words, its, top, heat, position, low, high, stays, MASKED)
        best_score, token = winner_of(score, its, stays)
        two = tl.arange(0, 2 * PROGRAMS)
        inside = two < 2 * programs
        named = tl.load(winners + row * 2 * programs + two, mask=inside, other=0)
        rough = tl.load(scores + row * programs + (two >> 1), mask=inside, other=-INFINITY)
        highest = tl.max(rough, axis=0)
        fine = inside & (rough > -INFINITY)
        crowded = (named < 0) & (rough >= highest - 2 * margin(highest)) & fine
        score = weighed_again(
            own, masks, mask_row, words, named, top, heat, position, low, high, fine & (named >= 0), MASKED
        )
        better, other = winner_of(score, named, fine & (named >= 0))
        token = tl.where(better > best_score, other, tl.where(better == best_score, tl.minimum(other, token), token))
        best_score = tl.maximum(better, best_score)
        if tl.max(crowded.to(tl.int32), axis=0) > 0:
            for start in range(0, vocab, STRIP):
                which = start + tl.arange(0, STRIP)
                z = tl.load(own + which, mask=which < vocab, other=-INFINITY)
                if MASKED:
                    z = masked_logits(z, which, which < vocab, masks, mask_row, words)
                above = tempered(z, top, heat)
                above_line = (above >= line) & (above > -INFINITY)
                all_scores = weighed_again(
                    own, masks, mask_row, words, which, top, heat, position, low, high, above_line, MASKED
                )
                better, other = winner_of(all_scores, which, above_line)
                token = tl.where(
                    better > best_score, other, tl.where(better == best_score, tl.minimum(other, token), token)
                )
                best_score = tl.maximum(better, best_score)
        tl.store(chosen + row, tl.where(token < vocab, token, best_id))
        tl.store(counts + row, 0)


def draw_long(
    logits: Tensor,
    laws: RowLaws,
    constraints: tuple[Tensor, Tensor],
    masked: bool,
    keys: Tensor,
    ids: Tensor,
    queue: Tensor,
    counts: Tensor,
    listed_t: Tensor,
    listed_ids: Tensor,
    chosen: Tensor,
) -> None:
    """Tokens into chosen int32 [rows] of the rows in the queue, whose counts int32 [rows] are 0 then. listed_t float32,
    listed_ids int32 [rows, capacity]: lists of these rows that are not needed any more."""
    (rows, vocab), (pieces, capacity) = logits.shape, (keys.shape[1], listed_t.shape[1])
    tiles, group, device, words = piece_tiles(vocab), group_size(vocab), logits.device, (vocab + 31) // 32
    small = vocab < capacity * SPARSE  # a vocabulary of tests: fewer, or there would be nothing to look at
    sparse, pairs, span = (
        (2, tiles["PIECE"] // 4, tiles["PIECE"]) if small else (SPARSE, PAIRS, tiles["PIECE"] // SPANS)
    )
    programs = triton.cdiv(vocab, span)
    lengths, levels = torch.empty_like(counts), torch.empty(rows, LEVELS.value, device=device)
    sums, scores = torch.empty(rows, pieces, LEVELS.value, device=device), torch.empty(rows, programs, device=device)
    numbers = torch.empty(rows, programs, dtype=torch.int32, device=device)
    masses, tails = torch.empty(2, rows, programs, dtype=torch.float64, device=device)
    winners = torch.empty(rows, programs, 2, dtype=torch.int32, device=device)
    shares = (laws.temperature, laws.top_k, laws.top_p, laws.log_min_p)
    law, seeds = (*constraints, laws.slots, *shares, keys, ids, queue), (laws.seed_low, laws.seed_high)
    common = {"MASKED": masked, "PIECES": triton.next_power_of_2(pieces), "LEVELS": LEVELS.value, **OVERLAP}
    tail = (logits.stride(0), vocab, pieces)
    sample = triton.next_power_of_2(triton.cdiv(vocab, group * sparse)) * group
    launch(
        guess_kernel, (rows,), logits, *law, lengths, levels, *tail, words, GROUP=group, SPARSE=sparse, SAMPLE=sample,
        CAPACITY=capacity, **common, num_warps=8,
    )  # fmt: skip
    grid = (min(rows * pieces, LOOKERS * num_sms(logits)),)
    # Eight sums a lane, so half a strip.
    launch(
        levels_kernel, grid, logits, *law, levels, sums, *tail, words, **common,
        **tiles | {"STRIP": tiles["STRIP"] // 2},
    )  # fmt: skip
    found = (levels, sums, lengths, listed_t, listed_ids, numbers, masses, tails, scores, winners)
    rows_of = (*constraints, laws.slots, laws.positions, *shares, *seeds, keys, ids, queue)
    launch(
        gather_kernel, (min(rows * programs, GATHERERS * num_sms(logits)),), logits, *rows_of, *found, *tail, programs,
        words, CAPACITY=capacity, SPAN=span, PAIRS=pairs, PACKED=is_packed(logits), **common, num_warps=1,
    )  # fmt: skip
    launch(
        settle_long_kernel, (rows,), logits, *rows_of, counts, *found, chosen, *tail, programs, words,
        CAPACITY=capacity, PROGRAMS=triton.next_power_of_2(programs), STRIP=min(capacity, 512), **common, num_warps=16,
    )  # fmt: skip
