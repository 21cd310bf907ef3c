"""Contents that later prompts may hit: which blocks and windows hold them, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from deepinfer.cache.blocks import BLOCK_TOKENS, BlockPool
from deepinfer.cache.events import DEVICE, REMOVED, STORED, WINDOW, CacheEvent
from deepinfer.cache.hashing import HashChain
from deepinfer.cache.prefix import PrefixHit, PrefixIndex, ReplayPolicy
from deepinfer.cache.windows import WindowIndex


@dataclass(slots=True)
class CacheStats:
    """Counters since the start. Tokens unless a name says otherwise."""

    queries: int = 0  # sequences that asked for a prefix
    query_tokens: int = 0
    hit_tokens: int = 0  # not computed
    replay_tokens: int = 0  # computed again for their windows
    window_hits: int = 0  # sequences that continued from a stored window
    window_replays: int = 0  # sequences that had to replay
    windows_saved: int = 0
    windows_evicted: int = 0
    blocks_published: int = 0
    blocks_evicted: int = 0
    offloads: int = 0
    restores: int = 0


class PrefixCache:
    """Knows contents and blocks, no slots. The pool says which blocks are in use, and evicts.

    on_event: told what is stored and lost, so that whoever listens knows exactly what is here.
    """

    def __init__(
        self,
        policy: ReplayPolicy,
        pool: BlockPool,
        window_entries: int,
        stats: CacheStats,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        self.policy = policy
        self.windows = WindowIndex(window_entries)
        self._index = PrefixIndex()
        self._pool = pool
        pool.on_evict = self._evicted
        self._stats = stats
        self._on_event = on_event

    def find(self, chain: HashChain, known: int) -> PrefixHit:
        """What a sequence of `known` tokens need not compute."""
        blocks = self._index.longest(chain.hashes, self.policy.most_blocks(known), self._pool.references)
        return self.policy.choose(blocks, chain.hashes, self.windows.find)

    def cached_tokens(self, chain: HashChain, known: int) -> int:
        """How long a hit of a sequence of `known` tokens would be if every window were there."""
        blocks = self._index.longest(chain.hashes, self.policy.most_blocks(known), self._pool.references)
        return len(blocks) * BLOCK_TOKENS

    def store(self, blocks: np.ndarray, chain: HashChain, first: int) -> None:
        """`blocks` int64 [n], in use, hold blocks first .. first + n - 1 of the chain."""
        digests = chain.hashes[first : first + len(blocks)]
        parents = [chain.digest(first * BLOCK_TOKENS), *digests[:-1]]
        before = self._index.num_blocks
        new = [
            self._index.add(block, digest, parent)
            for block, digest, parent in zip(blocks.tolist(), digests, parents, strict=True)
        ]
        self._pool.keep(blocks)
        self._stats.blocks_published += self._index.num_blocks - before
        self._tell_stored(digests, parents, new)

    def store_window(self, digest: bytes) -> int | None:
        """The entry that the window of this hash has to be copied to; None if it is there already, or none is kept."""
        known = self.windows.find(digest)
        if known is not None:
            self.windows.use(known)
        if known is not None or not self.windows.num_entries:
            return None
        entry, evicted = self.windows.add(digest)
        self._stats.windows_saved += 1
        if evicted is not None:
            self._stats.windows_evicted += 1
            self._tell(REMOVED, (evicted,), None, WINDOW)
        self._tell(STORED, (digest,), None, WINDOW)
        return entry

    def clear(self) -> None:
        """Forget all contents."""
        blocks = self._index.blocks()
        self._pool.forget(blocks)
        self._lose(blocks)
        windows = self.windows.clear()
        if windows:
            self._tell(REMOVED, tuple(windows), None, WINDOW)

    def _evicted(self, blocks: np.ndarray) -> None:
        self._stats.blocks_evicted += len(blocks)
        self._lose(blocks)

    def _lose(self, blocks: np.ndarray) -> None:
        lost = self._index.remove(blocks.tolist())
        if lost:
            self._tell(REMOVED, lost, None, DEVICE)

    def _tell(self, kind: str, hashes: tuple[bytes, ...], parent: bytes | None, tier: str) -> None:
        if self._on_event is not None:
            self._on_event(CacheEvent(kind, hashes, parent, tier))

    def _tell_stored(self, digests: list[bytes], parents: list[bytes], new: list[bool]) -> None:
        """One event per run of new contents that follow each other."""
        if self._on_event is None:
            return
        start = 0
        while start < len(new):
            end = start
            while end < len(new) and new[end]:
                end += 1
            if end > start:
                self._tell(STORED, tuple(digests[start:end]), parents[start], DEVICE)
            start = end + 1

    def check_integrity(self, tables: Iterable[np.ndarray]) -> None:
        """Raises RuntimeError unless every known hash continues the one before it in every table, and the pool's marks
        are the index's."""
        self._index.check_integrity(self._pool.hashed, tables)
        self.windows.check_integrity()
