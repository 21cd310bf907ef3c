"""What one step sees of the cache: every index that the layers need, worked out once, and the reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.batch import Batch

if TYPE_CHECKING:
    from deepinfer.cache.cache import Cache

SEGMENT_ROWS = 512  # index scores are made for at most this many rows of a chunk: 512 x 8,192 entries x 4 bytes = 16 MB


@dataclass(frozen=True)
class Segment:
    """Rows whose index keys are scored together: one row of every decoding sequence, or a piece of one chunk.

    rows: int64 [B, T] row numbers. key_rows: int64 [B, M] pool rows of entries 0 .. M - 1 of each sequence. visible:
    int64 [B, T] entries that each row may see, (position + 1) // ratio.
    """

    rows: Tensor
    key_rows: Tensor
    visible: Tensor


class StepView:
    """Reads and writes of one step. Made by `Cache.begin`, used by the layers in order, then committed."""

    def __init__(self, cache: Cache, batch: Batch) -> None:
        self.batch = batch
        self._cache = cache
        self._num_rows = batch.token_ids.numel()
        self._tables = cache.tables
        self.window_indices = self._plan_window_reads()
        self._staged_rows, self._ring_targets = self._plan_window_commit()
        self._closing, self._partners = self._plan_pairs()
        self._segments: dict[int, list[Segment]] = {}
        self._targets: dict[int, Tensor] = {}  # by ratio, as above and below: sources of one ratio share their plan
        self._entry_positions: dict[int, Tensor] = {}

    def commit(self) -> None:
        """All layers have run: the step's tokens count as written."""
        self._cache.advance(self.batch)

    # -- window ---------------------------------------------------------------------------------------------------

    def _plan_window_reads(self) -> Tensor:
        """Rows of positions max(0, p - W + 1) .. p, oldest first, then -1: int64 [N, W]."""
        batch, rings = self.batch, self._cache.windows
        return select.window_rows(batch.positions, batch.slots, batch.row_starts, rings.size, rings.staging)

    def _plan_window_commit(self) -> tuple[Tensor, Tensor]:
        batch, size = self.batch, self._cache.windows.size
        ends = (batch.starts + batch.lengths)[batch.chunk_of]
        rows = (batch.positions >= ends - size).nonzero().squeeze(1)  # the last W rows of each chunk
        return self._cache.windows.staging + rows, batch.slots[rows] * size + batch.positions[rows] % size

    def stage_window(self, layer: int, kv: Tensor) -> Tensor:
        """Show this step's window entries [N, D] of a layer to its attention -> the pool of window_indices."""
        return self._cache.windows.stage(layer, kv)

    def commit_window(self, layer: int) -> None:
        """After the layer's attention: the staged rows take their places in the rings."""
        rings = self._cache.windows
        select.copy_rows(rings.pools[layer], self._ring_targets, self._staged_rows)

    # -- compressed entries ---------------------------------------------------------------------------------------

    def _plan_pairs(self) -> tuple[Tensor, Tensor]:
        """Ratio 2: rows that close a group (odd positions) and where the group's first token stands: a row of this
        step, or N + slot for the open row of the cache."""
        batch = self.batch
        closing = (batch.positions % 2 == 1).nonzero().squeeze(1)
        in_chunk = batch.positions[closing] > batch.row_starts[closing]
        return closing, torch.where(in_chunk, closing - 1, self._num_rows + batch.slots[closing])

    def close_pairs(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Ratio-2 source: rows float32 [N, 2, D] (value, gate) of this step -> first and second token of every group
        that closes, [G, 2, D] each. A token left without its partner becomes the open row."""
        open_rows = self._cache.open_rows.rows[layer]
        first = torch.cat((rows, open_rows))[self._partners]
        batch, last = self.batch, self.batch.last_rows
        pending = batch.positions[last] % 2 == 0
        open_rows[batch.chunk_slots[pending]] = rows[last[pending]]
        return first, rows[self._closing]

    def closing_rows(self, layer: int) -> Tensor:
        """Rows of this step whose token completes an entry of the source, int64 [G]."""
        if self._cache.records[layer].ratio == 1:
            return torch.arange(self._num_rows, device=self._closing.device)
        return self._closing

    def entry_positions(self, layer: int) -> Tensor:
        """RoPE positions of the entries that this step completes: the first token of each group, int64 [G]."""
        ratio = self._cache.records[layer].ratio
        if ratio not in self._entry_positions:
            self._entry_positions[ratio] = self.batch.positions[self.closing_rows(layer)] // ratio * ratio
        return self._entry_positions[ratio]

    def write_entries(self, layer: int, kv: Tensor, keys: Tensor) -> None:
        """Store the entries completed by this step: kv [G, head_dim], keys [G, index_head_dim]."""
        records = self._cache.records[layer]
        if records.ratio not in self._targets:
            entries = self.entry_positions(layer) // records.ratio
            slots = self.batch.slots[self.closing_rows(layer)]
            targets = select.entry_rows(self._tables, slots, entries.unsqueeze(1), records.per_block)
            self._targets[records.ratio] = targets.squeeze(1)
        records.kv[self._targets[records.ratio]] = kv
        records.keys[self._targets[records.ratio]] = keys

    def kv_pool(self, layer: int) -> Tensor:
        """Compressed records of a source, [rows, head_dim]."""
        return self._cache.records[layer].kv

    def visible(self, layer: int) -> Tensor:
        """Entries of a source that each row may see, (p + 1) // ratio, int64 [N]."""
        return (self.batch.positions + 1) // self._cache.records[layer].ratio

    def entry_rows(self, layer: int, entries: Tensor) -> Tensor:
        """Entries int64 [N, K] of each row's own sequence (-1 = none) -> rows of kv_pool, int64 [N, K]."""
        return select.entry_rows(self._tables, self.batch.slots, entries, self._cache.records[layer].per_block)

    def key_pool(self, layer: int) -> Tensor:
        """Index keys of a source, [rows, index_head_dim]."""
        return self._cache.records[layer].keys

    def segments(self, layer: int) -> list[Segment]:
        """The step's rows in pieces that share their keys."""
        ratio = self._cache.records[layer].ratio
        if ratio not in self._segments:
            self._segments[ratio] = list(self._plan_segments(layer))
        return self._segments[ratio]

    def _plan_segments(self, layer: int) -> Iterator[Segment]:
        batch, per_block, visible = self.batch, self._cache.records[layer].per_block, self.visible(layer)
        single = (batch.lengths == 1).nonzero().squeeze(1)
        if single.numel():
            rows = batch.first_rows[single].unsqueeze(1)
            yield self._segment(rows, batch.chunk_slots[single], visible, per_block)
        for chunk in (batch.lengths > 1).nonzero().squeeze(1).tolist():
            first, length = int(batch.first_rows[chunk]), int(batch.lengths[chunk])
            for start in range(first, first + length, SEGMENT_ROWS):
                rows = torch.arange(start, min(start + SEGMENT_ROWS, first + length), device=visible.device)
                yield self._segment(rows.unsqueeze(0), batch.chunk_slots[chunk : chunk + 1], visible, per_block)

    def _segment(self, rows: Tensor, slots: Tensor, visible: Tensor, per_block: int) -> Segment:
        seen = visible[rows]
        return Segment(rows, select.block_rows(self._tables, slots, int(seen.max()), per_block), seen)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def token_history(self, live_ids: Tensor) -> Tensor:
        """live_ids int64 [N]: the step's token ids, -1 for dead (image) tokens -> int64 [N, n] for the longest
        n-gram, column s the token s positions back, -1 before the sequence or dead. Remembers the last n - 1."""
        batch, last_tokens = self.batch, self._cache.last_tokens
        lookback = last_tokens.shape[1]
        known = torch.cat((live_ids, last_tokens.flatten()))
        shifts = torch.arange(lookback + 1, device=live_ids.device)
        offset = batch.positions - batch.row_starts  # row within its chunk
        row = torch.arange(self._num_rows, device=live_ids.device).unsqueeze(1)
        before = lookback + offset.unsqueeze(1) - shifts  # column of last_tokens when the shift leaves the chunk
        stored = self._num_rows + batch.slots.unsqueeze(1) * lookback + before
        history = known[torch.where(shifts <= offset.unsqueeze(1), row - shifts, stored)]
        last_tokens[batch.chunk_slots] = history[batch.last_rows, :lookback].flip(1)  # oldest first
        return history
