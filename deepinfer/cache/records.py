"""The tensors behind a cache: paged compressed records, window rings, open rows, last tokens (specification 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.blocks import BLOCK_TOKENS
from deepinfer.model.config import ModelConfig


def lookback(config: ModelConfig) -> int:
    """Tokens before the current one that Engram's longest n-gram reads: 3 for 4-grams, 0 without Engram."""
    return max(config.engram_max_ngram_size - 1, 0)


class PagedRecords:
    """Compressed KV and index keys of one KV source: `128 / ratio` entries per block, addressed by row.

    The row of entry j of a sequence is table[j // per_block] * per_block + j % per_block.
    """

    def __init__(
        self, config: ModelConfig, layer: int, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.ratio = config.ratio(layer)
        self.per_block = BLOCK_TOKENS // self.ratio
        rows = (num_blocks + 1) * self.per_block  # + 1: the null block
        self.kv = torch.zeros(rows, config.head_dim, dtype=dtype, device=device)
        self.keys = torch.zeros(rows, config.index_head_dim, dtype=dtype, device=device)

    def copy_block(self, source: int, target: int) -> None:
        take = slice(source * self.per_block, (source + 1) * self.per_block)
        put = slice(target * self.per_block, (target + 1) * self.per_block)
        self.kv[put] = self.kv[take]
        self.keys[put] = self.keys[take]


class WindowRings:
    """Window KV of every layer: a ring of `sliding_window` rows per slot, and a staging area behind the rings.

    A step stages its new rows first and commits them after the layer's attention, so a chunk of any length reads the
    rows before it from the ring and its own rows from the staging area, through one index.
    """

    def __init__(self, config: ModelConfig, max_num_seqs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = config.sliding_window
        self.staging = max_num_seqs * self.size  # first staging row
        self.pools = [
            torch.zeros(self.staging + 1, config.head_dim, dtype=dtype, device=device)
            for _ in range(config.num_hidden_layers)
        ]

    def stage(self, layer: int, kv: Tensor) -> Tensor:
        """Put kv [N, D] behind the rings of a layer, growing the area when N is larger than ever. -> the pool."""
        pool = self.pools[layer]
        need = self.staging + kv.shape[0]
        if pool.shape[0] < need:
            grown = pool.new_zeros(need, pool.shape[1])
            grown[: self.staging] = pool[: self.staging]
            self.pools[layer] = pool = grown
        pool.narrow(0, self.staging, kv.shape[0]).copy_(kv)
        return pool

    def copy_slot(self, source: int, target: int) -> None:
        for pool in self.pools:
            pool[target * self.size : (target + 1) * self.size] = pool[source * self.size : (source + 1) * self.size]


class OpenRows:
    """The pending row (value, gate) of each ratio-2 source whose group is still open, float32 [slots, 2, D]."""

    def __init__(self, config: ModelConfig, max_num_seqs: int, device: torch.device) -> None:
        self.rows = {
            layer: torch.zeros(max_num_seqs, 2, config.head_dim, dtype=torch.float32, device=device)
            for layer in config.kv_source_layer_ids
            if config.ratio(layer) == 2
        }

    def copy_slot(self, source: int, target: int) -> None:
        for rows in self.rows.values():
            rows[target] = rows[source]
