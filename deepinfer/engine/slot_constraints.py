"""The constraints of the slots that have one: moved on as tokens are kept, and asked before each forward pass what may
follow in its rows.

Masks are filled while the model computes. A constraint that fails (it says so, or it raises) costs its own sequence and
nothing else: its rows allow nothing, and the sequence ends with reason "error".
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter

import numpy as np

from deepinfer.speculation.constraint import Constraint, LoopFiller, MaskFiller, Masks

logger = logging.getLogger(__name__)


class _Entry:
    """One slot's constraint. ends: ids that end its sequence; `ended`: one was kept, what comes behind it is dropped by
    the host. None in place of the constraint: it failed."""

    __slots__ = ("constraint", "ended", "ends")

    def __init__(self, constraint: Constraint | None, ends: frozenset[int], ended: bool = False) -> None:
        self.constraint, self.ends, self.ended = constraint, ends, ended

    def accept(self, token_ids: list[int]) -> None:
        """Moves on, up to a token that ends the sequence: a step that was planned before it was known goes on."""
        if self.ended or self.constraint is None:
            return
        end = next((at for at, token in enumerate(token_ids) if token in self.ends), None)
        try:
            self.constraint.accept(token_ids[:end])
        except BaseException as error:
            self.fail(error)
        self.ended = end is not None  # whoever fails behind its end is not asked again

    def has_failed(self) -> bool:
        if self.constraint is not None and self.constraint.error is not None:
            self.fail(self.constraint.error)
        return self.constraint is None

    def fail(self, error: BaseException | str) -> None:
        """Also by what a matcher in another language throws, no Exception; an interrupt is nobody's failure."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        logger.warning("a sequence ends, its constraint failed: %s", error)
        self.constraint = None

    def copy(self) -> _Entry:
        entry = _Entry(None, self.ends, self.ended)
        try:
            entry.constraint = None if self.constraint is None else self.constraint.copy()
        except BaseException as error:
            entry.fail(error)
        return entry


class SlotConstraints:
    """vocab_size: of the model. filler: fills the masks of a step; None = one after the other, on the spot."""

    def __init__(self, vocab_size: int, filler: MaskFiller | None = None) -> None:
        self.words = (vocab_size + 31) // 32
        self._filler = filler or LoopFiller()
        self._entries: dict[int, _Entry] = {}

    def open(self, slot: int, constraint: Constraint, ends: Iterable[int]) -> None:
        """A sequence with a constraint takes the slot. ends: token ids that end it."""
        self._entries[slot] = _Entry(constraint, frozenset(ends))

    def close(self, slot: int) -> None:
        """The slot has no constraint any more. Idempotent."""
        self._entries.pop(slot, None)

    def copy(self, parent: int, child: int) -> None:
        """The child has its parent's constraint as it stands, or none."""
        self.close(child)
        if parent in self._entries:
            self._entries[child] = self._entries[parent].copy()

    def of(self, slot: int) -> Constraint | None:
        """None where it failed."""
        return self._entries[slot].constraint

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Tokens are kept in these slots, which have constraints; a slot's own stand together, in order."""
        for slot, run in groupby(zip(slots, token_ids, strict=True), key=itemgetter(0)):
            self._entries[slot].accept([token for _, token in run])

    def begin(self, slots: Sequence[int], paths: Sequence[list[int]]) -> StepMasks:
        """Starts to fill the rows of draws in these slots, which have constraints: behind each path [n] n + 1 rows. A
        slot that comes again (its completions draw from the same row) has the rows of its first time. Until the result
        is taken nothing else may be called."""
        return StepMasks([self._entries[slot] for slot in slots], paths, self.words, self._filler)


class StepMasks:
    """Rows that are on their way."""

    def __init__(
        self, entries: Sequence[_Entry], paths: Sequence[list[int]], words: int, filler: MaskFiller | LoopFiller
    ) -> None:
        self._entries, self._paths, self._words = entries, paths, words
        rows: list[tuple[Constraint, list[int]]] = []
        self._jobs: dict[_Entry, list[int]] = {}
        for entry, path in zip(entries, paths, strict=True):
            if not entry.ended and not entry.has_failed() and entry not in self._jobs:
                self._jobs[entry] = path
                assert entry.constraint is not None
                rows.append((entry.constraint, path))
        self._future: Future[Masks] = Future()
        if not self._jobs:
            self._future.set_result(np.empty((0, words), np.int32))
            return
        try:
            self._future = filler.begin(rows)
        except Exception as error:
            self._future.set_exception(error)

    def result(self) -> Masks:
        """int32 [rows, words]: of all draws, in order. Waits for what is not there yet."""
        filled = self._filled()
        rows, at = {}, 0
        for entry, path in self._jobs.items():
            rows[entry] = filled[at : at + len(path) + 1]
            at += len(path) + 1
            if entry.has_failed():  # while it was filled
                rows[entry][:] = 0
        if len(self._jobs) == len(self._entries):  # each its own, and none that failed before or has ended
            return filled
        parts = []
        for entry, path in zip(self._entries, self._paths, strict=True):
            word = -1 if entry.ended else 0
            parts.append(rows[entry] if entry in rows else np.full((len(path) + 1, self._words), word, np.int32))
        return np.concatenate(parts)

    def _filled(self) -> Masks:
        """The rows of the jobs. Where all at once went wrong, one by one, to find out whose fault it is."""
        if (error := self._future.exception()) is None:
            filled = self._future.result()
            return filled if filled.flags.writeable else filled.copy()  # torch takes no others
        logger.warning("the masks of a step could not be filled together: %r", error)
        parts = []
        for entry, path in self._jobs.items():
            try:
                assert entry.constraint is not None
                parts.append(entry.constraint.masks(path))
            except BaseException as error:
                entry.fail(error)
                parts.append(np.zeros((len(path) + 1, self._words), np.int32))
        return np.concatenate(parts)
