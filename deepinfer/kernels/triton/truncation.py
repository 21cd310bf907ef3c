"""min_p, top_k and top_p on the device, with the borders of `engine/truncation.py`, without sorting.

What a row keeps is a prefix of the order (logit descending, id ascending), so a smallest logit and, among its equals, a
largest id say it all. Three launches:

levels   counts tokens, or sums their exponentials, above LEVELS logits below the row's best: which of them is surely
         below the border;
collect  lists the tokens above that one, a few thousand of a peaked row, and sums exactly what top_p calls 1;
cut      one program a row: the border by bisection over the list, then the best of logit / temperature + noise.

Sums are whole numbers of 2^-45, so they do not depend on the order of a list; exponentials are right to 1e-11.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.philox import TARGET, gumbel_ids
from deepinfer.kernels.triton.runtime import launch
from deepinfer.kernels.triton.sampling import (
    INFINITY,
    NO_ID,
    PIECE,
    WARPS,
    RowLaws,
    best_of_pieces,
    key_value,
    masked_logits,
    ordered_key,
    piece_size,
    tempered,
)

LEVELS = 16  # the last one is the sum of all
CAPACITY = 16384  # of a row's list; a row with more is read from its logits again and again: right, and slow
ONE = tl.constexpr(2.0**45)  # times 2^17 ids stays below 2^63
MARGIN = tl.constexpr(1.0001)  # float32 sums of 2^17 terms in a tree are right to 1e-5


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
def row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab):
    """slot, temperature, tokens that top_k leaves, top_p, log min_p, whether the row may drop tokens."""
    slot = tl.load(slots + row)
    heat, k = tl.load(temperature + slot), tl.load(top_k + slot)
    p, least = tl.load(top_p + slot), tl.load(log_min_p + slot)
    k = tl.where((k > 0) & (k < vocab), k, vocab).to(tl.int32)
    cuts = (heat > 0) & ((tl.load(top_k + slot) > 0) | (p < 1) | (least > -INFINITY))
    return slot, heat, k, p, least, cuts


@triton.jit
def _lowest_level(keys, row, pieces, heat, p, k, vocab, PIECES: tl.constexpr):
    """How far below its best a row is looked at: top_p cannot reach further down than where all of the vocabulary
    together weighs 1 - p; a top_k is found above three times the distance of the worst piece's best, or not at all."""
    at = tl.arange(0, PIECES)
    key = tl.load(keys + row * pieces + at, mask=at < pieces, other=NO_ID)
    top = key_value(tl.max(tl.where(at < pieces, key, -NO_ID), axis=0))
    worst = key_value(tl.min(key, axis=0))
    reach = 3 * (worst - top) / heat
    share = tl.log(tl.maximum(1 - p, 1e-7) / vocab)
    return tl.maximum(tl.where(k < vocab, reach, share), -1e30)


@triton.jit(do_not_specialize=["vocab", "pieces", "words"])
def _levels_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, levels, stride, vocab, pieces,
    words, MASKED: tl.constexpr, PIECES: tl.constexpr, LEVELS: tl.constexpr, STRIP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _slot, heat, k, p, least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    if cuts & ((k < vocab) | (p < 1)):
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        top = key_value(best)
        level = tl.arange(0, LEVELS)
        lowest = _lowest_level(keys, row, pieces, heat, p, k, vocab, PIECES)
        bound = tl.where(level == LEVELS - 1, -1e38, lowest * (level + 1) / (LEVELS - 1))
        total = tl.zeros((LEVELS, STRIP), tl.float32)
        for first in range(0, PIECE, STRIP):
            at = piece * PIECE + first + tl.arange(0, STRIP)
            z = tl.load(logits + row * stride + at, mask=at < vocab, other=-INFINITY)
            if MASKED:
                z = masked_logits(z, at, at < vocab, masks, tl.load(mask_rows + row), words)
            t = (z - top) / heat
            weight = tl.where(t >= least, tl.where(k < vocab, 1.0, tl.exp(t)), 0.0)
            total += tl.where(t[None, :] >= bound[:, None], weight[None, :], 0.0)
        tl.store(levels + (row * pieces + piece) * LEVELS + level, tl.sum(total, axis=1))


@triton.jit(do_not_specialize=["vocab", "pieces", "words"])
def _collect_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, levels,
    counts, listed_t, listed_ids, wholes, stride, vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, LEVELS: tl.constexpr, CAPACITY: tl.constexpr, PIECE: tl.constexpr,
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
            reach = _lowest_level(keys, row, pieces, heat, p, k, vocab, PIECES)
            bound = reach * (level + 1) / (LEVELS - 1)
            enough = (above >= wanted) & (level < LEVELS - 1)
            # A little lower: here a temperature divides with another rounding than there.
            border = tl.max(tl.where(enough, bound - tl.abs(bound) * 1e-5, -INFINITY), axis=0)
            lowest = tl.maximum(lowest, border)
        at = piece * PIECE + tl.arange(0, PIECE)
        z = tl.load(logits + row * stride + at, mask=at < vocab, other=-INFINITY)
        if MASKED:
            z = masked_logits(z, at, at < vocab, masks, tl.load(mask_rows + row), words)
        t = tempered(z, top, heat)
        if (k == vocab) & (p < 1):
            mass = tl.where((t >= least) & (t > -INFINITY), exp_double(t) * ONE, 0.0)
            tl.store(wholes + row * pieces + piece, tl.sum(mass.to(tl.int64), axis=0))
        taken = ((t >= lowest) & (t > -INFINITY)).to(tl.int32)
        number = tl.sum(taken, axis=0)
        if number > 0:
            place = tl.atomic_add(counts + row, number) + tl.cumsum(taken, axis=0) - 1
            held = (taken == 1) & (place < CAPACITY)
            tl.store(listed_t + row * CAPACITY + place, t, mask=held)
            tl.store(listed_ids + row * CAPACITY + place, at, mask=held)


@triton.jit
def _candidates(
    first, count, listed, logits_row, listed_t, listed_ids, masks, mask_row, words, top, heat, least,
    MASKED: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """t, ids and whether it is one, of STRIP places of the list, or of the whole row where it has no list."""
    at = first + tl.arange(0, STRIP)
    inside = at < count
    ids, t = at, tl.zeros((STRIP,), tl.float32)
    if listed:
        ids = tl.load(listed_ids + at, mask=inside, other=0)
        t = tl.load(listed_t + at, mask=inside, other=-INFINITY)
    else:
        z = tl.load(logits_row + at, mask=inside, other=-INFINITY)
        if MASKED:
            z = masked_logits(z, at, inside, masks, mask_row, words)
        t = tempered(z, top, heat)
    return t, ids, inside & (t >= least) & (t > -INFINITY)


@triton.jit(do_not_specialize=["vocab", "pieces", "words"])
def _cut_kernel(
    logits, masks, mask_rows, slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high, keys, ids,
    counts, listed_t, listed_ids, wholes, chosen, stride, vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, heat, k, p, least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    best, best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
    top = key_value(best)
    if cuts & (tl.abs(top) < INFINITY):
        count = tl.load(counts + row)
        listed = count <= CAPACITY
        count = tl.where(listed, count, vocab)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        logits_row, own_t, own_ids = logits + row * stride, listed_t + row * CAPACITY, listed_ids + row * CAPACITY
        lowest = tl.zeros((), tl.int32)
        for first in range(0, count, STRIP):
            t, _, is_one = _candidates(
                first, count, listed, logits_row, own_t, own_ids, masks, mask_row, words, top, heat, least, MASKED,
                STRIP,
            )  # fmt: skip
            lowest = tl.minimum(lowest, tl.min(tl.where(is_one, ordered_key(t), 0), axis=0))
        at = tl.arange(0, PIECES)
        part = tl.load(wholes + row * pieces + at, mask=at < pieces, other=0)  # unwritten where it is not used
        # Of everything better than a token: fewer than k, and less than `most`.
        endless = tl.full((), INFINITY, tl.float64)
        most = tl.where(p < 1, p.to(tl.float64) * tl.sum(part, axis=0).to(tl.float64), endless)
        # Where both cut, what top_p calls 1 is known once top_k's border is.
        phase = tl.where(k < vocab, tl.where(p < 1, 0, 1), tl.where(p < 1, 1, 2))
        border, last_id = lowest - 1, tl.full((), NO_ID, tl.int32)
        while phase < 2:
            bound = tl.where(phase == 0, endless, most)
            # The smallest key above which there are fewer than k tokens that weigh less than `bound`: the last kept.
            low, border = lowest - 1, tl.zeros((), tl.int32)
            above, mass, done = tl.zeros((), tl.int32), tl.zeros((), tl.int64), low * 0
            ties = tl.zeros((), tl.int32)
            while done == 0:
                # Once it is found, what is above it and how many are equal to it.
                found = low >= border
                middle = tl.where(found, border, low + ((border - low) >> 1))
                above, mass, ties = tl.zeros((), tl.int32), tl.zeros((), tl.int64), tl.zeros((), tl.int32)
                for first in range(0, count, STRIP):
                    t, _, is_one = _candidates(
                        first, count, listed, logits_row, own_t, own_ids, masks, mask_row, words, top, heat, least,
                        MASKED, STRIP,
                    )  # fmt: skip
                    key = ordered_key(t)
                    higher = is_one & (key > middle)
                    above += tl.sum(higher.to(tl.int32), axis=0)
                    ties += tl.sum((is_one & (key == middle)).to(tl.int32), axis=0)
                    if p < 1:
                        mass += tl.sum(tl.where(higher, exp_double(t) * ONE, 0.0).to(tl.int64), axis=0)
                passes = (above < k) & (mass.to(tl.float64) < bound)
                done = found.to(tl.int32)
                low = tl.where(passes | found, low, middle + 1)
                border = tl.where(passes & (done == 0), middle, border)
            own = (exp_double(key_value(border)) * ONE).to(tl.int64)  # of one of the equal tokens
            room = tl.minimum(k - above, ties)
            fitting = tl.ceil((bound - mass.to(tl.float64)) / tl.maximum(own, 1).to(tl.float64))
            kept = tl.where(own > 0, tl.minimum(fitting, room.to(tl.float64)), room.to(tl.float64)).to(tl.int32)
            if phase == 0:
                most = p.to(tl.float64) * (mass + kept.to(tl.int64) * own).to(tl.float64)
            elif kept < ties:  # the lowest ids of the equal ones: the smallest bound below which there are enough
                low, last_id = tl.zeros((), tl.int32), vocab.to(tl.int32)
                while low < last_id:
                    middle = (low + last_id) >> 1
                    below = tl.zeros((), tl.int32)
                    for first in range(0, count, STRIP):
                        t, its, is_one = _candidates(
                            first, count, listed, logits_row, own_t, own_ids, masks, mask_row, words, top, heat, least,
                            MASKED, STRIP,
                        )  # fmt: skip
                        hit = is_one & (ordered_key(t) == border) & (its < middle)
                        below += tl.sum(hit.to(tl.int32), axis=0)
                    low = tl.where(below >= kept, low, middle + 1)
                    last_id = tl.where(below >= kept, middle, last_id)
            phase += 1
        position = tl.load(positions + row).to(tl.uint32)
        seed = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        highest, winner = -endless, best_id
        for first in range(0, count, STRIP):
            t, its, is_one = _candidates(
                first, count, listed, logits_row, own_t, own_ids, masks, mask_row, words, top, heat, least, MASKED,
                STRIP,
            )  # fmt: skip
            key = ordered_key(t)
            stays = is_one & ((key > border) | ((key == border) & (its < last_id)))
            noise = gumbel_ids(its, position, TARGET, 0, seed[0], seed[1])
            score = tl.where(stays, t.to(tl.float64) + noise.to(tl.float64), -INFINITY)
            highest_here = tl.max(score, axis=0)
            winner_here = tl.min(tl.where(stays & (score == highest_here), its, NO_ID), axis=0)
            better = (highest_here > highest) | ((highest_here == highest) & (winner_here < winner))
            winner = tl.where(better, winner_here, winner)
            highest = tl.where(better, highest_here, highest)
        tl.store(chosen + row, winner)


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
    piece, device, stride = piece_size(vocab), logits.device, logits.stride(0)
    capacity, words = min(CAPACITY, triton.next_power_of_2(max(vocab // 2, 16))), (vocab + 31) // 32
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    levels = torch.empty(rows, pieces, LEVELS, device=device)
    listed_t = torch.empty(rows, capacity, device=device)
    listed_ids = torch.empty(rows, capacity, dtype=torch.int32, device=device)
    wholes = torch.empty(rows, pieces, dtype=torch.int64, device=device)
    chosen = torch.empty(rows, dtype=torch.int32, device=device)
    constraints = (masks, mask_rows) if masks is not None else (keys, keys)
    parameters = (laws.temperature, laws.top_k, laws.top_p, laws.log_min_p)
    common = {"MASKED": masks is not None, "PIECES": triton.next_power_of_2(pieces)}
    grid, tail, warps = (pieces, rows), (stride, vocab, pieces, words), WARPS if piece == PIECE else 4
    launch(
        _levels_kernel, grid, logits, *constraints, laws.slots, *parameters, keys, ids, levels, *tail, **common,
        LEVELS=LEVELS, STRIP=min(piece, 512), PIECE=piece, num_warps=warps,
    )  # fmt: skip
    launch(
        _collect_kernel, grid, logits, *constraints, laws.slots, *parameters, keys, ids, levels, counts, listed_t,
        listed_ids, wholes, *tail, **common, LEVELS=LEVELS, CAPACITY=capacity, PIECE=piece, num_warps=warps,
    )  # fmt: skip
    launch(
        _cut_kernel, (rows,), logits, *constraints, laws.slots, laws.positions, *parameters, laws.seed_low,
        laws.seed_high, keys, ids, counts, listed_t, listed_ids, wholes, chosen, *tail, **common, CAPACITY=capacity,
        STRIP=min(capacity, 4096), num_warps=WARPS,
    )  # fmt: skip
    return chosen
