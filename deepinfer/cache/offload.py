"""Preempted sequences in host memory: a ticket each, and a bounded number of blocks for all of them."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.cache.blocks import blocks_for


class Offloaded(NamedTuple):
    """A sequence as it was when it left the device."""

    length: int  # tokens whose state was written
    era: int  # of the prefix cache, see CacheManager.clear_prefix_cache


class OffloadStore:
    """Who is there. The bytes lie on the device's side, which carries out the edits Offload, Restore, ForgetTicket."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"offload_blocks must not be negative, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_used = 0
        self._sequences: dict[int, Offloaded] = {}
        self._next = 0  # tickets are never used twice, so a late Restore cannot get another sequence's state

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Offloaded) -> int | None:
        """A ticket, or None where the sequence does not fit."""
        blocks = blocks_for(sequence.length)
        if self.num_used + blocks > self.num_blocks:
            return None
        self.num_used += blocks
        ticket = self._next
        self._next += 1
        self._sequences[ticket] = sequence
        return ticket

    def get(self, ticket: int) -> Offloaded:
        """ValueError for a ticket that is gone."""
        if ticket not in self._sequences:
            raise ValueError(f"ticket {ticket} is not in use")
        return self._sequences[ticket]

    def remove(self, ticket: int) -> Offloaded:
        """Its blocks are free for others. ValueError for a ticket that is gone."""
        sequence = self.get(ticket)
        del self._sequences[ticket]
        self.num_used -= blocks_for(sequence.length)
        return sequence

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the used blocks are those of the tickets and fit."""
        held = sum(blocks_for(sequence.length) for sequence in self._sequences.values())
        if held != self.num_used or held > self.num_blocks:
            raise RuntimeError(f"{self.num_used} offloaded blocks counted, {held} held, {self.num_blocks} allowed")
