"""Sequences in a cache storage, step by step, as the engine's runner drives them: cold, or with a cached prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.cache.blocks import BLOCK_TOKENS, blocks_for
from deepinfer.cache.edits import OpenSlot, SetLength, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Chunk
from deepinfer.model.backbone import DeepseekV41


def cold_slot(storage: CacheStorage, slot: int, num_tokens: int, first_block: int = 1) -> range:
    """An empty sequence with blocks for so many tokens -> the block ids."""
    blocks = range(first_block, first_block + blocks_for(num_tokens))
    storage.apply([OpenSlot(slot), SetTable(slot, 0, tuple(blocks))])
    return blocks


def hit_slot(
    storage: CacheStorage,
    slot: int,
    ids: Sequence[int],
    hit: int,
    start: int,
    own: Sequence[int],
    shared: Sequence[int],
) -> None:
    """A sequence whose first `hit` tokens lie in `shared` blocks and that is computed from `start` on; `own` blocks
    follow."""
    adopted = tuple(shared[: hit // BLOCK_TOKENS])
    last = tuple(ids[max(0, start - storage.last_tokens.shape[1]) : start])
    table = [SetTable(slot, 0, adopted), SetTable(slot, len(adopted), tuple(own))]
    storage.apply([OpenSlot(slot), *table, SetLength(slot, start, last)])


class Bounds(NamedTuple):
    """As in `Chunk`, for every chunk of a prompt."""

    window_floor: int = 0
    write_from: int = 0
    keep_from: int = 0


def feed(
    model: DeepseekV41,
    storage: CacheStorage,
    slot: int,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    *,
    num_logits: int = 1,
    mates: Sequence[Chunk] = (),
    bounds: Bounds = Bounds(),  # noqa: B008  # immutable
) -> Tensor:
    """The tokens that the slot lacks, in chunks that end at `cuts` -> logits of the last `num_logits`, of whatever
    chunks they are. mates: chunks of other sequences, one in the batch of each of ours while they last."""
    start, waiting = storage.length(slot), list(mates)
    rows = [torch.empty(0, model.config.vocab_size)]
    for end in sorted({cut for cut in cuts if start < cut < len(ids)} | {len(ids)}):
        wanted = max(0, end - max(start, len(ids) - num_logits))
        chunk = Chunk(slot, start, ids[start:end], wanted, *bounds)
        logits = model.forward([waiting.pop(0), chunk] if waiting else [chunk], storage)
        rows.append(logits[len(logits) - wanted :])
        start = end
    return torch.cat(rows)
