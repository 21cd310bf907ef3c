"""Drafts one after the other: the largest of each draft's logits plus a low-rank bigram of the token before it.

One launch a draft. Programs over pieces of the vocabulary multiply the embeddings of all rows' last tokens by their
piece of the head, and each row's best goes to the row's winner: one number whose order is that of value and id, so its
atomic maximum is the same whoever comes first, and the next launch reads the token from it. A row's sums have one
order, whatever the number of rows. The head is read once a draft and does not fit into the
second-level cache (66 MB of 129,280 x 256 bfloat16), so a draft costs at least its bytes and those of its logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.noise import rough_gumbel
from deepinfer.kernels.triton.philox import TARGET, pair_uniforms
from deepinfer.kernels.triton.runtime import INTERPRET, launch
from deepinfer.kernels.triton.sampling_rows import INFINITY, NO_ID, RowLaws, ordered_key

MOST_ROWS = 64  # of one tile: a program holds the logits of so many rows
TILE = 64  # ids of a program
STEP, STAGES = 64, 3  # of the rank
APART = tl.constexpr(
    16
)  # int64 from one row's winner to the next: a cache line each, or they would wait for each other
NO_WINNER = tl.constexpr(-(2**63))


@triton.jit
def _token(winner):
    """The id in a winner: its lower half holds 2^31 - 1 - id, so that of equal values the lowest id is the largest."""
    return (winner & NO_ID) ^ NO_ID


@triton.jit(do_not_specialize=["rows", "drafts"])
def _begin_kernel(anchors, winners, rows, drafts):
    """Winners int64 [1 + drafts, rows, APART]: the anchors, then nobody."""
    row, number = tl.program_id(0), tl.program_id(1)
    first = tl.load(anchors + row) ^ NO_ID
    tl.store(winners + (number * rows + row) * APART, tl.where(number == 0, first, NO_WINNER))


@triton.jit(do_not_specialize=["rows", "drafts"])
def _end_kernel(winners, embed, token_ids, embeddings, rows, drafts, RANK: tl.constexpr):
    """Drafts from their winners, and the embeddings of the tokens before them."""
    row, number, rank = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, RANK)
    before = _token(tl.load(winners + (number * rows + row) * APART))
    token = _token(tl.load(winners + ((number + 1) * rows + row) * APART))
    tl.store(token_ids + row * drafts + number, token)
    value = tl.load(embed + before * RANK + rank).to(tl.float32)
    tl.store(embeddings + (row * drafts + number) * RANK + rank, value)


@triton.jit(do_not_specialize=["rows", "number"])
def _piece_kernel(
    winners, embed, head, logits, slots, positions, temperature, seed_low, seed_high,
    number, rows, vocab, stride_row,
    DRAWN: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best of a tile of ids for ROWS rows."""
    piece, group = tl.program_id(0), tl.program_id(1)
    row = group * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    previous = _token(tl.load(winners + (number * rows + row) * APART, mask=inside, other=NO_ID))
    ids = piece * TILE + tl.arange(0, TILE)
    step = tl.arange(0, STEP)
    place = row[:, None].to(tl.int64) * stride_row + ids[None, :]
    seen = inside[:, None] & (ids[None, :] < vocab)
    own = tl.load(logits + place, mask=seen, other=-INFINITY)
    z = tl.zeros((ROWS, TILE), tl.float32)
    for first in range(0, RANK, STEP):
        x = tl.load(embed + previous[:, None] * RANK + first + step[None, :], mask=inside[:, None], other=0.0)
        weight = tl.load(
            head + ids[None, :].to(tl.int64) * RANK + first + step[:, None], mask=ids[None, :] < vocab, other=0.0
        )
        if INTERPRET:
            z = tl.dot(x.to(tl.float32), weight.to(tl.float32), z, input_precision="ieee")
        else:
            z = tl.dot(x, weight, z)
    z = own + z
    if DRAWN:
        # The noise of the row's own draw at that position, roughly: a draft may be wrong once in fifty thousand.
        slot = tl.load(slots + row, mask=inside, other=0)
        heat = tl.load(temperature + slot, mask=inside, other=0.0)
        if tl.max(heat, axis=0) > 0:
            at = (tl.load(positions + row, mask=inside, other=0) + number).to(tl.uint32)
            low = tl.load(seed_low + slot, mask=inside, other=0).to(tl.uint32)
            high = tl.load(seed_high + slot, mask=inside, other=0).to(tl.uint32)
            pairs = (piece * (TILE // 2) + tl.arange(0, TILE // 2))[None, :]
            even, odd = pair_uniforms(pairs + row[:, None] * 0, at[:, None], TARGET, 0, low[:, None], high[:, None])
            noise = tl.reshape(tl.join(rough_gumbel(even), rough_gumbel(odd)), (ROWS, TILE))
            z = tl.where(heat[:, None] > 0, z / tl.where(heat > 0, heat, 1.0)[:, None] + noise, z)
    key = tl.where(seen, ordered_key(z), -NO_ID - 1)
    best = tl.max(key, axis=1)
    first = tl.min(tl.where((key == best[:, None]) & seen, ids[None, :], NO_ID), axis=1)
    winner = (best.to(tl.int64) << 32) | (first ^ NO_ID).to(tl.int64)
    tl.atomic_max(winners + ((number + 1) * rows + row) * APART, winner, mask=inside, sem="relaxed")


def markov_chain(
    anchors: Tensor, embed: Tensor, head: Tensor, logits: Tensor, laws: RowLaws | None = None
) -> tuple[Tensor, Tensor]:
    """k drafts one after the other: anchors int64 [R], embed and head bfloat16 [V, rank], logits float32 [R, k, V]
    without what the token before adds -> drafts int64 [R, k], and the embeddings of the tokens before them, float32
    [R, k, rank]. The first of equal values is the largest; a NaN counts as larger than any number.

    laws: rows with a temperature draw with the TARGET noise at laws.positions int64 [R] (of the anchor) and behind, as
    `propose.draw_drafts` does by the coupled rule. Noise and scores are right to 2e-5 only: of two that are
    closer the other one may be drafted. That costs an acceptance and never changes a token.
    """
    rows, drafts, vocab = logits.shape
    rank = embed.shape[1]
    assert logits.stride(2) == 1 and head.is_contiguous() and embed.is_contiguous()
    tile = TILE if vocab >= 8 * TILE else 16
    pieces = triton.cdiv(vocab, tile)
    device = logits.device
    token_ids = torch.empty(rows, drafts, dtype=torch.int64, device=device)
    embeddings = torch.empty(rows, drafts, rank, device=device)
    winners = torch.empty(1 + drafts, rows, APART.value, dtype=torch.int64, device=device)
    height = min(MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    columns = (anchors, anchors, logits, anchors, anchors)
    if laws is not None and not laws.drawn:
        laws = None
    if laws is not None:
        columns = (laws.slots, laws.positions, laws.temperature, laws.seed_low, laws.seed_high)
    launch(_begin_kernel, (rows, 1 + drafts), anchors, winners, rows, drafts, num_warps=1)
    for number in range(drafts):
        launch(
            _piece_kernel, (pieces, triton.cdiv(rows, height)), winners, embed, head, logits[:, number], *columns,
            number, rows, vocab, logits.stride(0), DRAWN=laws is not None, RANK=rank, STEP=min(rank, STEP),
            ROWS=height, TILE=tile, num_stages=STAGES, num_warps=4 if laws is None else 8,
        )  # fmt: skip
    launch(_end_kernel, (rows, drafts), winners, embed, token_ids, embeddings, rows, drafts, RANK=rank, num_warps=4)
    return token_ids, embeddings
