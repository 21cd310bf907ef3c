"""The cache of one engine: slots and blocks for many sequences, first form (per request, no sharing but forks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer.cache.blocks import BLOCK_TOKENS, NULL_BLOCK, BlockPool, CacheFullError, blocks_for, live_caches
from deepinfer.cache.records import OpenRows, PagedRecords, WindowRings, lookback
from deepinfer.cache.step import StepView
from deepinfer.model.batch import Batch
from deepinfer.model.config import ModelConfig

if TYPE_CHECKING:
    from deepinfer.model.backbone import DeepseekV41


class Cache:
    """State of up to `max_num_seqs` sequences in `num_blocks` blocks of 128 tokens.

    A slot is a sequence's place for what does not grow (window rings, open rows, last tokens); its block table
    names the blocks of what does. Unlike the real engine's packed records, values are held in the numerics' dtype.
    """

    def __init__(
        self, config: ModelConfig, *, max_num_seqs: int, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        self.max_num_seqs = max_num_seqs
        self.pool = BlockPool(num_blocks)
        self.records = {
            layer: PagedRecords(config, layer, num_blocks, dtype, device) for layer in config.kv_source_layer_ids
        }
        self.windows = WindowRings(config, max_num_seqs, dtype, device)
        self.open_rows = OpenRows(config, max_num_seqs, device)
        self.last_tokens = torch.full((max_num_seqs, lookback(config)), -1, dtype=torch.int64, device=device)
        table_width = min(blocks_for(config.max_position_embeddings), num_blocks)
        self.tables = torch.full((max_num_seqs, table_width), NULL_BLOCK, dtype=torch.int64, device=device)
        self._blocks: dict[int, list[int]] = {}  # open slots and their tables
        self._lengths = [0] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        live_caches.add(self)

    @classmethod
    def for_model(cls, model: DeepseekV41, *, max_num_seqs: int, num_blocks: int) -> Cache:
        return cls(
            model.config,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            dtype=model.numerics.dtype,
            device=model.device,
        )

    # -- sequences ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @staticmethod
    def blocks_for(num_tokens: int) -> int:
        """Blocks that a sequence of this length occupies."""
        return blocks_for(num_tokens)

    def open(self) -> int:
        """A slot for a new, empty sequence. CacheFullError when all are taken."""
        if not self._free_slots:
            raise CacheFullError(f"all {self.max_num_seqs} sequence slots are in use")
        slot = self._free_slots.pop()
        self._blocks[slot] = []
        self._lengths[slot] = 0
        self.tables[slot] = NULL_BLOCK
        self.last_tokens[slot] = -1
        return slot

    def length(self, slot: int) -> int:
        """Tokens of the sequence whose state is written."""
        self._table(slot)
        return self._lengths[slot]

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Blocks for positions below `num_tokens`. CacheFullError and no change where too few are free; ValueError when
        the length is beyond what a table can hold."""
        table = self._table(slot)
        missing = blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return
        if len(table) + missing > self.tables.shape[1]:
            raise ValueError(
                f"{num_tokens} tokens are more than a sequence can have, {self.tables.shape[1] * BLOCK_TOKENS}"
            )
        new = self.pool.take(missing).tolist()
        self.tables[slot, len(table) : len(table) + missing] = torch.tensor(new, device=self.tables.device)
        table.extend(new)

    def fork(self, slot: int) -> int:
        """A second sequence with the same past: full blocks are shared, the open block and the slot's state copied."""
        table, length = self._table(slot), self._lengths[slot]
        full = length // BLOCK_TOKENS
        if not self._free_slots:
            raise CacheFullError(f"all {self.max_num_seqs} sequence slots are in use")
        own = self.pool.take(blocks_for(length) - full).tolist()
        self.pool.share(np.array(table[:full], np.int64))
        child = self.open()
        self._blocks[child] = table[:full] + own
        self.tables[child, : full + len(own)] = torch.tensor(
            self._blocks[child], dtype=torch.int64, device=self.tables.device
        )
        if own:
            for records in self.records.values():
                records.copy_block(table[full], own[0])
        self.windows.copy_slot(slot, child)
        self.open_rows.copy_slot(slot, child)
        self.last_tokens[child] = self.last_tokens[slot]
        self._lengths[child] = length
        return child

    def close(self, slot: int) -> None:
        """Give a sequence's blocks and slot back. ValueError for a slot that is not open."""
        self.pool.release(np.array(self._table(slot), np.int64))
        del self._blocks[slot]
        self._free_slots.append(slot)

    def _table(self, slot: int) -> list[int]:
        if slot not in self._blocks:
            raise ValueError(f"slot {slot} is not open")
        return self._blocks[slot]

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> StepView:
        """Check a step and plan its reads and writes. ValueError: wrong start, blocks not reserved."""
        rows = (batch.chunk_slots.tolist(), batch.starts.tolist(), batch.lengths.tolist())
        for slot, start, length in zip(*rows, strict=True):
            table = self._table(slot)
            if start != self._lengths[slot]:
                raise ValueError(f"slot {slot}: chunk starts at {start}, {self._lengths[slot]} tokens are written")
            if blocks_for(start + length) > len(table):
                raise ValueError(f"slot {slot}: no blocks reserved for {start + length} tokens")
        return StepView(self, batch)

    def advance(self, batch: Batch) -> None:
        """The step's tokens count as written from here on; `StepView.commit` calls it after the last layer."""
        for slot, length in zip(batch.chunk_slots.tolist(), batch.lengths.tolist(), strict=True):
            self._lengths[slot] += length

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free + used = total for blocks and slots and every table is valid."""
        self.pool.check_integrity(np.array([b for table in self._blocks.values() for b in table], np.int64))
        if sorted(self._free_slots + list(self._blocks)) != list(range(self.max_num_seqs)):
            raise RuntimeError("a slot is lost, or free and open at once")
        for slot, table in self._blocks.items():
            if self.tables[slot, : len(table)].tolist() != table:
                raise RuntimeError(f"slot {slot}: device table differs from the block list")
            if blocks_for(self._lengths[slot]) > len(table):
                raise RuntimeError(f"slot {slot}: {self._lengths[slot]} tokens written into {len(table)} blocks")
