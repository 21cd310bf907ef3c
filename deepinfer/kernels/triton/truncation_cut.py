"""The draw of a row for which nothing shorter is left: the border by bisection over all its logits, again and again.

A row keeps the tokens with fewer than k better ones that together weigh less than top_p of the whole; both grow from
token to token, so the last one kept is found in the space of keys, whatever the logits are, and among its equals in the
space of ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.overlap import start_next, wait_for_previous
from deepinfer.kernels.triton.philox import TARGET, gumbel_ids
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    NO_ID,
    best_of_pieces,
    key_value,
    masked_logits,
    ordered_key,
    row_law,
    tempered,
)

ONE = tl.constexpr(2.0**45)  # times 2^17 ids stays below 2^63


@triton.jit
def exp_double(t):
    """exp of float32 t <= 0 as float64, relative error 1e-11, with 8 float64 operations: 2^(q / 4) exp(r), |r| <= ln 2
    / 8, six terms."""
    t = tl.maximum(t, -700.0)
    quarters = tl.floor(t * 5.770780163555854 + 0.5)  # 4 / ln 2
    r = t.to(tl.float64) - quarters.to(tl.float64) * 0.17328679513998632  # ln 2 / 4
    value = 1 + r * (1 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720))))))
    q = quarters.to(tl.int32)
    power = (((q >> 2) + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    # 2^(1/4), 2^(1/2), 2^(3/4) as bit patterns: a float64 literal would be rounded to float32 in a `where`.
    bits = tl.where((q & 1) == 1, tl.where((q & 2) == 2, 0x3FFAE89F995AD3AD, 0x3FF306FE0A31B715), 0x3FF6A09E667F3BCD)
    root = tl.where((q & 3) == 0, 0x3FF0000000000000, bits).to(tl.int64).to(tl.float64, bitcast=True)
    return value * root * power


@triton.jit
def _candidates(
    first, count, logits_row, masks, mask_row, words, top, heat, least,
    MASKED: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """t, ids and whether it is one, of STRIP places of the row."""
    at = first + tl.arange(0, STRIP)
    inside = at < count
    z = tl.load(logits_row + at, mask=inside, other=-INFINITY)
    if MASKED:
        z = masked_logits(z, at, inside, masks, mask_row, words)
    t = tempered(z, top, heat)
    return t, at, inside & (t >= least) & (t > -INFINITY)


@triton.jit
def _above(
    bound, weighed, count, logits_row, masks, mask_row, words, top, heat, least,
    MASKED: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """How many candidates' keys are above a bound, and what they weigh: int32 and, where it is asked for, int64."""
    number, mass = tl.zeros((STRIP,), tl.int32), tl.zeros((STRIP,), tl.int64)
    for first in range(0, count, STRIP):
        t, _ids, is_one = _candidates(
            first, count, logits_row, masks, mask_row, words, top, heat, least, MASKED,
            STRIP,
        )  # fmt: skip
        higher = is_one & (ordered_key(t) > bound)
        number += higher.to(tl.int32)
        if weighed:
            mass += tl.where(higher, exp_double(t) * ONE, 0.0).to(tl.int64)
    weight = tl.zeros((), tl.int64)
    if weighed:
        weight = tl.sum(mass, axis=0)
    return tl.sum(number, axis=0), weight


@triton.jit(do_not_specialize=["pieces", "words"])
def cut_kernel(
    logits, masks, mask_rows, slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high, keys, ids,
    counts, chosen, stride, vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    slot, heat, k, p, least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    best, best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
    top = key_value(best)
    count = tl.load(counts + row)
    if cuts & (count > CAPACITY) & (tl.abs(top) < INFINITY):
        count = vocab
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        logits_row = logits + row * stride
        weighed = (k == vocab) & (p < 1)
        lowest_key, mass = tl.zeros((STRIP,), tl.int32), tl.zeros((STRIP,), tl.int64)
        for first in range(0, count, STRIP):
            t, _ids, is_one = _candidates(
                first, count, logits_row, masks, mask_row, words, top, heat, least, MASKED,
                STRIP,
            )  # fmt: skip
            lowest_key = tl.minimum(lowest_key, tl.where(is_one, ordered_key(t), 0))
            if weighed:
                mass += tl.where(is_one, exp_double(t) * ONE, 0.0).to(tl.int64)
        lowest = tl.min(lowest_key, axis=0)
        # Of everything better than a token: fewer than k, and less than `most`, which is top_p of the candidates.
        whole = tl.sum(mass, axis=0).to(tl.float64)
        endless = tl.full((), INFINITY, tl.float64)
        most = tl.where(p < 1, p.to(tl.float64) * whole, endless)
        # Where both cut, what top_p calls 1 is known once top_k's border is.
        phase = tl.where(k < vocab, tl.where(p < 1, 0, 1), tl.where(p < 1, 1, 2))
        border, last_id = lowest - 1, tl.full((), NO_ID, tl.int32)
        while phase < 2:
            bound = tl.where(phase == 0, endless, most)
            weighed = (p < 1) & (phase == 1)
            # The smallest key above which there are fewer than k tokens that weigh less than `bound`: the last kept.
            low, border = lowest - 1, tl.zeros((), tl.int32)
            while low < border:
                middle = low + ((border - low) >> 1)
                above, weight = _above(
                    middle, weighed, count, logits_row, masks, mask_row, words, top, heat,
                    least, MASKED, STRIP,
                )  # fmt: skip
                passes = (above < k) & (weight.to(tl.float64) < bound)
                low = tl.where(passes, low, middle + 1)
                border = tl.where(passes, middle, border)
            above, weight = _above(
                border, p < 1, count, logits_row, masks, mask_row, words, top, heat, least,
                MASKED, STRIP,
            )  # fmt: skip
            with_ties, _mass = _above(
                border - 1, False, count, logits_row, masks, mask_row, words, top, heat,
                least, MASKED, STRIP,
            )  # fmt: skip
            ties = with_ties - above
            own = (exp_double(key_value(border)) * ONE).to(tl.int64)  # of one of the equal tokens
            # How many of them stay: until those before weigh `bound`. By bisection: a float64 division would spill.
            low, kept = tl.full((), 1, tl.int32), tl.minimum(k - above, ties)
            while low < kept:
                middle = (low + kept) >> 1
                reached = (weight + middle.to(tl.int64) * own).to(tl.float64) >= bound
                low = tl.where(reached, low, middle + 1)
                kept = tl.where(reached, middle, kept)
            if phase == 0:
                most = p.to(tl.float64) * (weight + kept.to(tl.int64) * own).to(tl.float64)
            elif kept < ties:  # the lowest ids of the equal ones: the smallest bound below which there are enough
                low, last_id = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + vocab  # 1 is no tensor
                while low < last_id:
                    middle = (low + last_id) >> 1
                    below = tl.zeros((STRIP,), tl.int32)
                    for first in range(0, count, STRIP):
                        t, its, is_one = _candidates(
                            first, count, logits_row, masks, mask_row, words, top, heat, least,
                            MASKED, STRIP,
                        )  # fmt: skip
                        below += (is_one & (ordered_key(t) == border) & (its < middle)).to(tl.int32)
                    reached = tl.sum(below, axis=0) >= kept
                    low = tl.where(reached, low, middle + 1)
                    last_id = tl.where(reached, middle, last_id)
            phase += 1
        position = tl.load(positions + row).to(tl.uint32)
        seed = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        highest, winner = tl.full((STRIP,), -INFINITY, tl.float64), tl.full((STRIP,), NO_ID, tl.int32)
        for first in range(0, count, STRIP):
            t, its, is_one = _candidates(
                first, count, logits_row, masks, mask_row, words, top, heat, least, MASKED,
                STRIP,
            )  # fmt: skip
            key = ordered_key(t)
            stays = is_one & ((key > border) | ((key == border) & (its < last_id)))
            noise = gumbel_ids(its, position, TARGET, 0, seed[0], seed[1])
            score = tl.where(stays, t.to(tl.float64) + noise.to(tl.float64), -INFINITY)
            better = (score > highest) | ((score == highest) & (its < winner) & stays)
            winner = tl.where(better, its, winner)
            highest = tl.where(better, score, highest)
        token = tl.min(tl.where(highest == tl.max(highest, axis=0), winner, NO_ID), axis=0)
        tl.store(chosen + row, tl.where(token < vocab, token, best_id))
