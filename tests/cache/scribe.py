"""Stands for a model in tests of the cache: writes numbers that say which token of which position they belong to.

Every record is a function of layer, position and token alone, so a cache that saw rejected drafts can be compared with
one that never did, and any row that is found in the wrong place is recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.formats import lookback
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Batch, Chunk


def record(layer: int, positions: Tensor, ids: Tensor, width: int) -> Tensor:
    """Float32 [N, width]: whole numbers below 2^20, which float32 holds exactly."""
    seeds = (positions * 7919 + ids * 104_729 + layer * 1_299_709).unsqueeze(1)
    return ((seeds + torch.arange(width) * 31) % (1 << 20)).float()


def open_slots(storage: CacheStorage, *slots: int) -> None:
    """Empty sequences, each with an equal share of all blocks."""
    share = storage.num_blocks // storage.max_num_seqs
    for slot in slots:
        storage.apply([OpenSlot(slot), SetTable(slot, 0, tuple(range(1 + slot * share, 1 + (slot + 1) * share)))])


def write(storage: CacheStorage, chunks: Sequence[Chunk]) -> None:
    """A step, in the order in which the layers touch the cache."""
    config = storage.config
    batch = Batch.from_chunks(chunks, torch.device("cpu"))
    view = whole = storage.begin(batch)
    ids, positions = batch.token_ids, batch.positions
    view.token_history(ids, lookback(config))
    for layer in range(config.num_hidden_layers):
        if layer in config.kv_source_layer_ids:
            if config.ratio(layer) == 2:
                pairs = record(layer, positions, ids, 2 * config.head_dim).unflatten(1, (2, -1))
                first, second = view.close_pairs(layer, pairs)
                kv = first[:, 0] + 2 * second[:, 1]
            else:
                rows = view.closing_rows(layer)
                kv = record(layer, positions, ids, config.head_dim)[slice(None) if rows is None else rows]
            view.write_entries(layer, kv, kv[:, : config.index_head_dim])
        if view.narrowed is not None and layer == max(config.kv_source_layer_ids) + 1:
            kept, view = view.narrowed
            ids, positions = ids[kept], positions[kept]
        view.stage_window(layer, record(layer, positions, ids, config.head_dim))
        view.commit_window(layer)
    if view.keeps_drafts:
        rows, context = view.draft_context()
        rows = slice(None) if rows is None else rows
        for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_drafts):
            context.stage_window(layer, record(layer, positions[rows], ids[rows], config.head_dim))
            context.commit_window(layer)
    whole.commit()


class Seen(NamedTuple):
    """All that later steps can read of a slot."""

    windows: Tensor  # [layers, min(W, length), width]
    entries: list[Tensor]  # compressed records and keys of each source, by entry
    open_rows: list[Tensor]  # of each ratio-2 source: the row before an odd length
    last_tokens: list[int]
    replicas: dict[int, Tensor]  # by boundary


def seen(storage: CacheStorage, slot: int, layers: int | None = None) -> Seen:
    """layers: how many of the window layers, None = all."""
    length, rings = storage.length(slot), storage.windows
    entries, open_rows = [], []
    for layer, records in storage.records.items():
        count = length // records.ratio
        places = np.arange(count)
        rows = storage.host_tables[slot, places // records.per_block] * records.per_block + places % records.per_block
        entries += [records.kv[rows], records.keys[rows]]
        if length % 2 and layer in storage.open_rows.rows:
            open_rows.append(storage.open_rows.rows[layer][slot, length // 2 % storage.open_rows.pairs].clone())
    size = storage.last_tokens.shape[1]
    newest = range(max(0, length - lookback(storage.config)), length)
    return Seen(
        storage.window_rows(slot)[:layers].clone(),
        entries,
        open_rows,
        [int(storage.last_tokens[slot, position % size]) for position in newest],
        {
            boundary: rings.replica_rows[:, rings.replica_of(slot, boundary)].clone()
            for boundary in storage._replicas[slot].tolist()
            if boundary > 0
        },
    )


def assert_same(got: Seen, expected: Seen) -> None:
    """Replicas: the newest is there, and whatever else is there is right."""
    assert torch.equal(got.windows, expected.windows)
    assert got.last_tokens == expected.last_tokens
    for name in ("entries", "open_rows"):
        pairs = zip(getattr(got, name), getattr(expected, name), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name
    assert max(got.replicas, default=0) == max(expected.replicas, default=0)
    for boundary, rows in got.replicas.items():
        assert torch.equal(rows, expected.replicas[boundary])
