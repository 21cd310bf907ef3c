"""A step whose every index is worked out on the device, from buffers of one fixed size: what a CUDA graph can repeat.

`StepRows` are the buffers: the rows of decode and verify chunks, filled up with rows of nobody. Those belong to the
null slot, one more than sequences may have, whose table is full of the null block: they compute, and what they leave
behind lies where nobody reads. `GraphView` does for them what `step.StepView` does for a step that the host plans, to
the same bits.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.blocks import BLOCK_TOKENS
from deepinfer.cache.records import WindowRings
from deepinfer.cache.step import Segment
from deepinfer.cache.view import RowsView, StepStore
from deepinfer.kernels import select
from deepinfer.kernels.streams import Event
from deepinfer.model.batch import Batch

if TYPE_CHECKING:
    from deepinfer.cache.storage import CacheStorage

_COLUMNS = 5  # token id, position, slot, start of the chunk, floor of the window


class StepRows:
    """Up to `rows` rows of up to `chunks` chunks on the device.

    int64 [rows]: token_ids, positions, slots, row_starts (position of the first token of the row's chunk), floors
    (lowest position that its window shows). int64 [chunks]: chunk_slots; [chunks + 1]: chunk_rows, the first row of
    each chunk and, behind the last, how many rows are somebody's.
    """

    logit_rows = slice(None)  # every row gives logits

    def __init__(self, rows: int, chunks: int, null_slot: int, device: torch.device) -> None:
        self.rows, self.chunks, self.null_slot = rows, chunks, null_slot
        pinned = device.type == "cuda"
        self._host = torch.zeros(_COLUMNS * rows + 2 * chunks + 1, dtype=torch.int64, pin_memory=pinned)
        self._device = self._host.to(device, copy=True)
        columns = self._device[: _COLUMNS * rows].view(_COLUMNS, rows)
        self.token_ids, self.positions, self.slots, self.row_starts, self.floors = columns
        self.chunk_slots = self._device[_COLUMNS * rows : _COLUMNS * rows + chunks]
        self.chunk_rows = self._device[_COLUMNS * rows + chunks :]
        self._copied = Event() if pinned else None
        self.slots.fill_(null_slot)
        self.chunk_slots.fill_(null_slot)

    def holds(self, batch: Batch) -> bool:
        """Whether the batch fits in and is of the kind: rows that all give logits, write all their entries and go
        through all layers."""
        return (
            batch.num_rows <= self.rows
            and len(batch.starts) <= self.chunks
            and bool((batch.num_logits == batch.lengths).all())
            and bool((batch.write_from <= batch.starts).all())
            and not batch.keep_from.any()
        )

    def fill(self, batch: Batch) -> None:
        """The batch, which `holds`, in one copy to the device; its token ids are there already."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before has left the host's buffer
        host, rows, chunks, used = self._host.numpy(), self.rows, self.chunks, batch.num_rows
        columns = host[: _COLUMNS * rows].reshape(_COLUMNS, rows)
        columns[:, used:] = 0
        columns[1, :used], columns[3, :used] = batch.row_positions, batch.per_row(batch.starts)
        columns[2, :used], columns[2, used:] = batch.per_row(batch.chunk_slots), self.null_slot
        columns[4, :used] = batch.per_row(np.minimum(batch.window_floors, batch.starts))
        tail = host[_COLUMNS * rows :]
        count = len(batch.starts)
        tail[:count], tail[count:chunks] = batch.chunk_slots, self.null_slot
        tail[chunks : chunks + count], tail[chunks + count :] = batch.first_rows, used
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self.token_ids[:used].copy_(batch.token_ids)


class GraphView(RowsView):
    """Reads and writes of the rows that `rows` will hold. Nothing of it asks the device for a value, and no shape
    depends on one.

    longest: entries and windows of sequences up to so many tokens can be read.
    """

    narrowed = None  # all rows go through all layers

    def __init__(self, store: StepStore, rows: StepRows, longest: int) -> None:
        super().__init__(store)
        self.batch: StepRows = rows
        self._longest = longest
        self._targets: dict[int, tuple[Tensor, Tensor]] = {}  # by ratio: sources of one share it
        self._visible: dict[int, Tensor] = {}
        self._segments: dict[int, list[Segment]] = {}

    def commit(self) -> None:
        """The host counts the tokens (`commit_rows`): a graph that is played again cannot."""

    # -- window ---------------------------------------------------------------------------------------------------

    @cached_property
    def window_indices(self) -> Tensor:
        """As `StepView.window_indices`."""
        batch, rings = self.batch, self._store.windows
        return select.window_rows(
            batch.positions, batch.slots, batch.row_starts, batch.floors, rings.window, rings.ring, rings.staging
        )

    def _window_rows(self) -> Tensor:
        return self.window_indices

    def commit_window(self, layer: int) -> None:
        """Nothing yet: `finish` does it for all layers."""

    def finish(self) -> None:
        """After the last layer: staged rows take their places in the rings, and replicas are copied from there: rings
        are longer than a window by what a step writes."""
        batch, rings = self.batch, self._store.windows
        select.commit_windows(rings.pool, batch.positions, batch.slots, rings.ring, rings.staging)
        if rings.replicas:
            _copy_replicas(rings, batch)

    def draft_context(self) -> tuple[None, GraphView]:
        return None, self

    # -- compressed entries ---------------------------------------------------------------------------------------

    def _entry_targets(self, layer: int) -> tuple[Tensor, Tensor]:
        """Positions of the first tokens of every row's entry, and the entry's pool row, int64 [N] both: of the null
        block where the row does not complete it."""
        records, batch = self._store.records[layer], self.batch
        ratio = records.ratio
        if ratio not in self._targets:
            entries = batch.positions // ratio
            rows = select.entry_rows(self._store.tables, batch.slots, entries.unsqueeze(1), records.per_block).squeeze(
                1
            )
            if ratio == 2:
                rows = torch.where(batch.positions & 1 == 1, rows, 0)
            self._targets[ratio] = entries * ratio, rows
        return self._targets[ratio]

    @cached_property
    def _pair_plan(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ratio 2. Of every row: the row before it, the open row of its own pair, whether that holds the pair's first
        token (bool [N, 1, 1]), and the open row that it becomes: the null slot's, where it closes its pair."""
        batch, pairs = self.batch, self._store.open_rows.pairs
        own = batch.slots * pairs + (batch.positions >> 1) % pairs
        odd = batch.positions & 1 == 1
        lone = odd & (batch.positions == batch.row_starts)
        before = torch.arange(-1, batch.rows - 1, device=own.device).clamp_min(0)
        return before, own, lone[:, None, None], torch.where(odd, batch.null_slot * pairs, own)

    def close_pairs(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As `StepView.close_pairs`, with a pair for every row: what those hold that close none is written to the null
        block."""
        before, own, lone, targets = self._pair_plan
        open_rows = self._store.open_rows.rows[layer].flatten(0, 1)
        first = torch.where(lone, open_rows[own], rows[before])  # read before it is written over
        open_rows[targets] = rows
        return first, rows

    def closing_rows(self, layer: int) -> None:
        """All rows."""

    def _written_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._entry_targets(layer)

    def _num_chunks(self) -> int:
        return self.batch.chunks

    def visible(self, layer: int) -> Tensor:
        ratio = self._store.records[layer].ratio
        if ratio not in self._visible:
            self._visible[ratio] = (self.batch.positions + 1) // ratio
        return self._visible[ratio]

    def most_visible(self, layer: int) -> int:
        """Of the longest sequence that there may be."""
        return self._longest // self._store.records[layer].ratio

    def segments(self, layer: int) -> list[Segment]:
        """One, of which every row has keys of its own."""
        records, slots = self._store.records[layer], self.batch.slots
        if records.ratio not in self._segments:
            rows = torch.arange(len(slots), device=slots.device).unsqueeze(1)
            keys = select.block_rows(self._store.tables, slots, self.most_visible(layer), records.per_block)
            self._segments[records.ratio] = [Segment(rows, keys, self.visible(layer).unsqueeze(1), True)]
        return self._segments[records.ratio]


def begin_rows(storage: CacheStorage, batch: Batch, rows: StepRows) -> None:
    """A step into the buffers of a `GraphView`, whose pass is to follow, and then `commit_rows`. ValueError: as
    `CacheStorage.check`."""
    storage.check(batch)
    rows.fill(batch)


def commit_rows(storage: CacheStorage, batch: Batch) -> None:
    """The step that a `GraphView` has run counts as written. The host alone counts: the device may be further on."""
    storage.advance(batch)


def _copy_replicas(rings: WindowRings, rows: StepRows) -> None:
    """The windows below multiples of 128 that the step, which the rings hold already, has passed: to the replicas.

    A boundary is at most `drafts` rows below its chunk's end, and a ring holds `drafts` + 1 rows more than a window.
    """
    if rings.pool.device.type == "cuda":
        from deepinfer.kernels.triton.replicas import copy_replicas

        copy_replicas(
            rings.pool, rings.replica_rows, rows.positions, rows.chunk_slots, rows.chunk_rows, rows.null_slot,
            window=rings.window, ring=rings.ring,
        )  # fmt: skip
        return
    counts = rows.chunk_rows.diff()
    firsts = rows.chunk_rows[:-1].clamp_max(rows.rows - 1)
    starts = rows.positions[firsts]
    boundaries = (starts + counts) // BLOCK_TOKENS * BLOCK_TOKENS
    passed = (rows.chunk_slots != rows.null_slot) & (counts > 0) & (boundaries > starts)
    slots, boundary = rows.chunk_slots[passed, None], boundaries[passed, None]
    offsets = torch.arange(rings.window)
    positions = boundary - rings.window + offsets  # [crossings, W]
    real = positions >= 0  # a window longer than 128 has no rows before the sequence
    targets = ((2 * slots + boundary // BLOCK_TOKENS % 2) * rings.window + offsets)[real]
    sources = (slots * rings.ring + positions % rings.ring)[real]
    rings.replica_rows[:, targets] = rings.pool[: rings.backbone_layers, sources]
