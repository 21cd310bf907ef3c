"""min_p, top_k and top_p on the device, with the borders of `engine/truncation.py`, without sorting.

What a row keeps is a prefix of the order (logit descending, id ascending), so a smallest logit and, among its equals, a
largest id say it all. Launches behind the scan, which has left each group's largest logit and weight:

threshold    one program a row: a logit that is as good as surely below the border, from the groups alone, and the
             groups whose best is above;
collect      reads only those, lists their tokens above it, a few hundred of a peaked row, and sums others for top_p;
settle       one program a row: whether the list holds the border, which of it stay, the best of logit / temperature +
             noise;
long         rows with more tokens than a list holds, or a threshold that was too high (truncation_long.py);
cut          what is left over: such rows with both top_k and top_p, or thousands of equal logits at the border.

Sums over a list are whole numbers of 2^-45, so they do not depend on its order; exponentials there are right to 1e-11.
Those of the tokens outside are float32 (1e-7), at most 1 - top_p of the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.runtime import launch
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    NO_ID,
    RowLaws,
    best_of_pieces,
    group_size,
    key_value,
    masked_logits,
    piece_tiles,
    quick_exp,
    row_law,
    tempered,
)
from deepinfer.kernels.triton.truncation_cut import cut_kernel
from deepinfer.kernels.triton.truncation_long import draw_long
from deepinfer.kernels.triton.truncation_short import settle_kernel

CAPACITY = 4096  # of a row's list, which `settle` holds in registers
SHORT = 1024  # most lists are shorter than this
MOST = tl.constexpr(0.55)  # of the groups: 0.8 tokens above the threshold each where all are alike
CUT_STRIP, CUT_WARPS = 512, 8
COLLECTORS = 8  # programs a row that list


@triton.jit
def _sum_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit(do_not_specialize=["pieces"])
def threshold_kernel(
    slots, temperature, top_k, top_p, log_min_p, keys, ids, bests, weights, hits, numbers, counts, lows, tails, vocab,
    pieces,
    PIECES: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
    COLLECTORS: tl.constexpr,
):  # fmt: skip
    """lows float32 [rows]: (logit - best) / temperature from which on a row's tokens are listed. hits int32 [rows,
    groups]: groups to read, numbers int32 [rows] of them, first those whose best is to be listed, counts int32 [rows]
    of them; counts is more than CAPACITY where the list would be too long. tails float32 [rows, 2 * COLLECTORS]: in the
    second half what groups weigh that are not read. PARTS: groups of a piece."""
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    _slot, heat, k, p, least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    if cuts:
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        groups, at = pieces * PARTS, tl.arange(0, PIECES * PARTS)
        z = tl.load(bests + row * groups + at, mask=at < groups, other=-INFINITY)
        t = tempered(z, key_value(best), heat)
        low, high = -INFINITY, 0.0
        weight = tl.zeros((PIECES * PARTS,), tl.float32)
        weighed = (k == vocab) & (p < 1)
        if k < groups:
            # k groups have their best there, so at least k tokens are.
            low = tl.maximum(tl.min(tl.where(t > -INFINITY, t, 0.0), axis=0), -1e30)
            for _ in range(20):
                middle = 0.5 * (low + high)
                enough = tl.sum((t >= middle).to(tl.int32), axis=0) >= k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            low = tl.where(tl.sum((t >= low).to(tl.int32), axis=0) >= k, low, -INFINITY)
        elif weighed:
            # Below `low` there must be less than (1 - p) of all. A group whose best is below is so with all that it
            # weighs. Of the others the best is above, and the rest at most (GROUP - 1) exp(low), or as much as those
            # of groups below, were all alike: that is no bound, so `settle` looks whether it was enough.
            weight = tl.load(weights + row * groups + at, mask=at < groups, other=0.0)
            e = quick_exp(t)
            rest = tl.where(t >= least, (weight * 1.000001 - 1) * e, 0.0)
            weight = tl.where(t >= least, weight * e, 0.0)
            spare = (1 - p) * 0.95 * tl.sum(weight, axis=0)
            # Where all of the vocabulary together weighs 1 - p there can be no border any more.
            low = tl.log(tl.maximum(1 - p, 1e-7) / vocab)
            for _ in range(14):
                middle = 0.5 * (low + high)
                above = t >= middle
                line = (GROUP - 1) * quick_exp(tl.full((1,), middle, tl.float32))
                loose = tl.where(above, tl.minimum(rest, line), 0.0)
                number, below, loose = tl.reduce(
                    (above.to(tl.float32), tl.where(above, 0.0, weight), loose), 0, _sum_of_three
                )
                alike = below * (number / tl.maximum(groups - number, 1.0))
                enough = below + tl.minimum(loose, alike) <= spare
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
        low = tl.maximum(low, least)
        hit = (t >= low) & (t > -INFINITY)
        number = tl.sum(hit.to(tl.int32), axis=0)
        many = number > tl.minimum(groups * MOST, CAPACITY * 0.8)
        place, asked = tl.cumsum(hit.to(tl.int32), axis=0) - 1, number
        tl.store(counts + row, tl.where(many, CAPACITY + 1, number))
        if weighed & (least > -INFINITY):
            # With min_p what a group weighs may not count, so all that has some is read.
            other = (t >= least) & (t > -INFINITY) & (t < low)
            place = tl.where(hit, place, number + tl.cumsum(other.to(tl.int32), axis=0) - 1)
            hit = hit | other
            asked = tl.sum(hit.to(tl.int32), axis=0)
        tl.store(hits + row * groups + place, at, mask=hit)
        tl.store(lows + row, low)
        tl.store(numbers + row, tl.where(many, 0, asked))
        place = tl.arange(0, COLLECTORS)
        rest = tl.where(place == 0, tl.sum(tl.where(hit, 0.0, weight), axis=0), 0.0)
        tl.store(tails + (2 * row + 1) * COLLECTORS + place, rest)


@triton.jit(do_not_specialize=["pieces", "words"])
def collect_kernel(
    logits, masks, mask_rows, slots, temperature, top_k, top_p, log_min_p, keys, ids, hits, numbers, lows,
    counts, listed_t, listed_ids, tails, stride, vocab, pieces, words,
    MASKED: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
    TILE: tl.constexpr, COLLECTORS: tl.constexpr,
):  # fmt: skip
    """Lists of `counts` tokens: at the place of each group its best one, the others behind in any order. tails: in the
    first half what was read and not listed weighs."""
    wait_for_previous()
    row, program = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _slot, heat, k, p, least, cuts = row_law(slots, temperature, top_k, top_p, log_min_p, row, vocab)
    if cuts:
        best, _best_id = best_of_pieces(keys, ids, row, pieces, PIECES)
        top, lowest, number = key_value(best), tl.load(lows + row), tl.load(numbers + row)
        weighed = (k == vocab) & (p < 1)
        mask_row = tl.load(mask_rows + row) if MASKED else 0
        member = tl.arange(0, GROUP)
        tail = tl.zeros((TILE,), tl.float32)
        for first in range(program * TILE, number, COLLECTORS * TILE):
            index = first + tl.arange(0, TILE)
            group = tl.load(hits + row * pieces * PARTS + index, mask=index < number, other=0)
            at = group[:, None] * GROUP + member[None, :]
            inside = (index < number)[:, None] & (at < vocab)
            z = tl.load(logits + row * stride + at, mask=inside, other=-INFINITY)
            if MASKED:
                z = masked_logits(z, at, inside, masks, mask_row, words)
            t = tempered(z, top, heat)
            is_taken = inside & (t >= lowest) & (t > -INFINITY)
            if weighed:
                tail += tl.sum(tl.where((t >= least) & (t < lowest), quick_exp(t), 0.0), axis=1)
            first_id = tl.min(tl.where(t == tl.max(t, axis=1)[:, None], at, NO_ID), axis=1)
            is_best = at == first_id[:, None]
            # Others are few, so each asks for its own place: no step waits for all threads. Relaxed, or every one of
            # these would empty the first-level cache.
            place = tl.atomic_add(counts + row + at * 0, 1, mask=is_taken & ~is_best, sem="relaxed")
            place = tl.where(is_best, index[:, None], place)
            held = is_taken & (place < CAPACITY)
            tl.store(listed_t + row * CAPACITY + place, t, mask=held)
            tl.store(listed_ids + row * CAPACITY + place, at, mask=held)
        start_next()
        tl.store(tails + 2 * row * COLLECTORS + program, tl.sum(tail, axis=0))


def draw_truncated(
    logits: Tensor,
    laws: RowLaws,
    keys: Tensor,
    ids: Tensor,
    bests: Tensor,
    weights: Tensor,
    queue: Tensor,
    masks: Tensor | None,
    mask_rows: Tensor | None,
) -> Tensor:
    """Tokens int32 [rows] of rows that may drop some; unwritten for others. keys, ids int32 [rows, pieces]: of the best
    of each piece of the row; bests, weights float32 [rows, groups]: of each group, from the scan."""
    (rows, vocab), pieces = logits.shape, keys.shape[1]
    tiles, device, stride = piece_tiles(vocab), logits.device, logits.stride(0)
    capacity, words = min(CAPACITY, triton.next_power_of_2(max(vocab // 2, 16))), (vocab + 31) // 32
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    lows = torch.empty(rows, device=device)
    listed_t = torch.empty(rows, capacity, device=device)
    listed_ids = torch.empty(rows, capacity, dtype=torch.int32, device=device)
    tails = torch.empty(rows, 2 * COLLECTORS, device=device)
    hits, numbers = torch.empty_like(bests, dtype=torch.int32), torch.empty_like(counts)
    chosen = torch.empty(rows, dtype=torch.int32, device=device)
    constraints = (keys, keys) if masks is None or mask_rows is None else (masks, mask_rows)
    parameters = (laws.temperature, laws.top_k, laws.top_p, laws.log_min_p)
    common = {"MASKED": masks is not None, "PIECES": triton.next_power_of_2(pieces)}
    group = group_size(vocab)
    parts = {"GROUP": group, "PARTS": tiles["PIECE"] // group}
    tail = (stride, vocab, pieces, words)
    launch(
        threshold_kernel, (rows,), laws.slots, *parameters, keys, ids, bests, weights, hits, numbers, counts, lows,
        tails, vocab, pieces, PIECES=common["PIECES"], **parts, CAPACITY=capacity,
        COLLECTORS=COLLECTORS, num_warps=8, **OVERLAP,
    )  # fmt: skip
    launch(
        collect_kernel, (COLLECTORS, rows), logits, *constraints, laws.slots, *parameters, keys, ids, hits, numbers,
        lows, counts, listed_t, listed_ids, tails, *tail, **common, **parts, CAPACITY=capacity, TILE=32,
        COLLECTORS=COLLECTORS, num_warps=4,
        **OVERLAP,
    )  # fmt: skip
    seeds = laws.seed_low, laws.seed_high
    short = min(SHORT, capacity // 2)
    for least, width, warps in ((0, short, 8), (short + 1, capacity, 16)):
        launch(
            settle_kernel, (rows,), laws.slots, laws.positions, *parameters, *seeds, ids, counts, listed_t, listed_ids,
            tails, queue, chosen, vocab, pieces, TAILS=2 * COLLECTORS, CAPACITY=capacity, LEAST=least, WIDTH=width,
            num_warps=warps, **OVERLAP,
        )  # fmt: skip
    draw_long(logits, laws, constraints, masks is not None, keys, ids, queue, counts, listed_t, listed_ids, chosen)
    launch(
        cut_kernel, (rows,), logits, *constraints, laws.slots, laws.positions, *parameters, *seeds, keys, ids, counts,
        chosen, *tail, **common, CAPACITY=capacity, STRIP=min(capacity, CUT_STRIP), num_warps=CUT_WARPS, **OVERLAP,
    )  # fmt: skip
    return chosen
