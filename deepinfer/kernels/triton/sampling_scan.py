"""One read of the logits: each row's largest one, the sum of its exponentials, and what GROUPs of neighbours hold.

Which kernel reads a row depends on the row alone: a sum has the same order whatever else is in a batch. A group's
largest logit and, where top_p asks, what the group weighs are enough to tell later which groups hold tokens that may be
kept (truncation.py), so that only those are read again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.overlap import start_next, wait_for_previous
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    LOWEST,
    NO_ID,
    NOT_A_NUMBER,
    masked_logits,
    ordered_key,
    quick_exp,
    row_law,
)


@triton.jit(do_not_specialize=["pieces", "words"])
def plain_scan_kernel(
    logits, masks, mask_rows, slots, temperature, keys, ids, tops, sums, stride, vocab, pieces, words,
    MASKED: tl.constexpr, DRAWN: tl.constexpr, STRIP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Of greedy rows, and they are all unless DRAWN: largest logit, its first id, and the sum of exponentials of a
    piece. Every lane keeps its own until the end."""
    wait_for_previous()
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    greedy = True
    if DRAWN:
        greedy = tl.load(temperature + tl.load(slots + row)) <= 0
    if greedy:
        lane = piece * PIECE + tl.arange(0, STRIP)
        own = logits + row * stride
        top, best = tl.full((STRIP,), -INFINITY, tl.float32), tl.full((STRIP,), -INFINITY, tl.float32)
        total, odd = tl.zeros((STRIP,), tl.float32), tl.zeros((STRIP,), tl.int32)
        where = tl.zeros((STRIP,), tl.int32)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        for strip in range(0, PIECE, STRIP):
            at = lane + strip
            raw = tl.load(own + at, mask=at < vocab, other=-INFINITY)
            # A NaN is not higher than anything, but the sum is NaN from there on.
            base = tl.maximum(tl.maximum(top, raw), LOWEST)
            total = total * quick_exp(top - base) + quick_exp(raw - base)
            z = raw
            if MASKED:
                z = masked_logits(raw, at, at < vocab, masks, mask_row, words)
                odd = tl.where(z != z, 1, odd)
            where = tl.where(z > best, strip, where)
            best = tl.where(z > best, z, best)
            top = tl.where(raw > top, raw, top)
        start_next()
        highest = tl.max(top, axis=0)
        base = tl.maximum(highest, LOWEST)
        total_here = tl.sum(total * quick_exp(tl.maximum(top, LOWEST) - base), axis=0)
        out = row * pieces + piece
        tl.store(tops + out, base)
        tl.store(sums + out, total_here)
        strange = total_here != total_here
        if MASKED:
            strange = tl.max(odd, axis=0) > 0
            highest = tl.max(best, axis=0)
        tl.store(keys + out, tl.where(strange, NOT_A_NUMBER, ordered_key(highest)))
        tl.store(ids + out, tl.min(tl.where(best == highest, lane + where, NO_ID), axis=0))


@triton.jit(do_not_specialize=["pieces", "words"])
def group_scan_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, tops, sums, bests, weights, queue,
    stride, vocab, pieces, words,
    MASKED: tl.constexpr, STRIP: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of rows that may drop tokens the same, and bests float32 [rows, pieces * PIECE // GROUP], each group's largest
    logit, and, where top_p needs it, weights of the same shape: the sum of exp((logit - best) / temperature) over the
    group; queue int32 [1 + rows]: empty."""
    wait_for_previous()
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(queue, 0)
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _slot, heat, k, p, _least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    if cuts:
        weighed, colder = (k == vocab) & (p < 1), 1 / heat
        lane = piece * PIECE + tl.arange(0, STRIP // GROUP) * GROUP
        own, member = logits + row * stride, tl.arange(0, GROUP)
        top, total = tl.full((STRIP // GROUP,), LOWEST, tl.float32), tl.zeros((STRIP // GROUP,), tl.float32)
        best, where = tl.full((STRIP // GROUP,), -INFINITY, tl.float32), tl.zeros((STRIP // GROUP,), tl.int32)
        odd = tl.zeros((STRIP // GROUP,), tl.int32)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        groups = row * pieces * (PIECE // GROUP) + lane // GROUP
        at = lane[:, None] + member[None, :]
        after = tl.load(own + at, mask=at < vocab, other=-INFINITY)
        for strip in range(0, PIECE, STRIP):
            raw, at = after, lane[:, None] + strip + member[None, :]
            # The next ones are on their way while these are worked on.
            after = tl.load(own + at + STRIP, mask=(at + STRIP < vocab) & (strip + STRIP < PIECE), other=-INFINITY)
            # A NaN is not higher than anything, but the sum is NaN from there on.
            highest = tl.max(raw, axis=1)
            base = tl.maximum(highest, LOWEST)
            weight = tl.sum(quick_exp(raw - base[:, None]), axis=1)
            higher = tl.maximum(top, base)
            total = total * quick_exp(top - higher) + weight * quick_exp(base - higher)
            top = higher
            z = raw
            if MASKED:
                z = masked_logits(raw, at, at < vocab, masks, mask_row, words)
                odd = tl.maximum(odd, tl.max((z != z).to(tl.int32), axis=1))
                highest = tl.max(z, axis=1)
                base = tl.maximum(highest, LOWEST)
            where = tl.where(highest > best, strip, where)
            best = tl.maximum(highest, best)
            tl.store(bests + groups + strip // GROUP, highest)
            if weighed:
                if MASKED | (colder != 1):
                    weight = tl.sum(quick_exp((z - base[:, None]) * colder), axis=1)
                tl.store(weights + groups + strip // GROUP, weight)
        start_next()
        base = tl.max(top, axis=0)
        total_here = tl.sum(total * quick_exp(top - base), axis=0)
        highest = tl.max(best, axis=0)
        out = row * pieces + piece
        tl.store(tops + out, base)
        tl.store(sums + out, total_here)
        strange = total_here != total_here
        if MASKED:
            strange = tl.max(odd, axis=0) > 0
        tl.store(keys + out, tl.where(strange, NOT_A_NUMBER, ordered_key(highest)))
        # The first group that has the largest one, and its place there.
        first = tl.min(tl.where(best == highest, lane + where, NO_ID), axis=0)
        at = tl.minimum(first, vocab - 1) + member
        z = tl.load(own + at, mask=at < vocab, other=-INFINITY)
        if MASKED:
            z = masked_logits(z, at, at < vocab, masks, mask_row, words)
        found = tl.min(tl.where(z == highest, at, NO_ID), axis=0)
        tl.store(ids + out, tl.minimum(found, vocab - 1))  # a row of NaN has none
