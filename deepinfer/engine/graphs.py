"""Decode and verify steps as CUDA graphs: one per size, captured at start; what fits none of them runs eagerly.

A graph repeats launches whose sizes and addresses never change, so a step of a few rows costs the host one launch
instead of a thousand. Rows are filled up to the next size with rows of nobody (cache/graph_step.py). Without CUDA the
same padded passes run launch by launch, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.cache.graph_step import GraphView, StepRows, begin_rows, commit_rows
from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.errors import OutOfMemoryStepError
from deepinfer.kernels.device import free_memory
from deepinfer.kernels.streams import Graph, OutOfMemory, new_memory_pool, record
from deepinfer.model.batch import Batch

if TYPE_CHECKING:
    from deepinfer.model.backbone import DeepseekV41, Memories

# Sequences. Few rows cost what their experts' weights cost, and rows of padding all ask the same experts: counts that
# are a half apart lose little.
COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_ROWS = COUNTS[-1]  # beyond, a step is long enough to hide its launches


def sizes_for(rows: int, sequences: int, drafts: int) -> list[tuple[int, int]]:
    """Rows and chunks of the padded steps, the largest first: for so many sequences, or fewer, a row each, and where
    drafts are verified as many rows each as there may be; none has more than `rows` rows."""
    counts = [count for count in COUNTS if count < sequences] + [sequences]
    sizes = {(count * each, count) for count in counts for each in {1, 1 + drafts} if count * each <= rows}
    return sorted(sizes, reverse=True)


class PaddedStep:
    """The pass over up to `size` rows of a model and a cache, and its graph once it is captured."""

    def __init__(
        self, model: DeepseekV41, storage: CacheStorage, size: int, longest: int, chunks: int | None = None
    ) -> None:
        """longest: tokens that a sequence may have, drafts included. chunks None: as many as there can be."""
        chunks = min(size, storage.max_num_seqs) if chunks is None else chunks
        self.rows = StepRows(size, chunks, storage.null_slot, storage.device)
        self._model, self._storage, self._longest = model, storage, longest
        self._graph: Graph | None = None
        self._logits: Tensor | None = None
        self._recalled: Memories | None = None  # buffers of what the host's Engram tables hold, read by the graph
        self._pool = storage.windows.pool

    def capture(self, memory_pool: Any) -> None:
        """Record the pass, after one that compiles and allocates what is made at first use. Rows are all of nobody."""
        self._recalled = self._recall()
        self._pass()
        self._graph, self._logits = record(self._pass, memory_pool)

    def run(self, batch: Batch) -> Tensor:
        """A step that `rows` holds -> logits float32 [its rows, vocab], good until the next step. ValueError: as
        `CacheStorage.check`."""
        storage = self._storage
        begin_rows(storage, batch, self.rows)
        logits = self.play()
        commit_rows(storage, batch)
        return logits[: batch.num_rows]

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def play(self) -> Tensor:
        """The pass over what is in `rows` -> logits float32 [size, vocab]. CheckpointError: an Engram row that a step
        before this one read is damaged."""
        self._model.tables.check()
        if self._graph is None:
            self._recalled = self._recall()
            return self._pass()
        if self._storage.windows.pool is not self._pool:
            raise RuntimeError("the window records have moved since the graphs were captured")
        if self._recalled is not None:
            for layer, rows in (self._recall() or {}).items():
                for kept, value in zip(self._recalled[layer], rows, strict=True):  # codes and scales
                    kept.copy_(value)
        self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _view(self) -> GraphView:
        return GraphView(self._storage, self.rows, self._longest)

    def _recall(self) -> Memories | None:
        return None if self._model.tables.capturable else self._model.recall(self._view())

    def _pass(self) -> Tensor:
        dead = self.rows.token_ids == self._model.config.image_token_id
        view = self._view()
        logits = self._model.run(view, dead, self._recalled)
        view.finish()
        return logits


class GraphedModel:
    """A model whose decode and verify steps run padded; the forward pass of an engine over one cache.

    rows: of the largest padded step, 0 = none. longest: tokens that a sequence may have, drafts included.
    """

    def __init__(self, model: DeepseekV41, storage: CacheStorage, *, rows: int, longest: int) -> None:
        self.device = model.device
        self._model, self._storage = model, storage
        self.memory_pool: Any = None  # of all graphs, once they are captured
        sizes = sizes_for(rows, storage.max_num_seqs, storage.drafts)
        self._steps = [PaddedStep(model, storage, size, longest, chunks) for size, chunks in sizes]

    @property
    def sizes(self) -> Sequence[int]:
        """Rows of the padded steps, the largest first."""
        return [step.rows.rows for step in self._steps]

    def capture(self, *, progress: bool = False) -> int:
        """Record all graphs, the largest first, so that the smaller ones fit into the memory that it left -> bytes that
        they took. RuntimeError naming what to lower where memory does not suffice. Nothing may be in the cache."""
        before, _ = free_memory(self.device)
        self.memory_pool = new_memory_pool()
        with torch.inference_mode(), tqdm(self._steps, desc="Capturing graphs", disable=not progress) as bar:
            for step in bar:
                try:
                    step.capture(self.memory_pool)
                except OutOfMemory as error:
                    raise RuntimeError(
                        f"out of memory while the graph for {step.rows.rows} rows was captured: lower "
                        f"gpu_memory_utilization, num_blocks or max_num_seqs"
                    ) from error
        after, _ = free_memory(self.device)
        return before - after

    def step_for(self, rows: int, chunks: int) -> PaddedStep | None:
        """The smallest padded step with as many rows and chunks."""
        fitting = [step for step in self._steps if rows <= step.rows.rows and chunks <= step.rows.chunks]
        return fitting[-1] if fitting else None

    def forward(self, batch: Batch, storage: CacheStorage) -> Tensor:
        """Logits float32 of the step's rows that ask for them, as `DeepseekV41.forward`, good until the next step."""
        assert storage is self._storage
        fitting = [step for step in self._steps if step.rows.holds(batch)]
        try:
            return fitting[-1].run(batch) if fitting else self._model.forward(batch, storage)
        except OutOfMemory as error:
            raise OutOfMemoryStepError(batch.num_rows) from error
