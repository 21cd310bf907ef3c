"""One step's tokens as a flat batch: rows of many sequences side by side, prefill chunks and decode rows alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence.

    slot: the sequence's slot in the cache. start: position of the first token, equal to the length written so far.
    num_logits: how many of the chunk's last rows need logits (0 for a prefill chunk that is not the last).
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int = 1


@dataclass(frozen=True)
class Batch:
    """The rows of a step, int64 tensors of length N unless said otherwise. Row order: chunk by chunk, by position."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    chunk_of: Tensor  # which chunk a row belongs to
    first_rows: Tensor  # [chunks] row of each chunk's first token
    starts: Tensor  # [chunks] position of each chunk's first token
    lengths: Tensor  # [chunks]
    chunk_slots: Tensor  # [chunks]
    logit_rows: Tensor  # rows that need logits, in order

    @cached_property
    def row_starts(self) -> Tensor:
        """Position of the first token of each row's chunk, [N]."""
        return self.starts[self.chunk_of]

    @cached_property
    def last_rows(self) -> Tensor:
        """Row of each chunk's last token, [chunks]."""
        return self.first_rows + self.lengths - 1

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk], device: torch.device) -> Batch:
        """Raises ValueError for an empty step, an empty chunk, a slot named twice or more logits than rows."""
        if not chunks:
            raise ValueError("a step needs at least one chunk")
        if len({chunk.slot for chunk in chunks}) != len(chunks):
            raise ValueError("a step holds at most one chunk of a slot")
        for chunk in chunks:
            if not 0 <= chunk.num_logits <= len(chunk.token_ids) or not chunk.token_ids:
                raise ValueError(
                    f"chunk of slot {chunk.slot}: {len(chunk.token_ids)} tokens, {chunk.num_logits} logits"
                )
        lengths = torch.tensor([len(chunk.token_ids) for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        slots = torch.tensor([chunk.slot for chunk in chunks])
        ends = lengths.cumsum(0)
        first_rows = ends - lengths
        chunk_of = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
        rows = torch.arange(int(ends[-1]))
        wanted = torch.tensor([chunk.num_logits for chunk in chunks])
        fields = cls(
            token_ids=torch.tensor([token for chunk in chunks for token in chunk.token_ids]),
            positions=rows - (first_rows - starts)[chunk_of],
            slots=slots[chunk_of],
            chunk_of=chunk_of,
            first_rows=first_rows,
            starts=starts,
            lengths=lengths,
            chunk_slots=slots,
            logit_rows=rows[rows >= (ends - wanted)[chunk_of]],
        )
        if device.type == "cpu":
            return fields
        return cls(**{name: getattr(fields, name).to(device) for name in cls.__dataclass_fields__})
