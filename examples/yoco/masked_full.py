"""The slow way to the same numbers: all rows through all layers, with masks where the engine leaves rows out.

The engine truncates (layers after the last KV source run on the last K rows of a prompt, in a batch of their own) and
replays (a prefix found in the cache is entered one window before its end, and what is cached is not written again). In
both cases it only saves work whose results a mask would hide. This module hides them with masks and saves nothing: one
chunk from position 0, every row in every layer. It shares none of the code that leaves rows out: `Chunk`'s bounds stay
0, so no floor, no suppressed write and no narrowed batch is ever planned here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.cache.blocks import blocks_for
from deepinfer.cache.edits import OpenSlot, SetLength, SetTable
from deepinfer.cache.step import StepView
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Batch, Chunk
from deepinfer.model.backbone import DeepseekV41


@dataclass(frozen=True)
class Masks:
    """replay_from (s): rows from here on see no window position below it. cached (H): entries of positions below it
    stay as a cold run wrote them. keep_from (L - K): in layers after the last KV source, rows from here on see no
    window position below it."""

    replay_from: int = 0
    cached: int = 0
    keep_from: int = 0


class MaskedView(StepView):
    """A step of one chunk that begins at position 0, so row numbers are positions."""

    masks: Masks
    last_source: int

    @property
    def narrowed(self) -> None:
        return None

    def stage_window(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        pool, _ = super().stage_window(layer, kv)
        rings, position = self._store.windows, torch.arange(len(kv)).unsqueeze(1)
        oldest = (position - rings.window + 1).clamp_min(0)
        bounds = [self.masks.replay_from, self.masks.keep_from if layer > self.last_source else 0]
        for bound in bounds:
            oldest = torch.where(position >= bound, oldest.clamp_min(bound), oldest)
        wanted = oldest + torch.arange(rings.window)
        return pool, torch.where(wanted <= position, rings.staging + wanted, -1)

    def write_entries(self, layer: int, kv: Tensor, keys: Tensor) -> None:
        records = self._store.records[layer]
        kept = torch.arange(self.masks.cached // records.ratio)
        rows = self.entry_rows(layer, kept.unsqueeze(0))[0]
        before = records.kv[rows].clone(), records.keys[rows].clone()
        super().write_entries(layer, kv, keys)
        records.kv[rows], records.keys[rows] = before


class MaskedStorage(CacheStorage):
    """A cache for one sequence whose steps are `MaskedView`s."""

    masks = Masks()

    def begin(self, batch: Batch) -> MaskedView:
        super().begin(batch)
        view = MaskedView(self, batch)
        view.masks, view.last_source = self.masks, max(self.config.kv_source_layer_ids)
        return view


def masked_full(model: DeepseekV41, token_ids: Sequence[int], masks: Masks, num_logits: int) -> Tensor:
    """Logits of the last `num_logits` positions, float32 [num_logits, vocab]."""
    blocks = blocks_for(len(token_ids))
    storage = MaskedStorage.for_model(model, max_num_seqs=1, num_blocks=blocks)
    assert isinstance(storage, MaskedStorage)
    storage.apply([OpenSlot(0), SetTable(0, 0, tuple(range(1, blocks + 1)))])
    if masks.cached:  # what the cold run left in the cache
        model.forward([Chunk(0, 0, token_ids[: masks.cached], 0)], storage)
        storage.apply([SetLength(0, 0, ())])
    storage.masks = masks
    return model.forward([Chunk(0, 0, token_ids, num_logits)], storage)
