"""The best of logit / temperature + noise of a piece of the vocabulary.

Almost no token can win, so all are scored roughly first: fast logarithms, right to 2e-5. The best is the winner unless
another comes within CLOSE of it, once in some thousand pieces; then all are scored again as the plain path does it. The
winner's own score always is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import TARGET, gumbel_ids, gumbel_pairs, pair_uniforms
from deepinfer.kernels.triton.runtime import INTERPRET
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    NO_ID,
    best_of_pieces,
    key_value,
    masked_logits,
    tempered,
)

CLOSE = tl.constexpr(2e-4)
MINUS_LN2 = tl.constexpr(-0.6931471805599453)
# Below, log(1 - u) by four terms of its series: u^4 / 5 = 1e-8 of the value; above, what 1 - u and lg2.approx lose
# (2^-24 and 2^-22) is at most 2e-5 of it.
SERIES = tl.constexpr(0.015625)


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


@triton.jit(do_not_specialize=["pieces", "words"])
def noise_kernel(
    logits, masks, mask_rows, slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high,
    keys, ids, scores, winners, stride, vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, STRIP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Of rows that keep every token: score float64 and id of the best of each piece, the lowest id of equal ones."""
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = tl.load(slots + row)
    heat = tl.load(temperature + slot)
    whole = (tl.load(top_k + slot) == 0) & (tl.load(top_p + slot) >= 1) & (tl.load(log_min_p + slot) == -INFINITY)
    if (heat > 0) & whole:
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        top, colder = key_value(best), 1 / heat
        position = tl.load(positions + row).to(tl.uint32)
        low, high = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        own, half = logits + row * stride, tl.arange(0, STRIP // 2)
        first = tl.full((STRIP // 2,), -INFINITY, tl.float32)
        second, winner = first, piece * PIECE + 2 * half
        for strip in range(0, PIECE, STRIP):
            pairs = (piece * PIECE + strip) // 2 + half
            even, odd = 2 * pairs, 2 * pairs + 1
            z_even = tl.load(own + even, mask=even < vocab, other=-INFINITY)
            z_odd = tl.load(own + odd, mask=odd < vocab, other=-INFINITY)
            if MASKED:
                z_even = masked_logits(z_even, even, even < vocab, masks, mask_row, words)
                z_odd = masked_logits(z_odd, odd, odd < vocab, masks, mask_row, words)
            u_even, u_odd = pair_uniforms(pairs, position, TARGET, 0, low, high)
            score = (z_even - top) * colder + rough_gumbel(u_even)
            winner = tl.where(score > first, even, winner)
            second = tl.maximum(second, tl.minimum(first, score))
            first = tl.maximum(first, score)
            score = (z_odd - top) * colder + rough_gumbel(u_odd)
            winner = tl.where(score > first, odd, winner)
            second = tl.maximum(second, tl.minimum(first, score))
            first = tl.maximum(first, score)
        highest = tl.max(first, axis=0)
        line = highest - CLOSE
        close = tl.sum((first >= line).to(tl.int32) + (second >= line).to(tl.int32), axis=0)
        token = tl.min(tl.where(first == highest, winner, NO_ID), axis=0)
        if close != 1 and highest > -INFINITY:
            exact = tl.full((STRIP // 2,), -INFINITY, tl.float64)
            for strip in range(0, PIECE, STRIP):
                pairs = (piece * PIECE + strip) // 2 + half
                even, odd = 2 * pairs, 2 * pairs + 1
                z_even = tl.load(own + even, mask=even < vocab, other=-INFINITY)
                z_odd = tl.load(own + odd, mask=odd < vocab, other=-INFINITY)
                if MASKED:
                    z_even = masked_logits(z_even, even, even < vocab, masks, mask_row, words)
                    z_odd = masked_logits(z_odd, odd, odd < vocab, masks, mask_row, words)
                g_even, g_odd = gumbel_pairs(pairs, position, TARGET, 0, low, high)
                more = tempered(z_even, top, heat).to(tl.float64) + g_even.to(tl.float64)
                winner = tl.where(more > exact, even, winner)
                exact = tl.where(more > exact, more, exact)
                more = tempered(z_odd, top, heat).to(tl.float64) + g_odd.to(tl.float64)
                winner = tl.where(more > exact, odd, winner)
                exact = tl.where(more > exact, more, exact)
            token = tl.min(tl.where(exact == tl.max(exact, axis=0), winner, NO_ID), axis=0)
        token = tl.minimum(token, vocab - 1)  # a row of NaN has no winner
        alone = token + tl.arange(0, 1)
        z = tl.load(own + alone)
        if MASKED:
            z = masked_logits(z, alone, alone >= 0, masks, mask_row, words)
        noise = gumbel_ids(alone, position, TARGET, 0, low, high).to(tl.float64)
        out = row * pieces + piece + tl.arange(0, 1)
        tl.store(scores + out, tempered(z, top, heat).to(tl.float64) + noise)
        tl.store(winners + out, alone)
