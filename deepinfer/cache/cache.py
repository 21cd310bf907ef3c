"""A cache for whoever runs the model without an engine: both sides in one object, every order carried out at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer.cache.blocks import BLOCK_TOKENS, blocks_for, live_caches
from deepinfer.cache.formats import lookback
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.step import StepView
from deepinfer.cache.storage import CacheStorage
from deepinfer.model.batch import Batch
from deepinfer.model.config import ModelConfig

if TYPE_CHECKING:
    from deepinfer.model.backbone import DeepseekV41

__all__ = ["Cache", "live_caches"]


class Cache:
    """State of up to `max_num_seqs` sequences in `num_blocks` blocks of 128 tokens; nothing is shared but by forks.

    drafts, kv_format: see CacheStorage. Raises ValueError naming the argument.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_num_seqs: int,
        num_blocks: int,
        drafts: int = 0,
        kv_format: str = "float32",
        device: torch.device,
    ) -> None:
        self._join(
            config,
            CacheStorage(
                config,
                max_num_seqs=max_num_seqs,
                num_blocks=num_blocks,
                drafts=drafts,
                kv_format=kv_format,
                device=device,
            ),
        )

    @classmethod
    def for_model(
        cls, model: DeepseekV41, *, max_num_seqs: int, num_blocks: int, drafts: int = 0, kv_format: str | None = None
    ) -> Cache:
        """kv_format None: the numerics' own type."""
        cache = cls.__new__(cls)
        cache._join(
            model.config,
            CacheStorage.for_model(
                model, max_num_seqs=max_num_seqs, num_blocks=num_blocks, drafts=drafts, kv_format=kv_format
            ),
        )
        return cache

    def _join(self, config: ModelConfig, storage: CacheStorage) -> None:
        self.storage = storage
        self.manager = CacheManager(
            max_num_seqs=storage.max_num_seqs,
            num_blocks=storage.num_blocks,
            table_width=storage.tables.shape[1],
            window=config.sliding_window,
            num_layers=config.num_hidden_layers,
            lookback=lookback(config),
        )
        live_caches.add(self)

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def max_num_seqs(self) -> int:
        return self.manager.max_num_seqs

    @property
    def num_blocks(self) -> int:
        return self.manager.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.manager.num_free_blocks

    @property
    def num_free_slots(self) -> int:
        return self.manager.num_free_slots

    @staticmethod
    def blocks_for(num_tokens: int) -> int:
        """Blocks that a sequence of this length occupies."""
        return blocks_for(num_tokens)

    def length(self, slot: int) -> int:
        """Tokens of the sequence whose state is written. ValueError for a slot that is not open, here and below."""
        self.manager.table(slot)
        return self.storage.length(slot)

    # -- sequences ------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """A slot for a new, empty sequence. CacheFullError when all are taken."""
        slot = self.manager.open()
        self._carry_out()
        return slot

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Blocks for positions below `num_tokens`. CacheFullError and no change where too few are free; ValueError when
        the length is beyond what a table can hold."""
        self.manager.reserve(slot, num_tokens)
        self._carry_out()

    def fork(self, slot: int) -> int:
        """A second sequence with the same past: full blocks are shared, the open block and the slot's state copied."""
        child, edits = self.manager.fork(slot, self.length(slot))
        self.storage.apply(edits)
        return child

    def truncate(self, slot: int, length: int) -> None:
        """Take the last tokens back, at most `drafts` of them; their blocks stay reserved."""
        self.manager.table(slot)
        self.storage.truncate(slot, length)

    def close(self, slot: int) -> None:
        """Give a sequence's blocks and slot back."""
        self.manager.close(slot)

    def begin(self, batch: Batch) -> StepView:
        """Check a step and plan its reads and writes. ValueError: wrong start, blocks not reserved."""
        return self.storage.begin(batch)

    def _carry_out(self) -> None:
        self.storage.apply(self.manager.take_edits())

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free + used = total for blocks and slots, and both sides agree on every table."""
        self.manager.check_integrity()
        for slot in self.manager.open_slots():
            table = self.manager.table(slot).tolist()
            if self.storage.tables[slot, : len(table)].tolist() != table:
                raise RuntimeError(f"slot {slot}: the device's table differs from the host's")
            if self.storage.length(slot) > len(table) * BLOCK_TOKENS:
                raise RuntimeError(f"slot {slot}: {self.storage.length(slot)} tokens in {len(table)} blocks")
