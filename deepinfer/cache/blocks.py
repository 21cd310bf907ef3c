"""Block ids: a free list with reference counts. One id stands for 128 tokens of every KV source at once."""

from __future__ import annotations

BLOCK_TOKENS = 128  # the unit of allocation and, later, of prefix hits; even, so a ratio-2 pair never straddles blocks
NULL_BLOCK = 0  # what an unset table entry points to: never handed out, never read as data


class CacheFullError(RuntimeError):
    """No free block or slot. The caller waits, preempts or refuses; nothing was changed."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold positions 0 .. num_tokens - 1."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """Hands out ids 1 .. num_blocks. A block is free, or used by as many owners as its count says."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, NULL_BLOCK, -1))  # popped from the end: low ids first
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` fresh blocks with one reference each, or CacheFullError and no change."""
        if count > len(self._free):
            raise CacheFullError(f"{count} cache blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more owner for each block."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner fewer for each block, last block first, so that the head of a sequence is reused last."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raises RuntimeError unless free + used = total and every count equals the tables that name the block."""
        counted = [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                counted[block] += 1
        if counted != self._references:
            wrong = [b for b in range(self.num_blocks + 1) if counted[b] != self._references[b]]
            raise RuntimeError(f"reference counts differ from the block tables for blocks {wrong[:8]}")
        free = set(self._free)
        used = {block for block in range(1, self.num_blocks + 1) if counted[block]}
        if len(free) != len(self._free) or free & used or len(free) + len(used) != self.num_blocks:
            raise RuntimeError(f"{len(self._free)} free + {len(used)} used blocks are not {self.num_blocks} in all")
