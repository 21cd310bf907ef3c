"""A step plan in the making: the scheduler adds chunks, and takes the finished arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.cache.edits import Edit
from deepinfer.engine.plan import Admission, Fork, PromptScore, StepPlan
from deepinfer.engine.table import SequenceTable

_COLUMNS = ("slots", "starts", "lengths", "num_logits", "window_floors", "write_from", "keep_from")


class PlanBuilder:
    """budget: tokens that may still be added."""

    def __init__(self, table: SequenceTable, budget: int) -> None:
        self.budget = budget
        self.admissions: list[Admission] = []
        self.replay_tokens = 0
        self.decode_slots = np.empty(0, np.int64)
        self._table = table
        self._decode_starts = np.empty(0, np.int64)
        self._draft_caps: np.ndarray | None = None
        self._draft_budget: int | None = None
        self._propose = False
        self._prefills: list[tuple[int, ...]] = []  # columns as above
        self._num_logits = 0  # of all prefill chunks so far
        self._draws: list[tuple[int, int]] = []  # of prefills and forks: slot, row of logits
        self._forks: list[Fork] = []
        self._scores: list[PromptScore] = []

    @property
    def num_decodes(self) -> int:
        return len(self.decode_slots)

    @property
    def is_empty(self) -> bool:
        return not self.num_decodes and not self._prefills

    @property
    def num_prefill_tokens(self) -> int:
        return sum(columns[2] for columns in self._prefills)

    @property
    def num_other_draws(self) -> int:
        """Draws that are not decodes."""
        return len(self._draws)

    def decode(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """One token each, the one at `starts` (or before it, where drafts in flight may be rejected); each draws its
        next. Called once, before any prefill."""
        assert not self._prefills
        self.decode_slots, self._decode_starts = slots, starts
        self.budget -= len(slots)

    def draft(self, caps: np.ndarray, budget: int | None, propose: bool) -> None:
        """The decodes verify up to `caps` drafts each, `budget` of them in all; propose: draft for the next step.
        Called after everything else: what the budget of tokens holds of it was set aside."""
        self._draft_caps, self._draft_budget, self._propose = caps, budget, propose

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
        chunks[0, :decodes], chunks[1, :decodes] = self.decode_slots, self._decode_starts
        chunks[2:4, :decodes], chunks[4:, :decodes] = 1, 0  # one token, one row of logits, no bounds
        drafts: dict[str, Any] = {}
        if self._draft_caps is not None:
            chunks[2:4, :decodes] += self._draft_caps
            drafts = {"draft_caps": self._draft_caps, "draft_budget": self._draft_budget, "propose": self._propose}
        columns: dict[str, Any] = dict(zip(_COLUMNS, chunks, strict=True))
        draws = np.array(self._draws, np.int64).reshape(-1, 2)
        draw_slots = np.concatenate((self.decode_slots, draws[:, 0]))
        return StepPlan(
            number=number,
            edits=edits,
            admissions=self.admissions,
            **columns,
            draw_slots=draw_slots,
            draw_rows=np.concatenate((np.zeros(decodes, np.int64), draws[:, 1])),
            draw_epochs=self._table.epoch[draw_slots],
            chunk_epochs=self._table.epoch[chunks[0]],
            forks=self._forks,
            scores=self._scores,
            num_decodes=decodes,
            num_replayed=self.replay_tokens,
            **drafts,
        )
