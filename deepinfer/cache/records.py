"""The tensors behind a cache: paged compressed records, window rings, open rows, last tokens (specification 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.blocks import BLOCK_TOKENS
from deepinfer.cache.formats import KVFormat, lookback, open_pairs, ring_rows, window_layers
from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig


class PagedRecords:
    """Compressed KV and index keys of one KV source: `128 / ratio` entries per block, addressed by row.

    The row of entry j of a sequence is table[j // per_block] * per_block + j % per_block.
    """

    def __init__(self, config: ModelConfig, layer: int, num_blocks: int, kind: KVFormat, device: torch.device) -> None:
        self.format = kind
        self.ratio = config.ratio(layer)
        self.per_block = BLOCK_TOKENS // self.ratio
        rows = (num_blocks + 1) * self.per_block  # + 1: the null block
        kv, key = self.format.compressed, self.format.key
        self.kv = torch.zeros(rows, kv.width(config.head_dim), dtype=kv.dtype, device=device)
        self.keys = torch.zeros(rows, key.width(config.index_head_dim), dtype=key.dtype, device=device)
        self.paged_keys = kind.pages(config)

    def write(self, rows: Tensor, kv: Tensor, keys: Tensor) -> None:
        """kv [G, head_dim] and keys [G, index_head_dim] as records of rows int64 [G], rounded or not where
        `CacheStorage.rounds` says so."""
        select.put_compressed(self.kv, rows, kv, self.format.compressed.encode)
        if self.paged_keys:
            select.put_key_pages(self.keys, rows, keys, self.per_block)
        else:
            self.keys[rows] = self.format.key.encode(keys)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Both pools by block id: [blocks + 1, per_block, width] each, sharing their memory."""
        return self.kv.unflatten(0, (-1, self.per_block)), self.keys.unflatten(0, (-1, self.per_block))

    def copy_block(self, source: int, target: int) -> None:
        for pool in self.blocks():
            pool[target] = pool[source]


class WindowRings:
    """Window records of every layer, in one pool per layer: a ring of `ring` rows per slot, behind the rings a staging
    area. Where drafts are made, the draft model's stages are layers as well, behind the backbone's.

    A step stages its new rows first and commits them after the layer's attention, so a chunk of any length reads the
    rows before it from the ring and its own rows from the staging area, through one index.

    The ring is longer than the window by what a verify step may write, so that nothing the window shows is overwritten
    by drafts that are then rejected. Where windows are stored, `replica_rows` has two replicas of a whole window per
    slot, of the backbone's layers: a replica is the window below a multiple of 128, copied when a sequence passes it;
    two of them take turns, so one is whole while the other is filled.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_num_seqs: int,
        kind: KVFormat,
        device: torch.device,
        *,
        drafts: int = 0,
        replicas: bool = False,
        staging_rows: int = 1,
    ) -> None:
        """staging_rows: of the staging area from the start; it grows where a step needs more."""
        self.format = kind.window
        self.window, self.ring, self.replicas = config.sliding_window, ring_rows(config, drafts), replicas
        self.backbone_layers = config.num_hidden_layers
        self.draft_layers = window_layers(config, drafts) - config.num_hidden_layers
        self.staging = max_num_seqs * self.ring  # first staging row
        layers, width = self.backbone_layers + self.draft_layers, self.format.width(config.head_dim)
        self.pool = torch.zeros(layers, self.staging + staging_rows, width, dtype=self.format.dtype, device=device)
        self.replica_rows = self.pool.new_zeros(
            self.backbone_layers, 2 * max_num_seqs * self.window if replicas else 0, width
        )

    def places(self, layer: int, count: int) -> Tensor:
        """Where `count` rows of a step are staged, [count, width], growing the area when they are more than ever."""
        need = self.staging + count
        if self.pool.shape[1] < need:
            layers, rows, width = self.pool.shape
            with torch.inference_mode(False):  # edits write it outside of a step, too
                grown = self.pool.new_zeros(layers, max(need, rows + (rows - self.staging) // 2), width)
                grown[:, : self.staging] = self.pool[:, : self.staging]
            self.pool = grown
        return self.pool[layer, self.staging : need]

    def stage(self, layer: int, kv: Tensor) -> Tensor:
        """Put kv [N, D] behind the rings of a layer -> its pool. Or kv is what `places` gave, uint8: then the records
        are there."""
        if kv.dtype != torch.uint8:
            select.put_windows(self.places(layer, len(kv)), kv, self.format.encode)
        return self.pool[layer]

    def ring_of(self, slot: int) -> slice:
        return slice(slot * self.ring, (slot + 1) * self.ring)

    def replica_of(self, slot: int, boundary: int) -> slice:
        """Rows of `replica_rows` that the boundary's window is copied to."""
        first = (2 * slot + boundary // BLOCK_TOKENS % 2) * self.window
        return slice(first, first + self.window)

    def slot_parts(self, slot: int) -> list[tuple[Tensor, slice]]:
        """Everything that a slot holds: tensors [layers, rows, width], and which of their rows."""
        parts = [(self.pool, self.ring_of(slot))]
        if self.replicas:
            parts.append((self.replica_rows, slice(2 * slot * self.window, 2 * (slot + 1) * self.window)))
        return parts

    def copy_slot(self, source: int, target: int) -> None:
        for (pool, take), (_, put) in zip(self.slot_parts(source), self.slot_parts(target), strict=True):
            pool[:, put] = pool[:, take]


class OpenRows:
    """First rows (value, gate) of the pairs of each ratio-2 source, for pairs whose second token comes in a later step.

    Float32 [slots, pairs, 2, D] by layer. The row of even position p lies at p // 2 % pairs; nothing is erased when
    drafts are rejected: the sequence's length says which row counts.
    """

    def __init__(self, config: ModelConfig, max_num_seqs: int, device: torch.device, *, drafts: int = 0) -> None:
        self.pairs = open_pairs(drafts)
        self.rows = {
            layer: torch.zeros(max_num_seqs, self.pairs, 2, config.head_dim, dtype=torch.float32, device=device)
            for layer in config.kv_source_layer_ids
            if config.ratio(layer) == 2
        }

    def copy_slot(self, source: int, target: int) -> None:
        for rows in self.rows.values():
            rows[target] = rows[source]


class LastTokens:
    """Ids of the newest tokens of every slot, for the n-grams of the next step: int64 [slots, size], -1 = image token.

    Position p lies at p % size. size: what the longest n-gram looks back, and as many as may be taken back.
    """

    def __init__(self, config: ModelConfig, max_num_seqs: int, device: torch.device, *, drafts: int = 0) -> None:
        size = lookback(config) + drafts if lookback(config) else 0
        self.ids = torch.full((max_num_seqs, size), -1, dtype=torch.int64, device=device)
