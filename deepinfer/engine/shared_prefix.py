"""Prefixes that a running prefill is computing right now: whoever needs one waits for it instead of computing it too.

Of 32 requests with a common prefix that arrive together the first computes it, and the others start when its blocks are
in the cache. The one that computes is asked to stop at the end of the common part, where it leaves its window for them,
so that they need no replay.
"""

from __future__ import annotations

from deepinfer.config import BLOCK_SIZE
from deepinfer.engine.sequence import Sequence


class SharedPrefixes:
    """Which sequence computes the block with which hash."""

    def __init__(self) -> None:
        self._owners: dict[bytes, Sequence] = {}
        self._announced: dict[Sequence, list[bytes]] = {}

    def announce(self, sequence: Sequence, first_block: int) -> None:
        """Its prefill computes the blocks of its chain from here on, those that nobody else has announced."""
        digests = [d for d in sequence.chain.hashes[first_block:] if d not in self._owners]
        self._owners.update(dict.fromkeys(digests, sequence))
        self._announced[sequence] = digests

    def withdraw(self, sequence: Sequence) -> None:
        """Its prefill is over, in whatever way. Does nothing if it had announced nothing."""
        for digest in self._announced.pop(sequence, ()):
            del self._owners[digest]

    def owner(self, sequence: Sequence, block: int) -> Sequence | None:
        """Who computes this block of the sequence's chain."""
        hashes = sequence.chain.hashes
        return self._owners.get(hashes[block]) if block < len(hashes) else None

    @staticmethod
    def common_tokens(one: Sequence, other: Sequence) -> int:
        """Tokens in the full blocks that both begin with: a hash covers all before it, so bisection finds the end."""
        low, high = 0, min(len(one.chain.hashes), len(other.chain.hashes))
        while low < high:
            middle = (low + high + 1) // 2
            if one.chain.hashes[middle - 1] == other.chain.hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK_SIZE

    def is_empty(self) -> bool:
        return not self._owners and not self._announced
