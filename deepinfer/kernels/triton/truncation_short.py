"""The draw of a row whose candidates are listed: the border by bisection over registers, then the draw.

A row keeps the tokens with fewer than k better ones that together weigh less than top_p of the whole; both grow from
token to token, so the last one kept is found in the space of keys, and among its equals in the space of ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.overlap import start_next, wait_for_previous
from deepinfer.kernels.triton.philox import TARGET, gumbel_ids
from deepinfer.kernels.triton.sampling_rows import INFINITY, NO_ID, ordered_key, row_law
from deepinfer.kernels.triton.truncation_cut import ONE, exp_double


@triton.jit
def border_of(key, its, mass, is_one, k, bound, weighed, lowest, vocab):
    """The last token kept, as (key, an id below which those of that key are kept), and what is kept weighs.

    key int32, its int32, mass int64 [N] (0 where not is_one); lowest: the smallest key of all."""
    low, border = lowest - 1, tl.zeros((), tl.int32)
    # The smallest key above which there are fewer than k tokens that weigh less than `bound`: the last kept.
    while low < border:
        middle = low + ((border - low) >> 1)
        higher = is_one & (key > middle)
        passes = tl.sum(higher.to(tl.int32), axis=0) < k
        if weighed:
            passes = passes & (tl.sum(tl.where(higher, mass, 0), axis=0).to(tl.float64) < bound)
        low = tl.where(passes, low, middle + 1)
        border = tl.where(passes, middle, border)
    above = tl.sum((is_one & (key > border)).to(tl.int32), axis=0)
    equal = is_one & (key == border)
    ties = tl.sum(equal.to(tl.int32), axis=0)
    weight, own = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    kept = tl.minimum(k - above, ties)
    low = tl.full((), 1, tl.int32)
    if weighed:
        weight = tl.sum(tl.where(is_one & (key > border), mass, 0), axis=0)
        own = tl.max(tl.where(equal, mass, 0), axis=0)
        # How many of them stay: until those before weigh `bound`. By bisection: a float64 division would spill.
        while low < kept:
            middle = (low + kept) >> 1
            reached = (weight + middle.to(tl.int64) * own).to(tl.float64) >= bound
            low = tl.where(reached, low, middle + 1)
            kept = tl.where(reached, middle, kept)
    last_id = tl.full((), NO_ID, tl.int32)
    if kept < ties:  # the lowest ids of the equal ones: the smallest bound below which there are enough
        low, last_id = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + vocab  # 1 is no tensor
        while low < last_id:
            middle = (low + last_id) >> 1
            reached = tl.sum((equal & (its < middle)).to(tl.int32), axis=0) >= kept
            low = tl.where(reached, low, middle + 1)
            last_id = tl.where(reached, middle, last_id)
    return border, last_id, weight + kept.to(tl.int64) * own


@triton.jit
def _settled(count, own_t, own_ids, k, p, tail, position, seed_low, seed_high, vocab, WIDTH: tl.constexpr):
    """Token of a list of at most WIDTH, NO_ID if it is empty, and whether top_p's border is surely inside."""
    at = tl.arange(0, WIDTH)
    is_one = at < count
    t = tl.load(own_t + at, mask=is_one, other=-INFINITY)
    its = tl.load(own_ids + at, mask=is_one, other=NO_ID)
    key, mass = ordered_key(t), tl.zeros((WIDTH,), tl.int64)
    border, last_id = tl.min(tl.where(is_one, key, 0), axis=0) - 1, tl.full((), NO_ID, tl.int32)
    lowest, fine = border + 1, True
    bound, listed = tl.full((), INFINITY, tl.float64), tl.zeros((), tl.int64)
    if p < 1:
        mass = tl.where(is_one, exp_double(t) * ONE, 0.0).to(tl.int64)
        listed = tl.sum(mass, axis=0)
    phase = tl.where(k < vocab, tl.where(p < 1, 0, 1), tl.where(p < 1, 1, 2))
    if (phase == 1) & (p < 1):
        bound = p.to(tl.float64) * (listed.to(tl.float64) + tail * ONE)
        fine = (tail == 0) | (listed.to(tl.float64) >= bound)
    while phase < 2:
        if fine:
            border, last_id, kept = border_of(key, its, mass, is_one, k, bound, p < 1, lowest, vocab)
            # Where both cut, what top_p calls 1 is known once top_k's border is.
            bound = p.to(tl.float64) * kept.to(tl.float64)
        phase += 1
    stays = is_one & ((key > border) | ((key == border) & (its < last_id)))
    noise = gumbel_ids(its, position, TARGET, 0, seed_low, seed_high)
    score = tl.where(stays, t.to(tl.float64) + noise.to(tl.float64), -INFINITY)
    token = tl.min(tl.where(stays & (score == tl.max(score, axis=0)), its, NO_ID), axis=0)
    return token, fine


@triton.jit(do_not_specialize=["pieces"])
def settle_kernel(
    slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high, ids,
    counts, listed_t, listed_ids, tails, queue, chosen, vocab, pieces,
    TAILS: tl.constexpr, CAPACITY: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The token of a row with LEAST to WIDTH candidates. Where top_p's border is not among them, counts gets more than
    CAPACITY. Rows with more than a WIDTH of CAPACITY go to the queue, but for those that have two borders."""
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    slot, _heat, k, p, _least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    count = tl.load(counts + row)
    if cuts & (count >= LEAST) & (count <= WIDTH):
        own_t, own_ids = listed_t + row * CAPACITY, listed_ids + row * CAPACITY
        tail = tl.sum(tl.load(tails + row * TAILS + tl.arange(0, TAILS)).to(tl.float64), axis=0)
        position = tl.load(positions + row).to(tl.uint32)
        low, high = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        token, fine = _settled(count, own_t, own_ids, k, p, tail, position, low, high, vocab, WIDTH)
        if fine:
            # A row of NaN has no candidates.
            tl.store(chosen + row, tl.where(token < vocab, token, tl.load(ids + row * pieces)))
        else:
            count = CAPACITY + 1
            tl.store(counts + row, count)
    if WIDTH == CAPACITY and cuts & (count > CAPACITY) & ((k == vocab) | (p >= 1)):
        tl.store(queue + 1 + tl.atomic_add(queue, 1), row.to(tl.int32))
