"""What one step sees of the cache: every index that the layers need, worked out once, and the reads and writes.

Chunks are planned on the host, in numpy, for all of them at once; what has one value per row and key is worked out by
the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from deepinfer.cache.blocks import BLOCK_TOKENS
from deepinfer.cache.view import RowsView, StepStore
from deepinfer.config import VERIFY_ROWS
from deepinfer.kernels import select
from deepinfer.model.batch import Batch

SEGMENT_ROWS = 512  # index scores are made for about this many rows at once: 512 x 8,192 entries x 4 bytes = 16 MB


@dataclass(frozen=True)
class Segment:
    """Rows whose index keys are scored together: those of decoding sequences that compute equally many, or a piece of
    one chunk.

    rows: int64 [B, T] row numbers. key_rows: int64 [B, M] pool rows of entries 0 .. M - 1 of each sequence. visible:
    int64 [B, T] entries that each row may see, (position + 1) // ratio. whole: the rows are all of the step, in order.
    """

    rows: Tensor
    key_rows: Tensor
    visible: Tensor
    whole: bool


class StepView(RowsView):
    """Reads and writes of one step. Made by `begin`, used by the layers in order, then committed.

    Layers after the last KV source see a view of their own where the batch says so (`narrowed`).
    """

    def __init__(self, store: StepStore, batch: Batch) -> None:
        super().__init__(store)
        self.batch: Batch = batch
        self._entry_plans: dict[int, tuple[np.ndarray, Tensor, Tensor]] = {}  # by ratio: sources of one share it
        self._segments: dict[int, list[Segment]] = {}
        self._visible: dict[int, Tensor] = {}

    def commit(self) -> None:
        """All layers have run: the step's tokens count as written."""
        self._store.advance(self.batch)

    @cached_property
    def narrowed(self) -> tuple[Tensor, StepView] | None:
        """Rows that go past the last KV source (int64 [M]) and the view of the layers there; None where that is all
        rows with all that their windows show."""
        batch = self.batch
        if not batch.keep_from.any():
            return None
        shown = np.maximum(batch.window_floors, batch.starts - self._store.windows.window + 1)
        if not (batch.keep_from > np.maximum(shown, 0)).any():
            return None
        rows, kept = batch.narrowed()
        return batch.to_device(rows), type(self)(self._store, kept)

    # -- window ---------------------------------------------------------------------------------------------------

    @cached_property
    def window_indices(self) -> Tensor:
        """Rows of positions max(window_floor, p - W + 1) .. p, oldest first, then -1: int64 [N, W]."""
        batch, rings = self.batch, self._store.windows
        floors = batch.to_device(batch.per_row(np.minimum(batch.window_floors, batch.starts)))
        return select.window_rows(
            batch.positions, batch.slots, batch.row_starts, floors, rings.window, rings.ring, rings.staging
        )

    @cached_property
    def _ring_copies(self) -> tuple[Tensor, Tensor]:
        """Targets and sources in a layer's pool: the last rows of every chunk to the rings."""
        batch, rings = self.batch, self._store.windows
        positions = batch.row_positions
        rows = np.arange(batch.num_rows)
        if not batch.single and int(batch.lengths.max()) > rings.ring:
            rows = np.flatnonzero(positions >= batch.per_row(batch.ends - rings.ring))
        slots = batch.per_row(batch.chunk_slots)[rows]
        places = slots * rings.ring + positions[rows] % rings.ring
        return batch.to_device(places), batch.to_device(rings.staging + rows)

    @cached_property
    def _replica_copies(self) -> tuple[Tensor, Tensor] | None:
        """For chunks with start < b <= end, b the last multiple of 128: positions [b - W, b) to the slot's replica.
        Targets in `replica_rows`, sources in the pool; None where there is nothing to copy.

        Rows of drafts count: a window that one of them completes and that is then rejected is copied wrong, which the
        storage knows (`truncate`), and again when the sequence passes the boundary for good.
        """
        batch, rings = self.batch, self._store.windows
        passed = crossings(batch) if rings.replicas else ()
        if not len(passed):
            return None
        boundary = (batch.ends[passed] // BLOCK_TOKENS * BLOCK_TOKENS)[:, None]  # [crossings, 1]
        slots, starts, first_rows = (a[passed, None] for a in (batch.chunk_slots, batch.starts, batch.first_rows))
        offsets = np.arange(rings.window)
        positions = boundary - rings.window + offsets  # [crossings, W]
        stored = slots * rings.ring + positions % rings.ring
        sources = np.where(positions >= starts, rings.staging + first_rows + positions - starts, stored)
        targets = (2 * slots + boundary // BLOCK_TOKENS % 2) * rings.window + offsets
        real = positions >= 0  # a window longer than 128 has no rows before the sequence
        return batch.to_device(targets[real]), batch.to_device(sources[real])

    def _window_rows(self) -> Tensor:
        return self.window_indices

    def commit_window(self, layer: int) -> None:
        """After the layer's attention: the staged rows take their places in the rings."""
        rings = self._store.windows
        if layer < rings.backbone_layers and self._replica_copies is not None:
            targets, sources = self._replica_copies  # before the rings lose what the replicas take from them
            rings.replica_rows[layer, targets] = rings.pool[layer, sources]
        select.copy_rows(rings.pool[layer], *self._ring_copies)

    # -- draft layers ---------------------------------------------------------------------------------------------

    def draft_context(self) -> tuple[Tensor | None, StepView]:
        """Rows of this view that the draft layers' rings keep, int64 [M], None = all; and the view on which exactly
        these rows are staged and committed as draft layers (`num_hidden_layers` + stage).

        Kept are positions from one ring below each chunk's end on: a draft window shows a window below the length, and
        a length never falls further below the end than the ring is longer than the window.
        """
        batch, ring = self.batch, self._store.windows.ring
        if batch.single or int(batch.lengths.max()) <= ring:
            return None, self
        rows, kept = replace(batch, keep_from=np.maximum(batch.ends - ring, 0)).narrowed()
        return batch.to_device(rows), type(self)(self._store, kept)

    # -- compressed entries ---------------------------------------------------------------------------------------

    def _entry_plan(self, layer: int) -> tuple[np.ndarray, Tensor, Tensor]:
        """Rows whose token completes an entry of the source that is not in the cache yet, numpy [G]; positions of the
        entries' first tokens; pool rows of the entries, int64 [G] both."""
        records, batch = self._store.records[layer], self.batch
        ratio = records.ratio
        if ratio not in self._entry_plans:
            positions, slots, per_block = batch.row_positions, batch.per_row(batch.chunk_slots), records.per_block
            rows = np.flatnonzero(positions & 1) if ratio == 2 else np.arange(batch.num_rows)
            if batch.write_from.any():
                rows = rows[positions[rows] >= batch.per_row(batch.write_from)[rows]]
            entries = positions[rows] // ratio
            blocks = self._store.host_tables[slots[rows], entries // per_block]
            targets = batch.to_device(blocks * per_block + entries % per_block)
            self._entry_plans[ratio] = rows, batch.to_device(entries * ratio), targets
        return self._entry_plans[ratio]

    @cached_property
    def _pair_plan(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """Ratio 2. For the pairs that close: rows of the second token, rows of the first, and where the first is not of
        this step, which pairs those are and the open rows (slot * pairs + place) that hold it, None = no such pair.
        Then rows of even positions near a chunk's end, and the open rows that they become."""
        batch, pairs = self.batch, self._store.open_rows.pairs
        second, _, _ = self._entry_plan(next(iter(self._store.open_rows.rows)))
        positions, put = batch.row_positions, batch.to_device
        places = batch.per_row(batch.chunk_slots) * pairs + (positions >> 1) % pairs  # of a row's own pair
        lone = positions[second] == batch.per_row(batch.starts)[second]
        outside, stored = None, None
        if lone.any():
            outside, stored = put(np.flatnonzero(lone)), put(places[second[lone]])
        open_ = (positions & 1) == 0
        if not batch.single:
            open_ &= positions >= batch.per_row(batch.ends - 2 * pairs)
        even = np.flatnonzero(open_)
        return put(second), put(np.maximum(second - 1, 0)), outside, stored, put(even), put(places[even])

    def close_pairs(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Ratio-2 source: rows float32 [N, 2, D] (value, gate) of this step -> first and second token of every pair
        that closes, [G, 2, D] each. First tokens whose partner may come in a later step become open rows."""
        second, first, outside, stored, even, places = self._pair_plan
        open_rows = self._store.open_rows.rows[layer].flatten(0, 1)
        firsts = rows[first]
        if outside is not None and stored is not None:
            firsts[outside] = open_rows[stored]
        open_rows[places] = rows[even]
        return firsts, rows[second]

    def closing_rows(self, layer: int) -> Tensor | None:
        """Rows of this step whose token completes an entry that is to be written, int64 [G]; None = all rows."""
        rows, _, _ = self._entry_plan(layer)
        return None if len(rows) == self.batch.num_rows else self.batch.to_device(rows)

    def _written_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._entry_plan(layer)[1:]

    def seen_entries(self, layer: int, most: int) -> tuple[Tensor, Tensor | None] | None:
        batch, records = self.batch, self._store.records[layer]
        chunks, each = len(batch.starts), self.most_visible(layer)
        if not 0 < chunks * each <= most:
            return None
        slots = batch.to_device(batch.chunk_slots)
        rows = select.block_rows(self._store.tables, slots, each, records.per_block)  # [chunks, each]
        firsts = batch.to_device(batch.per_row(np.arange(chunks) * each)).unsqueeze(1) if chunks > 1 else None
        return rows.flatten(), firsts

    def _num_chunks(self) -> int:
        return len(self.batch.starts)

    def visible(self, layer: int) -> Tensor:
        """Entries of a source that each row may see, (p + 1) // ratio, int64 [N]."""
        ratio = self._store.records[layer].ratio
        if ratio not in self._visible:
            self._visible[ratio] = self.batch.to_device((self.batch.row_positions + 1) // ratio)
        return self._visible[ratio]

    def most_visible(self, layer: int) -> int:
        """The largest of `visible`."""
        return int(self.batch.ends.max()) // self._store.records[layer].ratio

    def segments(self, layer: int) -> list[Segment]:
        """The step's rows in pieces that share their keys."""
        ratio = self._store.records[layer].ratio
        if ratio not in self._segments:
            self._segments[ratio] = list(self._plan_segments(layer))
        return self._segments[ratio]

    def _plan_segments(self, layer: int) -> Iterator[Segment]:
        batch = self.batch
        short = batch.lengths <= VERIFY_ROWS
        for length in np.unique(batch.lengths[short]).tolist():  # decoding sequences, by how many drafts they verify
            chunks = np.flatnonzero(batch.lengths == length)
            for part in np.array_split(chunks, -(-len(chunks) * length // SEGMENT_ROWS)):
                rows = batch.first_rows[part][:, None] + np.arange(length)
                yield self._segment(layer, rows, batch.chunk_slots[part], int(batch.ends[part].max()))
        for chunk in np.flatnonzero(~short).tolist():
            first, length = int(batch.first_rows[chunk]), int(batch.lengths[chunk])
            for start in range(0, length, SEGMENT_ROWS):
                end = min(start + SEGMENT_ROWS, length)
                rows = np.arange(first + start, first + end)[None, :]
                slots = batch.chunk_slots[chunk : chunk + 1]
                yield self._segment(layer, rows, slots, int(batch.starts[chunk]) + end)

    def _segment(self, layer: int, rows: np.ndarray, slots: np.ndarray, end: int) -> Segment:
        """end: position after the last of the rows."""
        records, put = self._store.records[layer], self.batch.to_device
        seen = (self.batch.row_positions[rows] + 1) // records.ratio
        keys = select.block_rows(self._store.tables, put(slots), end // records.ratio, records.per_block)
        whole = rows.size == self.batch.num_rows and bool((rows.ravel() == np.arange(rows.size)).all())
        return Segment(put(rows), keys, put(seen), whole)


def crossings(batch: Batch) -> np.ndarray:
    """Chunks that take their sequence over a multiple of 128 (start < b <= end), numpy [crossings]."""
    return np.flatnonzero(batch.ends // BLOCK_TOKENS > batch.starts // BLOCK_TOKENS)
