"""One step's tokens as a flat batch: rows of many sequences side by side, prefill chunks and decode rows alike.

What the host decides about a chunk stays on the host, as numpy arrays: a step is planned there without waiting for the
device. Token values may live on the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence.

    slot: the sequence's slot in the cache. start: position of the first token, equal to the length written so far.
    num_logits: how many of the chunk's last rows need logits (0 for a prefill chunk that is not the last).
    window_floor: no window shows a position below it (start of a replay). write_from: entries of positions below it are
    in the cache already and are not written again. keep_from: layers after the last KV source run on the positions from
    here on, and their windows show nothing below it. 0 = no bound, in all three.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int = 1
    window_floor: int = 0
    write_from: int = 0
    keep_from: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of a step: chunk by chunk, by position. Arrays of chunks are numpy int64 [chunks], on the host."""

    token_ids: Tensor  # int64 [N], on the device
    chunk_slots: np.ndarray
    starts: np.ndarray  # position of each chunk's first token
    lengths: np.ndarray
    num_logits: np.ndarray  # how many of the last rows give logits
    window_floors: np.ndarray  # as in Chunk, from here on
    write_from: np.ndarray
    keep_from: np.ndarray

    @classmethod
    def from_arrays(
        cls,
        *,
        slots: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        num_logits: np.ndarray,
        token_ids: Tensor | np.ndarray,
        window_floors: np.ndarray | None = None,
        write_from: np.ndarray | None = None,
        keep_from: np.ndarray | None = None,
        device: torch.device,
    ) -> Batch:
        """Chunks as arrays: whole numbers [chunks], token_ids int64 [sum of lengths]. The arrays are kept, not copied.

        Raises ValueError for an empty step, an empty chunk, a slot named twice, more logits than rows, logits wanted of
        a row below keep_from, or another number of tokens than the chunks have.
        """
        slots, starts, lengths, num_logits = (np.asarray(a, np.int64) for a in (slots, starts, lengths, num_logits))
        none = np.zeros_like(starts)
        window_floors, write_from, keep_from = (
            none if bound is None else np.asarray(bound, np.int64) for bound in (window_floors, write_from, keep_from)
        )
        _check_chunks(slots, starts, lengths, num_logits, keep_from)
        tokens = token_ids if isinstance(token_ids, Tensor) else torch.from_numpy(np.asarray(token_ids, np.int64))
        if tokens.numel() != int(lengths.sum()):
            raise ValueError(f"the chunks have {int(lengths.sum())} tokens, {tokens.numel()} are given")
        return cls(
            token_ids=tokens.to(device),
            chunk_slots=slots,
            starts=starts,
            lengths=lengths,
            num_logits=num_logits,
            window_floors=window_floors,
            write_from=write_from,
            keep_from=keep_from,
        )

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk], device: torch.device) -> Batch:
        """Errors as `from_arrays`."""

        def column(name: str) -> np.ndarray:
            return np.array([getattr(chunk, name) for chunk in chunks], dtype=np.int64)

        return cls.from_arrays(
            slots=column("slot"),
            starts=column("start"),
            lengths=np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64),
            num_logits=column("num_logits"),
            token_ids=np.array([token for chunk in chunks for token in chunk.token_ids], dtype=np.int64),
            window_floors=column("window_floor"),
            write_from=column("write_from"),
            keep_from=column("keep_from"),
            device=device,
        )

    # -- chunks, numpy [chunks] ------------------------------------------------------------------------------------

    @cached_property
    def ends(self) -> np.ndarray:
        """Position after each chunk's last token."""
        return self.starts + self.lengths

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Row of each chunk's first token."""
        return self.lengths.cumsum() - self.lengths

    # -- rows, numpy [N] -------------------------------------------------------------------------------------------

    @cached_property
    def num_rows(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def single(self) -> bool:
        """Whether every chunk is one row, as while all sequences decode."""
        return self.num_rows == len(self.lengths)

    def per_row(self, values: np.ndarray) -> np.ndarray:
        """One value per chunk [chunks] -> one per row [N]."""
        return values if self.single else np.repeat(values, self.lengths)

    @cached_property
    def row_positions(self) -> np.ndarray:
        if self.single:
            return self.starts
        return np.arange(self.num_rows) + self.per_row(self.starts - self.first_rows)

    # -- rows, int64 tensors [N] on the device ---------------------------------------------------------------------

    @cached_property
    def positions(self) -> Tensor:
        return self.to_device(self.row_positions)

    @cached_property
    def slots(self) -> Tensor:
        return self.to_device(self.per_row(self.chunk_slots))

    @cached_property
    def row_starts(self) -> Tensor:
        """Position of the first token of each row's chunk."""
        return self.to_device(self.per_row(self.starts))

    @cached_property
    def logit_rows(self) -> Tensor:
        """Rows that need logits, in order."""
        first = self.per_row(self.ends - self.num_logits)
        return self.to_device(np.flatnonzero(self.row_positions >= first))

    def to_device(self, array: np.ndarray) -> Tensor:
        """A numpy array as a tensor beside the token ids (the same memory on a CPU)."""
        return torch.from_numpy(array).to(self.token_ids.device)

    # -- what goes past the last KV source -------------------------------------------------------------------------

    def narrowed(self) -> tuple[np.ndarray, Batch]:
        """Rows at or above their chunk's keep_from (int64 [M]), and the batch that they make: chunks that lost their
        head start later, chunks that lost all are gone (a batch without rows is possible), no window shows a position
        below keep_from."""
        starts = np.maximum(self.starts, self.keep_from)
        lengths = np.maximum(self.ends - starts, 0)
        rows = np.flatnonzero(self.row_positions >= self.per_row(self.keep_from))
        left = lengths > 0
        batch = Batch(
            token_ids=self.token_ids[self.to_device(rows)],
            chunk_slots=self.chunk_slots[left],
            starts=starts[left],
            lengths=lengths[left],
            num_logits=self.num_logits[left],
            window_floors=np.maximum(self.window_floors, self.keep_from)[left],
            write_from=self.write_from[left],
            keep_from=np.zeros_like(starts)[left],
        )
        return rows, batch


def _check_chunks(
    slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, num_logits: np.ndarray, keep_from: np.ndarray
) -> None:
    if not len(slots):
        raise ValueError("a step needs at least one chunk")
    if len(slots) > 1 and int(np.bincount(np.maximum(slots, 0)).max()) > 1:
        raise ValueError("a step holds at most one chunk of a slot")
    wrong = (lengths < 1) | (num_logits < 0) | (num_logits > lengths)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"chunk of slot {slots[i]}: {lengths[i]} tokens, {num_logits[i]} logits")
    if not keep_from.any():
        return
    dropped = (num_logits > 0) & (starts + lengths - num_logits < keep_from)
    if dropped.any():
        i = int(dropped.argmax())
        first = starts[i] + lengths[i] - num_logits[i]
        raise ValueError(
            f"chunk of slot {slots[i]}: logits are wanted from position {first} on, and the last layers run from "
            f"keep_from = {keep_from[i]} on only"
        )
