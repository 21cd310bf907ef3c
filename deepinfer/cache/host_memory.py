"""Host memory behind the device's tensors: windows kept for later hits, and sequences that gave up their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.records import WindowRings

if TYPE_CHECKING:
    from deepinfer.cache.storage import CacheStorage


class WindowArena:
    """Stored windows: `window` records of every backbone layer per entry, [entries, layers, W, width]. The host's side
    says what an entry holds. Memory is asked for at once and used as entries fill.

    The draft layers' rows are not kept: whoever loads a window computes at least a window and a verify step of rows
    behind it (prefix.ReplayPolicy), and these are all that a draft window ever shows.
    """

    def __init__(self, rings: WindowRings, entries: int) -> None:
        self._rings = rings
        layers, _, width = rings.replica_rows.shape
        self.rows = torch.empty(entries, layers, rings.window, width, dtype=rings.pool.dtype)

    def save(self, slot: int, boundary: int, entry: int) -> None:
        """The slot's replica of the window below `boundary` into an entry."""
        self.rows[entry] = self._rings.replica_rows[:, self._rings.replica_of(slot, boundary)]

    def load(self, entry: int, slot: int, boundary: int) -> None:
        """An entry into the slot's rings, as positions [boundary - W, boundary)."""
        rings = self._rings
        positions = torch.arange(max(boundary - rings.window, 0), boundary, device=rings.pool.device)
        rows = self.rows[entry, :, -len(positions) :]
        places = slot * rings.ring + positions % rings.ring
        rings.pool[: rings.backbone_layers, places] = rows.to(rings.pool.device)


class OffloadedSequence(NamedTuple):
    """A preempted sequence in host memory."""

    blocks: int
    parts: list[Tensor]  # in the order of `parts_of`
    numbers: list[np.ndarray]  # its row of every array of numbers per slot


def parts_of(storage: CacheStorage, slot: int, blocks: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """Every tensor that holds something of a sequence in `slot` and `blocks` int64 [n], and where in it that lies."""
    for records in storage.records.values():
        for pool in records.blocks():
            yield pool, blocks
    for pool, rows in storage.windows.slot_parts(slot):
        yield pool, (slice(None), rows)
    for open_rows in storage.open_rows.rows.values():
        yield open_rows, slot
    yield storage.last_tokens, slot


def take(storage: CacheStorage, slot: int, blocks: Tensor) -> list[Tensor]:
    """Copies of a sequence's parts, in host memory."""
    return [pool[where].to("cpu", copy=True) for pool, where in parts_of(storage, slot, blocks)]


def put(storage: CacheStorage, slot: int, blocks: Tensor, parts: list[Tensor]) -> None:
    """The same parts into another slot and other blocks."""
    for (pool, where), part in zip(parts_of(storage, slot, blocks), parts, strict=True):
        pool[where] = part.to(pool.device)
