"""From a step's logits to its tokens in a few launches: the laws of `engine/target.py` without the host.

Two stages. Programs over pieces of the vocabulary find the largest logit, the sum of exponentials and, where noise
decides, the best of logit / temperature + noise; one program a row puts the pieces together. Rows that drop tokens
(min_p, top_k, top_p) go through `truncation.py` in between. A piece's size depends on the vocabulary alone, and no sum
of floats depends on the order in which programs end: a row's token does not know its batch.

What is equal to the plain path and what may not be: argmax, ties, masks, min_p, top_k and random words are equal, and a
temperature divides with the same rounding all but always. Noise is right to a unit in the last place, and what top_p
calls 1 to 1e-8; so a token differs where two of them are closer than that, about once in a million draws. In a thousand
draws over the full vocabulary on an H200 none did.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.noise import noise_kernel
from deepinfer.kernels.triton.runtime import launch
from deepinfer.kernels.triton.sampling_rows import (
    INFINITY,
    LOWEST,
    NO_ID,
    NOT_A_NUMBER,
    RowLaws,
    best_of_pieces,
    key_value,
    masked_logits,
    ordered_key,
    piece_tiles,
    quick_exp,
)
from deepinfer.kernels.triton.truncation import draw_truncated


class Sampled(NamedTuple):
    token_ids: Tensor  # int64 [rows]
    logprobs: Tensor  # float32 [rows], natural log, from the raw logits
    valid: Tensor  # bool [rows]; False: no finite largest logit, the token means nothing


@triton.jit(do_not_specialize=["pieces", "words"])
def _scan_kernel(
    logits, masks, mask_rows, keys, ids, tops, sums, stride, vocab, pieces, words,
    MASKED: tl.constexpr, STRIP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Largest logit, its first id, and the sum of exponentials of a piece. Every lane keeps its own until the end."""
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
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


@triton.jit(do_not_specialize=["pieces"])
def _finish_kernel(
    logits, slots, temperature, top_k, top_p, log_min_p, keys, ids, tops, sums, scores, winners, chosen,
    token_ids, logprobs, valid, stride, pieces,
    DRAWN: tl.constexpr, TRUNCATED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best, token = best_of_pieces(keys, ids, row, pieces, PIECES)
    at = tl.arange(0, PIECES)
    inside = at < pieces
    finite = (best < NOT_A_NUMBER) & (tl.abs(key_value(best)) < INFINITY)
    if DRAWN:
        slot = tl.load(slots + row)
        if (tl.load(temperature + slot) > 0) & finite:
            whole = (
                (tl.load(top_k + slot) == 0) & (tl.load(top_p + slot) >= 1) & (tl.load(log_min_p + slot) == -INFINITY)
            )
            if whole:
                score = tl.load(scores + row * pieces + at, mask=inside, other=-INFINITY)
                winner = tl.load(winners + row * pieces + at, mask=inside, other=NO_ID)
                token = tl.min(tl.where(score == tl.max(score, axis=0), winner, NO_ID), axis=0)
            elif TRUNCATED:
                token = tl.load(chosen + row)
    top = tl.load(tops + row * pieces + at, mask=inside, other=-INFINITY)
    part = tl.load(sums + row * pieces + at, mask=inside, other=0.0)
    base = tl.max(top, axis=0)
    total = tl.sum(tl.where(inside, part * tl.exp(top - base), 0.0), axis=0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + row * stride + token) - base - tl.log(total))
    tl.store(valid + row, finite)


def sample(
    logits: Tensor,
    laws: RowLaws | None = None,
    *,
    drawn: bool = True,
    truncated: bool = True,
    masks: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Sampled:
    """One token per row of logits float32 [rows, vocab], raw, not changed; rows contiguous, vocab >= 1.

    laws None: all rows are greedy. drawn, truncated: False promises that no row has a temperature, or drops tokens, and
    saves the launches. masks int32 [n, (vocab + 31) // 32] with mask_rows int64 [rows] (-1 = none): what may follow, as
    `select.constrain_rows`.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    tiles = piece_tiles(vocab)
    pieces = triton.cdiv(vocab, tiles["PIECE"])
    device, stride = logits.device, logits.stride(0)
    keys, ids = torch.empty(2, rows, pieces, dtype=torch.int32, device=device)
    tops, sums = torch.empty(2, rows, pieces, device=device)
    words = (vocab + 31) // 32
    constraints = (masks, mask_rows) if masks is not None else (keys, keys)
    grid, wide = (pieces, rows), triton.next_power_of_2(pieces)
    launch(
        _scan_kernel, grid, logits, *constraints, keys, ids, tops, sums, stride, vocab, pieces, words,
        MASKED=masks is not None, **tiles,
    )  # fmt: skip
    out = Sampled(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
    )
    noisy, cut = laws is not None and drawn, laws is not None and drawn and truncated
    scores, winners, chosen, parameters = tops, ids, ids, (ids, tops, ids, tops, tops)
    if noisy:
        assert laws is not None
        parameters = (laws.slots, laws.temperature, laws.top_k, laws.top_p, laws.log_min_p)
        scores, winners = torch.empty(rows, pieces, dtype=torch.float64, device=device), torch.empty_like(ids)
        launch(
            noise_kernel, grid, logits, *constraints, laws.slots, laws.positions, *parameters[1:], laws.seed_low,
            laws.seed_high, keys, ids, scores, winners, stride, vocab, pieces, words,
            MASKED=masks is not None, PIECES=wide, **tiles,
        )  # fmt: skip
    if cut:
        assert laws is not None
        chosen = draw_truncated(logits, laws, keys, ids, pieces, masks, mask_rows)
    launch(
        _finish_kernel, (rows,), logits, *parameters, keys, ids, tops, sums, scores, winners, chosen, *out, stride,
        pieces, DRAWN=noisy, TRUNCATED=cut, PIECES=wide, num_warps=1,
    )  # fmt: skip
    return out
