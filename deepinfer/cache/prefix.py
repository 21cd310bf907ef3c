"""Content -> block: the index of the prefix cache, and the choice of where a hit starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from deepinfer.cache.blocks import BLOCK_TOKENS
from deepinfer.config import PREFIX_MODES, VERIFY_ROWS


class PrefixHit(NamedTuple):
    """What a new sequence need not compute. Tokens from `replay_start` on are computed; those before `length` only to
    rebuild the window, without being written (spec/engine.md 3.2)."""

    length: int  # tokens whose blocks are in the cache, a multiple of 128; 0 = cold
    replay_start: int  # cached tokens as reported; equal to length when a window is loaded
    window_entry: int | None
    blocks: tuple[int, ...]  # of positions below length; still the cache's until `adopt`

    @property
    def replay_tokens(self) -> int:
        return self.length - self.replay_start


COLD = PrefixHit(0, 0, None, ())


class ReplayPolicy:
    """How many tokens before a hit's end are computed again when no window is stored there.

    bounded: one window; the first rows of the replay see too few keys, an approximation. exact: the dependency cone of
    num_layers stacked windows, num_layers x (window - 1) tokens: layer l's window rows are right from the replay's
    start + l x (window - 1) on, so those of every layer are at its end. Both are even, because a ratio-2 pair must not
    be cut. cap: a hit ends at least window + 6 tokens below the known length: so many rows are left that the window is
    full of the sequence's own when decoding starts, and one verify step (6 rows) can be rolled back.
    """

    def __init__(self, mode: str, window: int, num_layers: int) -> None:
        if mode not in PREFIX_MODES:
            raise ValueError(f"prefix_caching: {mode!r} is not one of {', '.join(PREFIX_MODES)}")
        self.enabled = mode != "off"
        replay = window if mode == "bounded" else num_layers * (window - 1)
        self.replay_tokens = replay + replay % 2
        self.margin = window + VERIFY_ROWS

    def most_blocks(self, known: int) -> int:
        """Full blocks that a sequence of so many known tokens may adopt."""
        return max(0, known - self.margin) // BLOCK_TOKENS if self.enabled else 0

    def choose(self, blocks: list[int], hashes: Sequence[bytes], window_of: Callable[[bytes], int | None]) -> PrefixHit:
        """blocks: the cached ones of the longest known prefix, [n]; hashes: of at least these. What has to be computed
        least: from the highest stored window on, or from the replay of the whole prefix."""
        length = len(blocks) * BLOCK_TOKENS
        replay_start = max(0, length - self.replay_tokens)
        lowest = max(1, -(-replay_start // BLOCK_TOKENS))  # blocks: a window below it would save less than the replay
        for count in range(len(blocks), lowest - 1, -1):
            entry = window_of(hashes[count - 1])
            if entry is not None:
                return PrefixHit(count * BLOCK_TOKENS, count * BLOCK_TOKENS, entry, tuple(blocks[:count]))
        return PrefixHit(length, replay_start, None, tuple(blocks)) if replay_start else COLD


class PrefixIndex:
    """Hash -> the blocks with that content. Two sequences may have computed the same; both blocks are kept, because
    the tables that name them must not change (spec/engine.md 2.3.6)."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # the other blocks with the same content
        self._digest_of: dict[int, bytes] = {}
        self._parent_of: dict[int, bytes] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks with known content, equal ones too."""
        return len(self._digest_of)

    def blocks(self) -> np.ndarray:
        """All blocks with known content, int64 [n]."""
        return np.fromiter(self._digest_of, np.int64, len(self._digest_of))

    def longest(self, hashes: Sequence[bytes], limit: int, references: np.ndarray) -> list[int]:
        """Blocks of the longest prefix of hashes[:limit] without a gap. Of equal ones those that somebody uses, so that
        the others can be evicted. references: int [num_blocks + 1]."""
        found: list[int] = []
        get = self._block_of.get
        for digest in hashes[:limit]:
            block = get(digest)
            if block is None:
                break
            found.append(block)
        if self._twins:
            for i, block in enumerate(found):
                if not references[block] and hashes[i] in self._twins:
                    found[i] = next((twin for twin in self._twins[hashes[i]] if references[twin]), block)
        return found

    def add(self, block: int, digest: bytes, parent: bytes) -> bool:
        """-> whether the content is new. Adding the same again changes nothing; RuntimeError for another content."""
        known = self._digest_of.get(block)
        if known is not None:
            if known != digest:
                raise RuntimeError(f"block {block} already stands for other tokens")
            return False
        self._digest_of[block] = digest
        self._parent_of[block] = parent
        if self._block_of.setdefault(digest, block) == block:
            return True
        self._twins.setdefault(digest, []).append(block)
        return False

    def remove(self, blocks: Iterable[int]) -> tuple[bytes, ...]:
        """Their content is lost -> the hashes that no other block stands for."""
        lost = []
        for block in blocks:
            digest = self._digest_of.pop(block)
            del self._parent_of[block]
            twins = self._twins.get(digest)
            if twins is None:
                del self._block_of[digest]
                lost.append(digest)
                continue
            if self._block_of[digest] == block:
                self._block_of[digest] = twins.pop(0)
            else:
                twins.remove(block)
            if not twins:
                del self._twins[digest]
        return tuple(lost)

    def check_integrity(self, hashed: np.ndarray, tables: Iterable[np.ndarray]) -> None:
        """Raises RuntimeError unless hashes and blocks agree in both directions, `hashed` (bool [num_blocks + 1]) marks
        exactly the blocks here, and in every table the known blocks come first and continue each other's chain."""
        listed = [(digest, block) for digest, block in self._block_of.items()]
        listed += [(digest, twin) for digest, twins in self._twins.items() for twin in twins]
        if len(listed) != len(self._digest_of) or any(self._digest_of.get(b) != digest for digest, b in listed):
            raise RuntimeError("hashes and blocks of the prefix index disagree")
        if not all(self._twins.values()) or not self._twins.keys() <= self._block_of.keys():
            raise RuntimeError("the prefix index lists twins of a block that is not there")
        if self._parent_of.keys() != self._digest_of.keys():
            raise RuntimeError("a block of the prefix index has no parent")
        if not np.array_equal(hashed.nonzero()[0], np.sort(self.blocks())):
            raise RuntimeError("blocks marked as hashed are not those of the prefix index")
        for table in tables:
            known = hashed[table]
            count = int(known.sum())
            if not known[:count].all():
                raise RuntimeError(f"a table has a known block behind an unknown one: {table.tolist()[:8]} ...")
            chain = table[:count].tolist()
            for before, block in pairwise(chain):
                if self._parent_of[block] != self._digest_of[before]:
                    raise RuntimeError(f"block {block} follows block {before}, but its hash does not")
