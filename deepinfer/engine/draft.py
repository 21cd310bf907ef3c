"""A step plan in the making: the scheduler adds chunks, and takes the finished arrays."""

from __future__ import annotations

import numpy as np

from deepinfer.cache.edits import Edit
from deepinfer.engine.plan import Admission, Fork, PromptScore, StepPlan
from deepinfer.engine.table import SequenceTable

_COLUMNS = ("slots", "starts", "lengths", "num_logits", "window_floors", "write_from", "keep_from")


class StepDraft:
    """budget: tokens that may still be added."""

    def __init__(self, table: SequenceTable, budget: int) -> None:
        self.budget = budget
        self.admissions: list[Admission] = []
        self.num_decodes = 0
        self.replay_tokens = 0
        self._table = table
        self._decode_slots = np.empty(0, np.int64)
        self._decode_starts = np.empty(0, np.int64)
        self._prefills: list[tuple[int, ...]] = []  # columns as above
        self._num_logits = 0  # of all prefill chunks so far
        self._draws: list[tuple[int, int]] = []  # of prefills and forks: slot, row of logits
        self._forks: list[Fork] = []
        self._scores: list[PromptScore] = []

    @property
    def is_empty(self) -> bool:
        return not self.num_decodes and not self._prefills

    @property
    def num_prefill_tokens(self) -> int:
        return sum(columns[2] for columns in self._prefills)

    def decode(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """One token each, the one at `starts`; each draws its next. Called once, before any prefill."""
        assert not self._prefills
        self._decode_slots, self._decode_starts = slots, starts
        self.num_decodes = len(slots)
        self.budget -= len(slots)

    def prefill(
        self, slot: int, start: int, length: int, num_logits: int, *, window_floor: int, write_from: int, keep_from: int
    ) -> int:
        """A chunk -> the row of its first logits, after those of the decodes."""
        first = self._num_logits
        self._prefills.append((slot, start, length, num_logits, window_floor, write_from, keep_from))
        self._num_logits += num_logits
        self.budget -= length
        self.replay_tokens += max(0, min(start + length, write_from) - start)
        return first

    def draw(self, slot: int, row: int) -> None:
        """The slot's next token comes from this row of logits."""
        self._draws.append((slot, row))

    def fork(self, fork: Fork, row: int) -> None:
        self._forks.append(fork)
        self.draw(fork.child, row)

    def score(self, score: PromptScore) -> None:
        self._scores.append(score)

    def plan(self, number: int, edits: list[Edit]) -> StepPlan:
        decodes = self.num_decodes
        prefills = np.array(self._prefills, np.int64).reshape(-1, len(_COLUMNS))
        chunks = np.empty((len(_COLUMNS), decodes + len(prefills)), np.int64)
        chunks[:, decodes:] = prefills.T
        chunks[0, :decodes], chunks[1, :decodes] = self._decode_slots, self._decode_starts
        chunks[2:4, :decodes], chunks[4:, :decodes] = 1, 0  # one token, one row of logits, no bounds
        draws = np.array(self._draws, np.int64).reshape(-1, 2)
        draw_slots = np.concatenate((self._decode_slots, draws[:, 0]))
        return StepPlan(
            number=number,
            edits=edits,
            admissions=self.admissions,
            **dict(zip(_COLUMNS, chunks, strict=True)),
            draw_slots=draw_slots,
            draw_rows=np.concatenate((np.zeros(decodes, np.int64), draws[:, 1])),
            draw_epochs=self._table.epoch[draw_slots],
            chunk_epochs=self._table.epoch[chunks[0]],
            forks=self._forks,
            scores=self._scores,
            num_decodes=decodes,
            num_replayed=self.replay_tokens,
        )
