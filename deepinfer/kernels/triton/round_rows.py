"""The rows of a decode round, worked out on the device from what each slot's columns say."""

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.draft_selection import chosen_lengths
from deepinfer.kernels.triton.runtime import launch


class Rows(Protocol):
    """Buffers of one fixed size (cache/graph_step.StepRows): int64 [rows], but chunk_slots [chunks] and chunk_rows
    [chunks + 1]."""

    rows: int
    chunks: int
    null_slot: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    row_starts: Tensor
    floors: Tensor
    chunk_slots: Tensor
    chunk_rows: Tensor


@triton.jit(do_not_specialize=["rows", "chunks", "null_slot", "longest", "width"])
def _rows_kernel(
    order, lengths, there, limits, survivals, tokens,
    token_ids, positions, slots, row_starts, floors, chunk_slots, chunk_rows,
    rows, chunks, null_slot, longest, width,
    CHUNKS: tl.constexpr, DRAFTS: tl.constexpr, WIDTH: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    chunk = tl.arange(0, CHUNKS)
    named = chunk < chunks
    slot = tl.load(order + 1 + chunk, mask=named, other=null_slot)
    caps = tl.load(order + 1 + chunks + chunk, mask=named, other=0)
    live = named & (slot != null_slot)
    start = tl.load(lengths + slot, mask=live, other=0)
    count = live.to(tl.int32)
    if DRAFTS > 0:
        # With l drafts kept and one token more a sequence has start + 1 + l + 1 tokens.
        room = tl.minimum(tl.load(limits + slot, mask=live, other=0), longest) - start - 2
        caps = tl.minimum(tl.minimum(caps, tl.load(there + slot, mask=live, other=0)), room)
        caps = tl.maximum(caps, 0).to(tl.int32)
        budget = tl.load(order).to(tl.int32)
        count += chosen_lengths(survivals, slot, live, caps, budget, CHUNKS, DRAFTS, WIDTH)
    end = tl.cumsum(count, axis=0)
    first, used = end - count, tl.sum(count, axis=0)
    tl.store(chunk_slots + chunk, slot, mask=named)
    tl.store(chunk_rows + chunk, first.to(tl.int64), mask=named)
    tl.store(chunk_rows + chunks, used.to(tl.int64))
    for depth in tl.static_range(DRAFTS + 1):
        row, mine = first + depth, depth < count
        token = tl.load(tokens + slot * width + start + depth, mask=mine, other=0)
        tl.store(token_ids + row, token.to(tl.int64), mask=mine)
        tl.store(positions + row, start + depth, mask=mine)
        tl.store(slots + row, slot, mask=mine)
        tl.store(row_starts + row, start, mask=mine)
        tl.store(floors + row, start * 0, mask=mine)
    for begin in range(0, rows, STRIP):
        spare = begin + tl.arange(0, STRIP)
        nobody = (spare >= used) & (spare < rows)
        nothing = tl.zeros((STRIP,), tl.int64)
        tl.store(token_ids + spare, nothing, mask=nobody)
        tl.store(positions + spare, nothing, mask=nobody)
        tl.store(slots + spare, nothing + null_slot, mask=nobody)
        tl.store(row_starts + spare, nothing, mask=nobody)
        tl.store(floors + spare, nothing, mask=nobody)


def fill_rows(
    rows: Rows,
    order: Tensor,
    lengths: Tensor,
    there: Tensor,
    limits: Tensor,
    survivals: Tensor,
    tokens: Tensor,
    longest: int,
) -> None:
    """Fills `rows` with a chunk of 1 + drafts rows for each slot that the order names.

    order int64 [1 + 2 * chunks]: drafts to verify in all (negative: no bound), then the slots, the null slot where
    there is none, then how many drafts each may verify. Columns by slot: lengths (position of the newest token), there
    (drafts behind it), limits (tokens a sequence may have) int64, survivals float32 [.., k], tokens int32 [slots,
    width]. longest: tokens of any sequence. Rows beyond `rows.rows` are not written: the caller picks a size that
    holds chunks + the sum of the caps, or the budget.
    """
    assert len(order) == 1 + 2 * rows.chunks
    drafts = survivals.shape[1]
    launch(
        _rows_kernel, (1,), order, lengths, there, limits, survivals, tokens,
        rows.token_ids, rows.positions, rows.slots, rows.row_starts, rows.floors, rows.chunk_slots, rows.chunk_rows,
        rows.rows, rows.chunks, rows.null_slot, longest, tokens.shape[1],
        CHUNKS=triton.next_power_of_2(rows.chunks), DRAFTS=drafts, WIDTH=triton.next_power_of_2(max(drafts, 1)),
        STRIP=min(512, triton.next_power_of_2(rows.rows)), num_warps=8,
    )  # fmt: skip
