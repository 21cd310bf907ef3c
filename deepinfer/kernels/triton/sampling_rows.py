"""What the launches of a draw share: how a row draws, its pieces of the vocabulary, and the order of its logits."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import INTERPRET

INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the smallest float32
NOT_A_NUMBER = tl.constexpr(2**31 - 1)  # the key of NaN, above that of infinity
NO_ID = tl.constexpr(2**31 - 1)
PIECE, STRIP = 16384, 1024  # ids that a program looks at, in all and at once: 8 a thread
WARPS = 4
GROUP = 32


class RowLaws(NamedTuple):
    """How rows draw: for each, whose parameters hold; for each slot, the parameters."""

    slots: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows] of the last known token
    temperature: Tensor  # float32 [slots], 0 = greedy
    top_k: Tensor  # int64 [slots], 0 = off
    top_p: Tensor  # float32 [slots], 1 = off
    log_min_p: Tensor  # float32 [slots], -inf = off: torch's logarithm, so that borders are the plain path's
    seed_low: Tensor  # int64 [slots], 32 bits each
    seed_high: Tensor
    drawn: bool = True  # False promises that all are greedy


@triton.jit
def ordered_key(z):
    """float32 -> int32 in the same order: -0.0 is 0.0, NaN above all."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(z != z, NOT_A_NUMBER, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def key_value(key):
    """The float32 of a key; NaN of NaN's."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def quick_exp2(x):
    """2^x of float32, as `quick_exp`."""
    if INTERPRET:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quick_exp(x):
    """exp of float32, right to 2^-22 like `tl.exp`; 0 below 2^-126, without the steps that save denormal numbers."""
    return quick_exp2(x * 1.4426950408889634)


@triton.jit
def masked_logits(z, ids, inside, masks, mask_row, words):
    """What a constraint leaves of logits: those that may not follow are -inf. A row of which nothing would be left has
    the smallest float for what may; it makes no other difference, because nothing else is as small."""
    if mask_row >= 0:
        word = tl.load(masks + mask_row * words + (ids >> 5), mask=inside, other=0)
        allowed = ((word >> (ids & 31)) & 1) != 0
        z = tl.where(allowed, tl.where(z < LOWEST, LOWEST, z), -INFINITY)
    return z


@triton.jit
def best_of_pieces(keys, ids, row, pieces, PIECES: tl.constexpr):
    """Key of a row's largest logit and the lowest id that has it, from its pieces'."""
    at = tl.arange(0, PIECES)
    inside = at < pieces
    key = tl.load(keys + row * pieces + at, mask=inside, other=-NOT_A_NUMBER - 1)
    best = tl.max(key, axis=0)
    first = tl.load(ids + row * pieces + at, mask=inside, other=NO_ID)
    return best, tl.min(tl.where(key == best, first, NO_ID), axis=0)


@triton.jit
def row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab):
    """slot, temperature, tokens that top_k leaves, top_p, log min_p, whether the row may drop tokens."""
    slot = tl.load(slots + row)
    heat, k = tl.load(temperature + slot), tl.load(top_k + slot)
    p, least = tl.load(top_p + slot), tl.load(log_min_p + slot)
    k = tl.where((k > 0) & (k < vocab), k, vocab).to(tl.int32)
    cuts = (heat > 0) & ((tl.load(top_k + slot) > 0) | (p < 1) | (least > -INFINITY))
    return slot, heat, k, p, least, cuts


@triton.jit
def keeps_all(slot, temperature, top_k, top_p, log_min_p):
    """Whether a slot's rows are drawn from all tokens."""
    whole = (tl.load(top_k + slot) == 0) & (tl.load(top_p + slot) >= 1) & (tl.load(log_min_p + slot) == -INFINITY)
    return (tl.load(temperature + slot) > 0) & whole


@triton.jit
def tempered(z, best, temperature):
    """(z - best) / temperature: measured from the row's best, a tiny temperature cannot overflow. Rounded as a division
    all but always (Markstein: product with the reciprocal, and one correction), at a third of its price."""
    distance = z - best
    if INTERPRET:
        quotient = tl.div_rn(distance, temperature)
    else:
        inverse = 1 / temperature  # approximate; a subroutine's division would cost registers everywhere
        inverse = tl.fma(tl.fma(-inverse, temperature, 1.0), inverse, inverse)
        guess = distance * inverse
        quotient = tl.fma(tl.fma(-guess, temperature, distance), inverse, guess)
    return tl.where(distance > -INFINITY, quotient, -INFINITY)


def piece_tiles(vocab: int) -> dict[str, int]:
    """Ids of one program and of one of its steps, from the vocabulary alone; small ones have seams, too."""
    if vocab >= PIECE:
        return {"PIECE": PIECE, "STRIP": STRIP, "num_warps": WARPS}
    piece = max(32, triton.next_power_of_2(max(vocab // 4, 1)))
    return {"PIECE": piece, "STRIP": max(16, piece // 2), "num_warps": WARPS}


def group_size(vocab: int) -> int:
    """Neighbouring ids whose best is kept together: a cache line of logits."""
    return GROUP if vocab >= PIECE else 4
