"""One read of a row that keeps every token: its best logit / temperature + noise, and its sum of exponentials.

What costs is the noise: ten rounds of Philox for two tokens, and two logarithms each. The logarithms are left out where
they cannot matter: noise is below -log u, so a token whose u is not below exp(logit / temperature - best so far) is
beaten already, and of a strip of 256 tokens all are but for one strip in ten. One warp works on a strip, so that no
other has to wait while it looks closer.

Scores are rough, right to 2e-5 and the rounding of logit / temperature; `finish` weighs the best ones of all programs
again as the plain path does it. A program names up to two that come within the margin of its best; where there are
more, once in a million programs, it says so.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.overlap import start_next, wait_for_previous
from deepinfer.kernels.triton.philox import TARGET, gumbel_ids, philox_words, unit_interval
from deepinfer.kernels.triton.runtime import INTERPRET
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    LOWEST,
    NO_ID,
    keeps_all,
    masked_logits,
    quick_exp,
    quick_exp2,
    tempered,
)

LOG2E = tl.constexpr(1.4426950408889634)
MINUS_LN2 = tl.constexpr(-0.6931471805599453)
# Below, log(1 - u) by four terms of its series: u^4 / 5 = 1e-8 of the value; above, what 1 - u and lg2.approx lose
# (2^-24 and 2^-22) is at most 2e-5 of it.
SERIES = tl.constexpr(0.015625)
# Two rough scores that are so close may be the other way round: 1e-4 for the noise, and two roundings of logits over
# temperatures that are at most 40 (no noise is larger) from the score.
CLOSE, ROUNDING, WIDEST = tl.constexpr(2e-4), tl.constexpr(2.0**-21), tl.constexpr(40.0)
MINUS_INFINITIES = tl.constexpr(-0x7FFFFF_00800000)  # as the bits of two float32

PART = 2048  # ids whose exponentials make one sum, whatever the number of rows
PAIRS = 128  # of ids that a program looks at at once: 4 a thread
MANY = 128  # rows from which on a program takes PARTS parts; with fewer each part has its own, or most would have none
PARTS = 8


@triton.jit
def quick_log2(x):
    """log2 of a normal float32 number above 0, right to 2^-22 (absolute between 1/2 and 2, relative elsewhere)."""
    if INTERPRET:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rough_gumbel(u):
    """`philox.gumbel_of` to 2e-5."""
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return quick_log2(tl.where(u < SERIES, series, quick_log2(1 - u) * MINUS_LN2)) * MINUS_LN2


@triton.jit
def margin(score):
    return CLOSE + ROUNDING * (tl.abs(score) + WIDEST)


@triton.jit
def with_scores(first, second, winner, score, ids):
    """The two best scores of each thread's places, and the id of the best."""
    winner = tl.where(score > first, ids, winner)
    return tl.maximum(first, score), tl.maximum(second, tl.minimum(first, score)), winner


@triton.jit
def shift_of(first):
    """What to add to log2(e) times a token's logit over the temperature for log2 of the 32-bit u from which on it is
    beaten."""
    highest = tl.max(first, axis=0)
    return 32 - (highest - margin(highest)) * LOG2E


@triton.jit
def name_winners(first, second, winner, scores, winners, out, vocab):
    """scores[out]: the best score; winners[2 * out] and the one behind: ids that come within the margin of it, twice
    the same if it is one, the second -1 if they are more than two."""
    highest = tl.max(first, axis=0)
    line = highest - margin(highest)
    is_close = first >= line
    close = tl.sum(is_close.to(tl.int32) + 2 * (second >= line).to(tl.int32), axis=0)
    lowest = tl.min(tl.where(is_close, winner, NO_ID), axis=0)
    other = tl.max(tl.where(is_close, winner, -1), axis=0)
    tl.store(scores + out, highest)
    tl.store(winners + 2 * out, tl.minimum(lowest, vocab - 1))  # a row of NaN has none
    tl.store(winners + 2 * out + 1, tl.where(close > 2, -1, tl.maximum(other, 0)))


@triton.jit
def weighed_again(own, masks, mask_row, words, ids, top, heat, position, low, high, inside, MASKED: tl.constexpr):
    """Scores float64 of ids, as the plain path has them."""
    z = tl.load(own + ids, mask=inside, other=-INFINITY)
    if MASKED:
        z = masked_logits(z, ids, inside, masks, mask_row, words)
    noise = gumbel_ids(ids, position, TARGET, 0, low, high)
    return tl.where(inside, tempered(z, top, heat).to(tl.float64) + noise.to(tl.float64), -INFINITY)


@triton.jit
def winner_of(score, ids, inside):
    """The best score and the lowest id that has it, NO_ID if there is none."""
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(inside & (score == best), ids, NO_ID), axis=0)


@triton.jit
def logit_pairs(
    own, first, vocab, masks, mask_row, words, MASKED: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Raw logits of 2 * PAIRS ids from `first` on, even ones and odd ones, and what a constraint leaves of them."""
    even = first + 2 * tl.arange(0, PAIRS)
    if PACKED:  # one load of 64 bits
        packed = tl.load((own + even).to(tl.pointer_type(tl.int64)), mask=even < vocab, other=MINUS_INFINITIES)
        raw_even = packed.to(tl.int32).to(tl.float32, bitcast=True)
        raw_odd = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        raw_even = tl.load(own + even, mask=even < vocab, other=-INFINITY)
        raw_odd = tl.load(own + even + 1, mask=even + 1 < vocab, other=-INFINITY)
    z_even, z_odd = raw_even, raw_odd
    if MASKED:
        z_even = masked_logits(raw_even, even, even < vocab, masks, mask_row, words)
        z_odd = masked_logits(raw_odd, even + 1, even + 1 < vocab, masks, mask_row, words)
    return raw_even, raw_odd, z_even, z_odd


@triton.jit(do_not_specialize=["parts", "programs", "words"])
def noise_kernel(
    logits, masks, mask_rows, slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high,
    tops, bests, sums, scores, winners, stride, vocab, parts, programs, words,
    MASKED: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, PAIRS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Rows that keep every token. Of each part: tops, the base of its sum of exponentials (the
    largest of its first strip, so the sum may be infinite), sums, and bests, the largest
    logit that may be drawn, NaN where there is one: float32 [rows, parts]. Of each program: scores float32 [rows,
    programs], its best rough score, and winners int32 [rows, programs, 2]: ids of those that may be the best; the
    second is -1 where they are more than two."""
    wait_for_previous()
    row, program = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = tl.load(slots + row)
    if keeps_all(slot, temperature, top_k, top_p, log_min_p):
        colder = 1 / tl.load(temperature + slot)
        position = tl.load(positions + row).to(tl.uint32)
        low, high = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        own, scale = logits + row * stride, colder * LOG2E
        evens = 2 * tl.arange(0, PAIRS)
        first = tl.full((PAIRS,), -INFINITY, tl.float32)
        second, winner = first, tl.zeros((PAIRS,), tl.int32)
        shift = tl.full((), INFINITY, tl.float32)
        for part in range(program * PARTS, min(program * PARTS + PARTS, parts)):
            raw, raw_odd, z, z_odd = logit_pairs(own, part * PART, vocab, masks, mask_row, words, MASKED, PACKED, PAIRS)
            base = tl.maximum(tl.max(tl.maximum(raw, raw_odd), axis=0), LOWEST)
            total, strange = tl.zeros((PAIRS,), tl.float32), tl.zeros((PAIRS,), tl.float32)
            most = tl.full((PAIRS,), -INFINITY, tl.float32)
            for strip in range(part * PART, part * PART + PART, 2 * PAIRS):
                after, after_odd, next_z, next_z_odd = logit_pairs(
                    own, strip + 2 * PAIRS, vocab, masks, mask_row, words, MASKED, PACKED, PAIRS
                )
                even = strip + evens
                w0, w1, w2, w3 = philox_words((even >> 1).to(tl.uint32), 0, position, TARGET, low, high)
                closest = tl.maximum(
                    quick_exp2(z * scale + shift) - w1.to(tl.float32),
                    quick_exp2(z_odd * scale + shift) - w3.to(tl.float32),
                )
                # Not below 0, by the sign bit: one instruction finds a warp's largest integer.
                if (shift == INFINITY) | (tl.max(closest.to(tl.int32, bitcast=True), axis=0) >= 0):
                    score = z * colder + rough_gumbel(unit_interval(w0, w1))
                    first, second, winner = with_scores(first, second, winner, score, even)
                    score = z_odd * colder + rough_gumbel(unit_interval(w2, w3))
                    first, second, winner = with_scores(first, second, winner, score, even + 1)
                    shift = shift_of(first)
                total += quick_exp(raw - base) + quick_exp(raw_odd - base)
                most = tl.maximum(most, tl.maximum(z, z_odd))
                if MASKED:
                    strange += tl.where((z != z) | (z_odd != z_odd), float("nan"), 0.0)
                raw, raw_odd, z, z_odd = after, after_odd, next_z, next_z_odd
            out = row * parts + part
            whole, best = tl.sum(total, axis=0), tl.max(most, axis=0)
            tl.store(tops + out, base)
            tl.store(sums + out, whole)
            strange_one = tl.sum(strange, axis=0) if MASKED else whole
            tl.store(bests + out, tl.where(strange_one == strange_one, best, strange_one))
        start_next()
        name_winners(first, second, winner, scores, winners, row * programs + program, vocab)


def is_packed(logits: Tensor) -> bool:
    """Whether two neighbours can be loaded at once."""
    return logits.shape[1] % 2 == 0 and logits.stride(0) % 2 == 0 and logits.data_ptr() % 8 == 0


def noise_tiles(rows: int, vocab: int) -> dict[str, int]:
    """Parts have ids by the vocabulary alone, programs have parts by the rows: sums do not depend on the rows, and
    which token is best does not depend on who looks."""
    if vocab < 4 * PART:
        part = max(32, triton.next_power_of_2(max(vocab // 4, 1)))
        return {"PART": part, "PAIRS": min(PAIRS, part // 4), "PARTS": 2}
    return {"PART": PART, "PAIRS": PAIRS, "PARTS": PARTS if rows >= MANY else 1}
