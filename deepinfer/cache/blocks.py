"""Block ids: who uses which, and which unused ones still hold something worth keeping.

One id stands for 128 tokens of every KV source at once. A block is in one of three states:

    used    at least one sequence's table names it
    cached  nobody uses it, but the prefix index knows its content: evicted for room, least recently used first
    free    nobody uses it and its content means nothing

Everything is done with whole arrays of ids, because a sequence of a million tokens has 8,192 of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np

from deepinfer.config import BLOCK_SIZE, blocks_for

BLOCK_TOKENS = BLOCK_SIZE  # the unit of allocation and of prefix hits; even, so a ratio-2 pair never straddles blocks
NULL_BLOCK = 0  # what an unset table entry points to: never handed out, never read as data

__all__ = ["BLOCK_TOKENS", "NULL_BLOCK", "BlockPool", "CacheFullError", "blocks_for", "live_caches"]


class _Checkable(Protocol):
    def check_integrity(self) -> None: ...


live_caches: weakref.WeakSet[_Checkable] = weakref.WeakSet()  # for integrity checks after a test


class CacheFullError(RuntimeError):
    """No free block, slot or entry. The caller waits, preempts or refuses; nothing was changed."""


class EvictionQueue:
    """Block ids in the order in which they were last used, with removal from the middle.

    A block's place is its index in `_queue`; an entry whose block has another place by now is stale and skipped. The
    queue is compacted when its end is reached, so an append costs O(1) per block over time.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.zeros(2 * num_blocks, np.int64)
        self._place = np.full(num_blocks + 1, -1, np.int64)  # -1 = not in the queue
        self._head = 0  # entries before it are stale
        self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, blocks: np.ndarray) -> None:
        """These become the last to be evicted, in this order. None of them is in the queue."""
        if self._tail + len(blocks) > len(self._queue):
            self._compact()
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end)
        self._tail = end
        self._count += len(blocks)

    def remove(self, blocks: np.ndarray) -> None:
        """Somebody uses these again. All of them are in the queue."""
        self._place[blocks] = -1
        self._count -= len(blocks)

    def pop(self, count: int) -> np.ndarray:
        """The `count` blocks that were used longest ago, which must be there: int64 [count]."""
        parts, missing = [], count
        while missing:
            end = min(self._tail, self._head + max(missing, 64))  # 64: a small pop need not look at every stale entry
            span = self._queue[self._head : end]
            live = (self._place[span] == np.arange(self._head, end)).nonzero()[0][:missing]
            self._head = self._head + int(live[-1]) + 1 if len(live) == missing else end
            parts.append(span[live])
            missing -= len(live)
        popped = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)
        self.remove(popped)
        return popped

    def blocks(self) -> np.ndarray:
        """All of them, the next to be evicted first."""
        span = self._queue[self._head : self._tail]
        return span[self._place[span] == np.arange(self._head, self._tail)]

    def _compact(self) -> None:
        live = self.blocks()
        self._head, self._tail = 0, len(live)
        self._queue[: self._tail] = live
        self._place[live] = np.arange(self._tail)


class BlockPool:
    """Hands out ids 1 .. num_blocks, the lowest free ones first, then those of evicted blocks.

    on_evict: if set, told the ids (int64 [n]) whose content is lost, before they are handed out.
    Arguments named `blocks` are int64 [n] without repetition.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = np.zeros(num_blocks + 1, np.int32)
        self.hashed = np.zeros(num_blocks + 1, bool)  # the prefix index knows the content
        self._free = np.arange(num_blocks, NULL_BLOCK, -1, dtype=np.int64)  # a stack, its top at _num_free - 1
        self._num_free = num_blocks
        self._cached = EvictionQueue(num_blocks)
        self.on_evict: Callable[[np.ndarray], None] | None = None

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses but that a prefix hit may still adopt."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """What `take` can give."""
        return self._num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def eviction_order(self) -> np.ndarray:
        """The cached blocks, the next to be evicted first: int64 [num_cached]."""
        return self._cached.blocks()

    def take(self, count: int) -> np.ndarray:
        """`count` blocks with one reference each, int64 [count]; or CacheFullError and no change."""
        if count > self.num_available:
            raise CacheFullError(
                f"{count} cache blocks wanted, {self.num_available} of {self.num_blocks} are free or evictable"
            )
        from_free = min(count, self._num_free)
        blocks = self._free[self._num_free - from_free : self._num_free][::-1].copy()
        self._num_free -= from_free
        if count > from_free:
            evicted = self._cached.pop(count - from_free)
            self.hashed[evicted] = False
            if self.on_evict is not None:
                self.on_evict(evicted)
            blocks = np.concatenate((blocks, evicted))
        self.references[blocks] = 1
        return blocks

    def share(self, blocks: np.ndarray) -> None:
        """One more owner for each: a used block, or a cached one, which cannot be evicted from here on."""
        unused = blocks[self.references[blocks] == 0]
        if len(unused):
            lost = unused[~self.hashed[unused]]
            if len(lost):
                raise ValueError(f"block {lost[0]} is free and cannot be shared")
            self._cached.remove(unused)
        self.references[blocks] += 1

    def release(self, blocks: np.ndarray) -> None:
        """One owner fewer for each, last block first, so that the tail of a sequence is evicted before its head."""
        left = self.references[blocks] - 1
        if len(left) and left.min() < 0:
            raise ValueError(f"block {blocks[left < 0][0]} is free already")
        self.references[blocks] = left
        unused = blocks[left == 0][::-1]
        hashed = self.hashed[unused]
        if hashed.any():
            self._cached.append(unused[hashed])
            unused = unused[~hashed]
        self._push(unused)

    def keep(self, blocks: np.ndarray) -> None:
        """The prefix index knows these used blocks: when their last owner goes they are cached and not free."""
        if len(blocks) and self.references[blocks].min() < 1:
            raise ValueError("a block that nobody uses has no content to keep")
        self.hashed[blocks] = True

    def forget(self, blocks: np.ndarray) -> None:
        """The prefix index knows these no more: the cached ones among them are free."""
        self.hashed[blocks] = False
        unused = blocks[self.references[blocks] == 0]
        self._cached.remove(unused)
        self._push(unused)

    def _push(self, blocks: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)

    def check_integrity(self, owners: np.ndarray) -> None:
        """Raises RuntimeError unless free + used + cached = total and the counts equal the tables.

        owners: the tables of all open sequences, one after the other.
        """
        counted = np.bincount(owners, minlength=self.num_blocks + 1)
        if len(counted) > self.num_blocks + 1 or (counted != self.references).any() or counted[NULL_BLOCK]:
            wrong = (counted[: self.num_blocks + 1] != self.references).nonzero()[0]
            raise RuntimeError(f"reference counts differ from the block tables for blocks {wrong[:8].tolist()}")
        free, cached = self._free[: self._num_free], self._cached.blocks()
        if len(cached) != len(self._cached):
            raise RuntimeError(f"{len(self._cached)} blocks counted as cached, {len(cached)} are in the queue")
        expected = np.where(counted > 0, 0, np.where(self.hashed, 2, 1))  # 0 used, 1 free, 2 cached
        state = np.zeros(self.num_blocks + 1, np.int64)
        np.add.at(state, free, 1)
        np.add.at(state, cached, 2)
        if (state != expected)[1:].any() or state[NULL_BLOCK] or self.hashed[NULL_BLOCK]:
            wrong = (state != expected)[1:].nonzero()[0] + 1
            raise RuntimeError(
                f"{len(free)} free + {self.num_used} used + {len(cached)} cached blocks are not {self.num_blocks} "
                f"different ones; look at blocks {wrong[:8].tolist()}"
            )
