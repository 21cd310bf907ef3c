"""The host's side of the cache: who owns which slot and blocks, what is shared, what is kept for later prompts.

No tensors here. Decisions take effect at once in these books, and reach the device as edits, in order, with the next
step (edits.py says why that is enough). `check_integrity` proves the books.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.cache.blocks import BLOCK_TOKENS, NULL_BLOCK, BlockPool, CacheFullError, blocks_for, live_caches
from deepinfer.cache.edits import (
    CopyBlock,
    CopySlot,
    Edit,
    ForgetAll,
    ForgetTicket,
    LoadWindow,
    Offload,
    OpenSlot,
    Restore,
    SaveWindow,
    SetLength,
    SetTable,
)
from deepinfer.cache.events import CacheEvent
from deepinfer.cache.hashing import HashChain
from deepinfer.cache.offload import Offloaded, OffloadStore
from deepinfer.cache.prefix import PrefixHit, ReplayPolicy
from deepinfer.cache.prefix_cache import CacheStats, PrefixCache

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig
    from deepinfer.model.config import ModelConfig


class CacheManager:
    """Up to `max_num_seqs` sequences in `num_blocks` blocks of 128 tokens, and the prefix cache over them.

    table_width: blocks that one sequence may have. window, num_layers: of the model. prefix_caching: "off", "exact",
    "bounded" (see ReplayPolicy). window_entries: windows kept in host memory. lookback: tokens before the current one
    that Engram reads. offload_blocks: host memory for preempted sequences. on_event: told what the prefix cache stores
    and loses. A slot that is not open is a ValueError everywhere.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_blocks: int,
        table_width: int,
        window: int,
        num_layers: int,
        prefix_caching: str = "off",
        window_entries: int = 0,
        lookback: int = 0,
        offload_blocks: int = 0,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        if table_width < 1:
            raise ValueError(f"table_width must be at least 1, not {table_width}")
        self.max_num_seqs = max_num_seqs
        self.table_width = table_width
        self.window = window
        self.capacity = np.zeros(max_num_seqs, np.int64)  # tokens that each slot's blocks hold; read only for others
        self.stats = CacheStats()
        self._pool = BlockPool(num_blocks)
        self._tables = np.zeros((max_num_seqs, table_width), np.int64)  # null blocks; memory is taken as it is used
        self._num_blocks = [0] * max_num_seqs  # of each table
        self._published = [0] * max_num_seqs  # blocks of each table that the index has seen
        self._eras = [0] * max_num_seqs
        self._era = 0  # what was computed before `clear_prefix_cache` must not enter the index after it
        self._open: set[int] = set()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._policy = ReplayPolicy(prefix_caching, window, num_layers)
        self._prefixes = PrefixCache(self._policy, self._pool, window_entries, self.stats, on_event)
        self._offloaded = OffloadStore(offload_blocks)
        self._lookback = lookback
        self._edits: list[Edit] = []
        live_caches.add(self)

    @classmethod
    def for_model(
        cls,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        *,
        offload_blocks: int = 0,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> CacheManager:
        """offload_blocks: engine_config.offload_bytes over the size of a block in the chosen format."""
        return cls(
            max_num_seqs=engine_config.max_num_seqs,
            num_blocks=engine_config.num_blocks,
            table_width=min(blocks_for(engine_config.max_model_len), engine_config.num_blocks),
            window=model_config.sliding_window,
            num_layers=model_config.num_hidden_layers,
            prefix_caching=engine_config.prefix_caching,
            window_entries=engine_config.window_entries,
            lookback=max(model_config.engram_max_ngram_size - 1, 0),
            offload_blocks=offload_blocks,
            on_event=on_event,
        )

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """What `reserve` may take: free blocks and cached ones."""
        return self._pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody uses and a later prompt may hit."""
        return self._pool.num_cached

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_windows(self) -> int:
        """Windows in host memory."""
        return len(self._prefixes.windows)

    @property
    def num_offloaded(self) -> int:
        """Sequences in host memory."""
        return len(self._offloaded)

    @staticmethod
    def blocks_for(num_tokens: int) -> int:
        """Blocks that a sequence of this length occupies."""
        return blocks_for(num_tokens)

    def open_slots(self) -> list[int]:
        return sorted(self._open)

    def table(self, slot: int) -> np.ndarray:
        """The slot's blocks in order, int64 [n]; a view, valid until the next change of the slot."""
        self._check_open(slot)
        return self._tables[slot, : self._num_blocks[slot]]

    def take_edits(self) -> list[Edit]:
        """What the device has to do before the next step, in order; the caller hands it on."""
        taken, self._edits = self._edits, []
        return taken

    @property
    def replay_tokens(self) -> int:
        """Tokens that a hit without a stored window computes again."""
        return self._policy.replay_tokens

    def fits(self, hit: PrefixHit, num_tokens: int, spare: int = 0) -> bool:
        """Whether a new sequence that adopts `hit` can have blocks for `num_tokens` tokens and leave `spare` blocks."""
        blocks = np.array(hit.blocks, np.int64)
        idle = int((self._pool.references[blocks] == 0).sum())  # cached ones: counted as free until they are adopted
        return self.num_free_blocks - idle - (blocks_for(num_tokens) - len(blocks)) >= spare

    # -- sequences ------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """A slot for a new, empty sequence. CacheFullError when all are taken."""
        slot = self._take_slot()
        self._edits.append(OpenSlot(slot))
        return slot

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Blocks for positions below `num_tokens`, evicting cached ones where needed. CacheFullError and no change
        where too few are free; ValueError when the length is beyond what a table can hold."""
        self._check_open(slot)
        have = self._num_blocks[slot]
        missing = blocks_for(num_tokens) - have
        if missing <= 0:
            return
        if have + missing > self.table_width:
            raise ValueError(
                f"{num_tokens} tokens are more than a sequence can have, {self.table_width * BLOCK_TOKENS}"
            )
        self._extend_table(slot, self._pool.take(missing))

    def fork(self, slot: int, length: int) -> tuple[int, tuple[Edit, ...]]:
        """A second sequence with the same first `length` tokens: full blocks are shared, the open one is copied.

        -> its slot and the edits that make it, which must run after the step that computes the last of these tokens and
        before the edits of the next one; so nothing may be reserved for the new slot before the next step is planned.
        CacheFullError and no change without a slot or a block.
        """
        self._check_open(slot)
        count, full = blocks_for(length), length // BLOCK_TOKENS
        if count > self._num_blocks[slot]:
            raise ValueError(f"slot {slot}: no blocks reserved for {length} tokens")
        self._check_free_slot()
        own = self._pool.take(count - full)
        shared = self._tables[slot, :full]
        self._pool.share(shared)
        child = self._take_slot()
        self._tables[child, :full] = shared
        self._tables[child, full:count] = own
        self._set_num_blocks(child, count)
        self._published[child] = min(self._published[slot], full)
        self._eras[child] = self._eras[slot]
        edits: list[Edit] = [OpenSlot(child), SetTable(child, 0, tuple(self._tables[child, :count].tolist()))]
        edits += [CopyBlock(int(self._tables[slot, full]), block) for block in own.tolist()]
        edits.append(CopySlot(slot, child))
        return child, tuple(edits)

    def close(self, slot: int) -> None:
        """Give a sequence's blocks and slot back; the published ones stay cached until their room is needed."""
        self._pool.release(self.table(slot))
        self._tables[slot, : self._num_blocks[slot]] = NULL_BLOCK
        self._set_num_blocks(slot, 0)
        self._open.remove(slot)
        self._free_slots.append(slot)

    # -- prefix cache ---------------------------------------------------------------------------------------------

    def find(self, chain: HashChain, known: int) -> PrefixHit:
        """What a sequence of `known` tokens need not compute. Changes nothing; `adopt` takes it."""
        return self._prefixes.find(chain, known)

    def cached_tokens(self, chain: HashChain, known: int) -> int:
        """Of what `find` would find if a window were kept at every boundary, the length in tokens."""
        return self._prefixes.cached_tokens(chain, known)

    def adopt(self, slot: int, hit: PrefixHit, token_ids: np.ndarray) -> None:
        """The slot, just opened, starts with what `find` found a moment ago; nothing happens for a cold hit.

        token_ids: integers [known], all known tokens. RuntimeError if something else came between `find` and this and
        took a block or the window away.
        """
        if len(self.table(slot)):
            raise ValueError(f"slot {slot} has blocks already and cannot adopt a prefix")
        blocks = np.array(hit.blocks, np.int64)
        if not self._pool.hashed[blocks].all():
            raise RuntimeError("a block of the hit was evicted between find and adopt")
        self.stats.queries += 1
        self.stats.query_tokens += len(token_ids)
        if not hit.length:
            return
        if hit.window_entry is not None:
            self._prefixes.windows.use(hit.window_entry)
        self._pool.share(blocks)
        self._extend_table(slot, blocks)
        self._published[slot] = len(blocks)
        start = hit.replay_start
        self._set_length(slot, start, token_ids)
        if hit.window_entry is not None:
            self._edits.append(LoadWindow(hit.window_entry, slot, hit.length))
        self.stats.hit_tokens += start
        self.stats.replay_tokens += hit.replay_tokens
        self.stats.window_hits += hit.window_entry is not None
        self.stats.window_replays += hit.window_entry is None

    def publish(self, slot: int, chain: HashChain, computed: int) -> None:
        """The slot's full blocks below `computed` (tokens whose state is settled) can be hit from here on.

        O(new blocks). chain: of the slot's sequence, hashed at least that far where it is to be published.
        """
        self._check_open(slot)
        first, end = self._published[slot], min(computed // BLOCK_TOKENS, len(chain.hashes))
        if end > self._num_blocks[slot]:
            raise ValueError(f"slot {slot}: {computed} tokens computed in {self._num_blocks[slot]} blocks")
        if end <= first or not self._publishes(slot):
            return
        self._prefixes.store(self._tables[slot, first:end], chain, first)
        self._published[slot] = end

    def save_window(self, slot: int, chain: HashChain, boundary: int) -> bool:
        """Keep the window before `boundary`, a multiple of 128 that the slot's replica holds, in host memory -> whether
        it has to be copied: not if it is there already, or if nothing is kept at all."""
        self._check_open(slot)
        if boundary < 1 or boundary % BLOCK_TOKENS or boundary > len(chain.hashes) * BLOCK_TOKENS:
            raise ValueError(f"no window can be stored at {boundary}: not a block's end, or not hashed")
        entry = self._prefixes.store_window(chain.digest(boundary)) if self._publishes(slot) else None
        if entry is not None:
            self._edits.append(SaveWindow(slot, boundary, entry))
        return entry is not None

    def has_window(self, digest: bytes) -> bool:
        return digest in self._prefixes.windows

    def clear_prefix_cache(self) -> None:
        """Nothing computed so far is found again, not even what running sequences publish later."""
        self._era += 1
        self._prefixes.clear()
        for slot in self._open:
            self._published[slot] = 0

    def void(self) -> None:
        """After a failed step, when every slot is closed: edits may not have reached the device, so what it was said to
        hold is forgotten."""
        if self._open or len(self._offloaded):
            raise RuntimeError("sequences are left")
        self.clear_prefix_cache()
        self._edits = [ForgetAll()]

    # -- preemption to host memory --------------------------------------------------------------------------------

    def offload(self, slot: int, length: int) -> int | None:
        """Copy a sequence of `length` written tokens to host memory -> its ticket, or None where there is no room. The
        caller closes the slot afterwards."""
        table = self.table(slot)
        count = blocks_for(length)
        if count > len(table):
            raise ValueError(f"slot {slot}: no blocks reserved for {length} tokens")
        ticket = self._offloaded.add(Offloaded(length, self._eras[slot]))
        if ticket is not None:
            self._edits.append(Offload(ticket, slot, tuple(table[:count].tolist())))
            self.stats.offloads += 1
        return ticket

    def restore(self, ticket: int, slot: int, token_ids: np.ndarray) -> int:
        """The sequence of a ticket goes on in this slot, whose blocks were reserved -> its length. The ticket is gone.

        token_ids: integers [known], all known tokens. The length is set again: a step in flight may have written beyond
        it before the sequence was copied.
        """
        table = self.table(slot)
        sequence = self._offloaded.get(ticket)
        blocks = table[: blocks_for(sequence.length)]
        if len(blocks) < blocks_for(sequence.length):
            raise ValueError(f"slot {slot}: no blocks reserved for the {sequence.length} tokens of ticket {ticket}")
        if self._pool.hashed[blocks].any() or (self._pool.references[blocks] != 1).any():
            raise ValueError(f"slot {slot} shares blocks, which a restored sequence would overwrite")
        self._offloaded.remove(ticket)
        self._eras[slot] = sequence.era
        self._edits.append(Restore(ticket, slot, tuple(blocks.tolist())))
        self._set_length(slot, sequence.length, token_ids)
        self.stats.restores += 1
        return sequence.length

    def forget(self, ticket: int) -> None:
        """The sequence of a ticket ended. ValueError for a ticket that is gone."""
        self._offloaded.remove(ticket)
        self._edits.append(ForgetTicket(ticket))

    # -- parts ----------------------------------------------------------------------------------------------------

    def _set_length(self, slot: int, length: int, token_ids: np.ndarray) -> None:
        last = token_ids[max(0, length - self._lookback) : length] if self._lookback else ()
        self._edits.append(SetLength(slot, length, tuple(int(token) for token in last)))

    def _check_open(self, slot: int) -> None:
        if slot not in self._open:
            raise ValueError(f"slot {slot} is not open")

    def _check_free_slot(self) -> None:
        if not self._free_slots:
            raise CacheFullError(f"all {self.max_num_seqs} sequence slots are in use")

    def _take_slot(self) -> int:
        self._check_free_slot()
        slot = self._free_slots.pop()
        self._open.add(slot)
        self._published[slot] = 0
        self._eras[slot] = self._era
        return slot

    def _extend_table(self, slot: int, blocks: np.ndarray) -> None:
        first = self._num_blocks[slot]
        self._tables[slot, first : first + len(blocks)] = blocks
        self._set_num_blocks(slot, first + len(blocks))
        self._edits.append(SetTable(slot, first, tuple(blocks.tolist())))

    def _set_num_blocks(self, slot: int, count: int) -> None:
        self._num_blocks[slot] = count
        self.capacity[slot] = count * BLOCK_TOKENS

    def _publishes(self, slot: int) -> bool:
        return self._policy.enabled and self._eras[slot] == self._era

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free + used + cached = total for blocks, slots, windows and tickets, every count
        equals the tables, and every known hash continues the one before it."""
        if sorted([*self._free_slots, *self._open]) != list(range(self.max_num_seqs)):
            raise RuntimeError("a slot is lost, or free and open at once")
        width = np.arange(self.table_width)
        if ((self._tables != NULL_BLOCK) != (width < np.array(self._num_blocks)[:, None])).any():
            raise RuntimeError("a table names the null block, or a block behind its end")
        if (self.capacity != np.array(self._num_blocks) * BLOCK_TOKENS).any():
            raise RuntimeError("capacities differ from the tables")
        if any(self._num_blocks[slot] for slot in self._free_slots):
            raise RuntimeError("a free slot has blocks")
        tables = [self.table(slot) for slot in self.open_slots()]
        self._pool.check_integrity(np.concatenate([*tables, np.empty(0, np.int64)]))
        self._prefixes.check_integrity(tables)
        for slot in self._open:
            if not self._pool.hashed[self._tables[slot, : self._published[slot]]].all():
                raise RuntimeError(f"slot {slot}: {self._published[slot]} blocks published, but not all are known")
        self._offloaded.check_integrity()
