"""What all views of a step have in common, whoever works out their indices: the reads of a cache, and its writes.

`step.StepView` plans on the host, `graph_step.GraphView` on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from deepinfer.cache.records import OpenRows, PagedRecords, WindowRings
from deepinfer.kernels import select
from deepinfer.model.batch import Batch
from deepinfer.model.state import Rounding, StepBatch


class StepStore(Protocol):
    """The tensors that a step reads and writes; `storage.CacheStorage` has them."""

    tables: Tensor  # int64 [slots, blocks per sequence], on the device
    host_tables: np.ndarray  # the same numbers on the host
    records: dict[int, PagedRecords]
    windows: WindowRings
    open_rows: OpenRows
    last_tokens: Tensor  # int64 [slots, size]
    rounds: Rounding

    def advance(self, batch: Batch) -> None: ...


class RowsView(ABC):
    """Reads and writes of the rows of one step."""

    batch: StepBatch

    def __init__(self, store: StepStore) -> None:
        self._store = store
        self._index_plans: dict[int, dict[Any, Any]] = {}  # by ratio

    @property
    def rounds(self) -> Rounding:
        """Which records come as they are."""
        return self._store.rounds

    @property
    def keeps_drafts(self) -> bool:
        """Whether there are window rings for the draft model's stages, to be written in every step."""
        return self._store.windows.draft_layers > 0

    # -- window ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _window_rows(self) -> Tensor:
        """Rows of positions max(window_floor, p - W + 1) .. p, oldest first, then -1: int64 [N, W]."""

    def window_places(self, layer: int, count: int) -> Tensor | None:
        """Where the window records of this step's rows go, uint8 [count, width], for who packs them; None where they
        have to be given to `stage_window`."""
        return self._store.windows.places(layer, count) if self.rounds.latents else None

    def stage_window(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Show this step's window entries [N, D] of a layer, or the `window_places` that hold them, to its attention ->
        the pool, and the rows of it that each row reads, int64 [N, W], -1 = none."""
        return self._store.windows.stage(layer, kv), self._window_rows()

    # -- compressed entries ---------------------------------------------------------------------------------------

    @abstractmethod
    def _written_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Of the entries that this step writes for a source: positions of their first tokens, and their pool rows,
        int64 [G] both."""

    @abstractmethod
    def _num_chunks(self) -> int:
        """Chunks that the rows are cut into."""

    @abstractmethod
    def most_visible(self, layer: int) -> int:
        """Entries of a source that no row sees more of."""

    def entry_positions(self, layer: int) -> Tensor:
        """RoPE positions of the entries that this step writes: the first token of each group, int64 [G]."""
        return self._written_entries(layer)[0]

    def write_entries(self, layer: int, kv: Tensor, keys: Tensor) -> None:
        """Records kv [G, head_dim] and keys [G, index_head_dim] of the entries that this step writes."""
        self._store.records[layer].write(self._written_entries(layer)[1], kv, keys)

    def kv_pool(self, layer: int) -> Tensor:
        """Compressed records of a source, [rows, width]."""
        return self._store.records[layer].kv

    def key_pool(self, layer: int) -> Tensor:
        """Index keys of a source, [rows, width]."""
        return self._store.records[layer].keys

    def entry_rows(self, layer: int, entries: Tensor) -> Tensor:
        """Entries int64 [N, K] of each row's own sequence (-1 = none) -> rows of kv_pool, int64 [N, K]."""
        return select.entry_rows(self._store.tables, self.batch.slots, entries, self._store.records[layer].per_block)

    def seen_entries(self, layer: int, most: int) -> tuple[Tensor, Tensor | None] | None:
        """Pool rows of all entries that rows of this step may see, chunk by chunk, int64 [M], and the place of the
        first entry of every row's chunk among them, int64 [N, 1] (None: 0). None where they are more than `most`, or
        the host does not plan the step."""
        return None

    def paged_keys(self, layer: int) -> select.PagedKeys:
        """Index keys of a source whose cache has them in pages."""
        records, batch = self._store.records[layer], self.batch
        plans = self._index_plans.setdefault(records.ratio, {})
        where = batch.positions, batch.slots, batch.row_starts
        sizes = self._num_chunks(), records.ratio, self.most_visible(layer)
        return select.PagedKeys(records.keys, self._store.tables, records.per_block, *where, *sizes, plans)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def token_history(self, live_ids: Tensor, lookback: int) -> Tensor:
        """live_ids int64 [N]: the step's token ids, -1 for dead (image) tokens -> int64 [N, lookback + 1], column s the
        token s positions back, -1 before the sequence or dead. Remembers the newest."""
        batch = self.batch
        return select.token_history(
            live_ids, batch.positions, batch.slots, batch.row_starts, self._store.last_tokens, lookback
        )
