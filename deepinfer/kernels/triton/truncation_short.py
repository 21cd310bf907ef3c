"""The draw of a row with few candidates: every one is compared with every other, so no border has to be searched.

A candidate's rank and what the better ones weigh say at once whether it stays; a thousand candidates are a million
comparisons, still less than the thirty passes of a bisection one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import TARGET, gumbel_ids
from deepinfer.kernels.triton.sampling_rows import INFINITY, NO_ID
from deepinfer.kernels.triton.truncation_cut import ONE, exp_double, row_law


@triton.jit(do_not_specialize=["pieces"])
def short_kernel(
    slots, positions, temperature, top_k, top_p, log_min_p, seed_low, seed_high, ids,
    counts, listed_t, listed_ids, tails, masses, befores, ranks, chosen, vocab, pieces,
    PIECES: tl.constexpr, CAPACITY: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The token of a row with at most SHORT candidates. masses, befores int64, ranks int32 [rows, SHORT]: scratch."""
    row = tl.program_id(0).to(tl.int64)
    slot, _heat, k, p, _least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    count = tl.load(counts + row)
    if cuts & (count <= SHORT):
        own_t, own_ids, own = listed_t + row * CAPACITY, listed_ids + row * CAPACITY, row * SHORT
        block, others = tl.arange(0, BLOCK), tl.arange(0, OTHERS)
        whole = tl.zeros((BLOCK,), tl.int64)
        if p < 1:
            for first in range(0, count, BLOCK):
                at = first + block
                t = tl.load(own_t + at, mask=at < count, other=-INFINITY)
                mass = tl.where(at < count, exp_double(t) * ONE, 0.0).to(tl.int64)
                tl.store(masses + own + at, mass, mask=at < count)
                whole += tl.where(k == vocab, mass, 0)
            tl.debug_barrier()  # every thread reads what others wrote
        for first in range(0, count, BLOCK):
            at = first + block
            t = tl.load(own_t + at, mask=at < count, other=-INFINITY)
            its = tl.load(own_ids + at, mask=at < count, other=NO_ID)
            rank, before = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
            for start in range(0, count, OTHERS):
                there = start + others
                another = tl.load(own_t + there, mask=there < count, other=-INFINITY)[:, None]
                its_id = tl.load(own_ids + there, mask=there < count, other=NO_ID)[:, None]
                better = (another > t[None, :]) | ((another == t[None, :]) & (its_id < its[None, :]))
                rank += tl.sum(better.to(tl.int32), axis=0)
                if p < 1:
                    weight = tl.load(masses + own + there, mask=there < count, other=0)[:, None]
                    before += tl.sum(tl.where(better, weight, 0), axis=0)
            tl.store(ranks + own + at, rank, mask=at < count)
            tl.store(befores + own + at, before, mask=at < count)
            if (p < 1) & (k < vocab):  # top_p's whole is what top_k left
                mass = tl.load(masses + own + at, mask=at < count, other=0)
                whole += tl.where(rank < k, mass, 0)
        tl.debug_barrier()
        part = tl.arange(0, PIECES)
        tail = tl.sum(tl.load(tails + row * pieces + part, mask=part < pieces, other=0.0).to(tl.float64), axis=0)
        all_of_it = tl.sum(whole, axis=0).to(tl.float64) + tl.where(k == vocab, tail * ONE, 0.0)
        most = tl.where(p < 1, p.to(tl.float64) * all_of_it, tl.full((), INFINITY, tl.float64))
        position = tl.load(positions + row).to(tl.uint32)
        low, high = tl.load(seed_low + slot).to(tl.uint32), tl.load(seed_high + slot).to(tl.uint32)
        highest, winner = tl.full((BLOCK,), -INFINITY, tl.float64), tl.full((BLOCK,), NO_ID, tl.int32)
        for first in range(0, count, BLOCK):
            at = first + block
            inside = at < count
            t = tl.load(own_t + at, mask=inside, other=-INFINITY)
            its = tl.load(own_ids + at, mask=inside, other=0)
            rank = tl.load(ranks + own + at, mask=inside, other=NO_ID)
            before = tl.load(befores + own + at, mask=inside, other=0)
            stays = inside & (rank < k) & (before.to(tl.float64) < most)
            noise = gumbel_ids(its, position, TARGET, 0, low, high)
            score = tl.where(stays, t.to(tl.float64) + noise.to(tl.float64), -INFINITY)
            better = (score > highest) | ((score == highest) & (its < winner) & stays)
            winner = tl.where(better, its, winner)
            highest = tl.where(better, score, highest)
        token = tl.min(tl.where(highest == tl.max(highest, axis=0), winner, NO_ID), axis=0)
        # A row of NaN has no candidates.
        tl.store(chosen + row, tl.where(token < vocab, token, tl.load(ids + row * pieces)))
