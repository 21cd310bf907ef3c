"""What the draft model reads of the backbone: the stream that enters a few layers, averaged over its copies."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.model.state import CacheView


class Taps:
    """Collects one step's taps, layer by layer, of the rows whose context a later draft can see: those near the end of
    a chunk, and of them only what goes past the last KV source.

    view: the cache's view of exactly these rows.
    """

    def __init__(self, layers: Collection[int], view: CacheView) -> None:
        kept, last = view.narrowed or (None, view)
        rows, self.view = last.draft_context()
        self._layers, self._values = layers, list[Tensor]()
        self._rows_after = rows  # of the rows that go on; before the step narrows, of all rows:
        self._rows = rows if kept is None else kept if rows is None else kept[rows]

    def narrow(self) -> None:
        """From here on streams hold the kept rows only."""
        self._rows = self._rows_after

    def wants(self, layer: int) -> bool:
        return layer in self._layers

    def take(self, layer: int, stream: Tensor) -> None:
        """stream [N, copies, D], as it enters the layer."""
        if self.wants(layer):
            self._values.append((stream if self._rows is None else stream[self._rows]).mean(1))

    def joined(self) -> Tensor:
        """[rows, layers * D], by rising layer."""
        return torch.cat(self._values, dim=1)
