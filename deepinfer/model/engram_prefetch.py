"""Rows of the Engram tables for a step's tokens, on the device before the layer that wants them (specification 2.3).

The released tables are 101 GB each and stay in host memory, where a token's 24 rows of 264 bytes lie anywhere. Either
the tables are page-locked and a kernel reads the rows across the bus: no host in between, so it may stand in a CUDA
graph. Or they stay mapped files: threads gather the rows into page-locked buffers and a copy follows, which needs the
row numbers on the host, best a step ahead (a prompt's are known). Both give rows folded to FP8 as wkv takes them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.streams import Event, beside, follow, keep_for_current_stream, mark, new_stream, wait
from deepinfer.kernels.triton.engram import NAN, OUTSIDE, empty_rows, fold_table_rows
from deepinfer.kernels.triton.quantize import Fp8Rows
from deepinfer.model.engram_table import EngramTable
from deepinfer.model.page_locked import Bytes, PageLocked, available_bytes
from deepinfer.model.safetensors_header import CheckpointError

logger = logging.getLogger(__name__)

Placement = Literal["pinned", "mapped"]
GATHER_THREADS = 16  # rows of a mapped file wait for the disk one page each; a thread waits for one page at a time
GATHER_ROWS = 384  # that one thread takes at once: 16 tokens
MOST_OF_MEMORY = 0.8  # of what is available that "auto" takes for page-locked tables


@dataclass(frozen=True)
class _Folded:
    """One layer's rows of one step, made on the other stream. ids: kept while that reads them."""

    rows: Fp8Rows
    ready: Event | None
    ids: Tensor


@dataclass(frozen=True)
class _Gathered:
    """One layer's raw rows of one step, on their way to the device: codes and scales."""

    tokens: int
    copied: Future[tuple[list[Tensor], Event | None]]


def table_arrays(table: EngramTable) -> tuple[Bytes, Bytes]:
    """The table's bytes where they are: codes [rows, head_dim], scales [rows, head_dim / 32]."""
    return table._codes, table._scales


def choose_placement(tables: Mapping[int, EngramTable]) -> Placement:
    """Pinned where a copy of all that is mapped from files fits into `MOST_OF_MEMORY` of the memory that is available
    now; tables that are in memory already are locked where they are."""
    parts = [part for table in tables.values() for part in table_arrays(table)]
    size = sum(part.nbytes for part in parts if not part.flags.writeable)
    return "pinned" if size <= MOST_OF_MEMORY * available_bytes() else "mapped"


def table_bytes(tables: Mapping[int, EngramTable]) -> int:
    return sum(part.nbytes for table in tables.values() for part in table_arrays(table))


class EngramPrefetch:
    """`start` with a step's row numbers as early as they are known, `take` in each Engram layer, `check` once the
    step's results are on the host. Steps are taken in the order in which they were started."""

    def __init__(
        self,
        tables: Mapping[int, EngramTable],
        *,
        columns: int,
        device: torch.device,
        placement: Placement | Literal["auto"] = "auto",
        threads: int = GATHER_THREADS,
    ) -> None:
        """tables by layer. columns: rows a token reads (orders * heads). On a CUDA device "pinned" copies tables of
        files into page-locked memory and locks those that are in memory where they are; RuntimeError where the system
        does not allow as much. "auto": as `choose_placement` says, and mapped where pinning fails; on a GPU a warning
        in the log says so, and what it costs."""
        self.placement: Placement = choose_placement(tables) if placement == "auto" else placement
        self.columns, self.device = columns, device
        self.tables = dict(tables)
        self.bytes_read = dict.fromkeys(self.tables, 0)
        on_gpu = device.type == "cuda"
        self._arrays = {layer: table_arrays(table) for layer, table in self.tables.items()}
        self._locks: list[PageLocked] = []
        self._pinned: dict[int, tuple[Tensor, Tensor]] = {}
        refused = ""
        if self.placement == "pinned":
            try:
                self._pin(on_gpu)
            except RuntimeError as error:
                self._unpin()
                if placement != "auto":
                    raise
                self.placement, refused = "mapped", str(error)
        if placement == "auto" and self.placement == "mapped":
            needed = f"{table_bytes(tables) / 2**30:,.1f} GiB"
            logger.warning(
                "Engram tables of %s stay in their files: %s. Every decode step waits for the host to read its rows, "
                "and so do prompts; host memory for all of them avoids it",
                needed,
                refused or f"{available_bytes() / 2**30:,.1f} GiB of host memory are available, and a share is left",
            )
        # Page-locked, so that kernels write it and the host reads it without asking the device.
        self._problems = {layer: torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu) for layer in self.tables}
        self._pending: dict[int, deque[_Folded | _Gathered]] = {layer: deque() for layer in self.tables}
        self._stream = new_stream(device)
        self._threads: ThreadPoolExecutor | None = None
        self._conductor: ThreadPoolExecutor | None = None
        if self.placement == "mapped":
            self._threads = ThreadPoolExecutor(threads, "engram-rows")
            self._conductor = ThreadPoolExecutor(1, "engram-step")

    @property
    def capturable(self) -> bool:
        """Whether `start` and `take` may stand in a CUDA graph."""
        return self.placement == "pinned"

    def start(self, ids: Mapping[int, Tensor]) -> None:
        """ids int64 [N, columns] by layer, all layers. On the device: pinned tables are read there; for mapped ones the
        host waits for them. On the host: nothing waits. IndexError for a row that a mapped table does not have."""
        if self.placement == "mapped":
            for layer, rows in ids.items():
                self._start_gathering(layer, rows)
            return
        ids = {layer: rows.to(self.device, non_blocking=True) for layer, rows in ids.items()}
        made = {layer: empty_rows(len(rows), self._width(layer), self.device) for layer, rows in ids.items()}
        follow(self._stream)
        with beside(self._stream):
            for layer, rows in ids.items():
                self._fold(layer, *self._pinned[layer], rows, made[layer])
                self._pending[layer].append(_Folded(made[layer], self._event(), rows))

    def take(self, layer: int) -> Fp8Rows:
        """The layer's rows of the oldest step that was started and not taken: [N, columns * head_dim]. The current
        stream waits for them, and so does the host where threads still gather. RuntimeError without a start."""
        if not self._pending[layer]:
            raise RuntimeError(f"rows of Engram layer {layer} are taken before `start` was told which")
        pending = self._pending[layer].popleft()
        if isinstance(pending, _Folded):
            wait(pending.ready)
            return pending.rows
        parts, copied = pending.copied.result()
        wait(copied)
        if copied is not None:
            for part in parts:  # allocated on the other stream, read and freed on this one
                keep_for_current_stream(part)
        rows = empty_rows(pending.tokens, self._width(layer), self.device)
        self._fold(layer, parts[0], parts[1], None, rows)
        return rows

    def check(self) -> None:
        """CheckpointError where a row that was read up to now holds NaN, or is none of its table. Asks nobody: call it
        when the step's results have arrived. Says so once."""
        for layer, problem in self._problems.items():
            found = int(problem)
            if not found:
                continue
            problem.zero_()
            prefix = self.tables[layer].prefix
            if found & OUTSIDE:
                raise CheckpointError(f"{prefix}: row ids leave the table; the hash and the config disagree")
            assert found == NAN
            raise CheckpointError(f"{prefix} holds NaN in a row that was read; the file is damaged")

    def count(self, tokens: int) -> None:
        """Of a replayed graph that holds `start`: its tokens' bytes count as read."""
        for layer in self.tables:
            self.bytes_read[layer] += tokens * self.token_bytes(layer)

    def token_bytes(self, layer: int) -> int:
        """Bytes that one token reads of a table: 24 rows of 264 in the release."""
        return self.columns * sum(part.shape[1] for part in self._arrays[layer])

    def close(self) -> None:
        """Threads end and memory is unlocked; nothing may be pending on the device any more."""
        for pool in (self._conductor, self._threads):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        for pending in self._pending.values():
            pending.clear()
        self._unpin()

    def _pin(self, on_gpu: bool) -> None:
        for layer, arrays in self._arrays.items():
            if on_gpu:
                self._locks += [PageLocked(part) for part in arrays]
                self._pinned[layer] = self._locks[-2].tensor, self._locks[-1].tensor
            else:
                self._pinned[layer] = torch.tensor(arrays[0]), torch.tensor(arrays[1])

    def _unpin(self) -> None:
        self._pinned.clear()
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    # -- one layer ------------------------------------------------------------------------------------------------

    def _width(self, layer: int) -> int:
        return self.columns * self.tables[layer].head_dim

    def _event(self) -> Event | None:
        return None if self._stream is None else mark(self._stream)

    def _fold(self, layer: int, codes: Tensor, scales: Tensor, ids: Tensor | None, out: Fp8Rows) -> None:
        fold_table_rows(codes, scales, ids, self._problems[layer], columns=self.columns, out=out)
        self.bytes_read[layer] += len(out.codes) * self.token_bytes(layer)

    def _start_gathering(self, layer: int, ids: Tensor) -> None:
        assert self._threads is not None and self._conductor is not None
        flat = ids.reshape(-1).to("cpu", torch.int64)  # waits for the device where they are there
        table = self.tables[layer]
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= table.num_rows):
            raise IndexError(
                f"{table.prefix}: row ids {int(flat.min())}..{int(flat.max())} leave the table of {table.num_rows} "
                "rows; the hash and the config disagree"
            )
        on_gpu = self._stream is not None
        buffers = [
            torch.empty(flat.numel(), part.shape[1], dtype=torch.uint8, pin_memory=on_gpu)
            for part in self._arrays[layer]
        ]
        pieces = [
            self._threads.submit(self._gather, layer, flat, buffers, start)
            for start in range(0, flat.numel(), GATHER_ROWS)
        ]
        self._pending[layer].append(_Gathered(len(ids), self._conductor.submit(self._copy, pieces, buffers)))

    def _gather(self, layer: int, ids: Tensor, buffers: list[Tensor], start: int) -> None:
        piece = slice(start, start + GATHER_ROWS)
        for part, buffer in zip(self._arrays[layer], buffers, strict=True):
            # numpy lets other threads run meanwhile, and does not complain of read-only memory
            np.take(part, ids[piece].numpy(), axis=0, out=buffer[piece].numpy(), mode="clip")

    def _copy(self, pieces: list[Future[None]], buffers: list[Tensor]) -> tuple[list[Tensor], Event | None]:
        """In a thread of its own: what was gathered goes to the device."""
        for piece in pieces:
            piece.result()
        with beside(self._stream):
            return [buffer.to(self.device, non_blocking=True) for buffer in buffers], self._event()
