"""What may follow in one sequence: reasoning first, then content, a block of calls, or either."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.vocabulary import Vocabulary, allows

Calls = Literal["free", "block", "never"]


class Phase(Enum):
    REASONING = "inside <think>"
    FREE = "content without a grammar"
    GRAMMAR = "one of the live automata describes the rest"
    ENDED = "behind the end token"


class Walk(NamedTuple):
    """How the rows for a path are to be written: some are known, automata write the rest."""

    rows: list[np.ndarray]  # of the first positions, [words] each
    automata: list[Automaton]  # that describe the positions from len(rows) on; any of them may go on
    path: list[int]  # what the automata walk along, up to an end token
    open: bool  # behind the rows and the automata's rows everything is allowed: no row that counts comes from there


class Matcher:
    """The constraint of one sequence (speculation/constraint.py): stands behind the tokens that the sequence has kept.

    Reasoning is free but for its length; </think> ends it. Content is described by automata, of which those that the
    text contradicts drop out, or it is free. In free content a call may begin: with calls = "block" its DSML token may
    only stand behind "<", and an automaton describes all that follows.

    error: why the matcher lost its place (a limit, or a token that could not stand where it did), else None. From then
    on only the end token is allowed; the engine ends such a sequence with an error.

    Not for two threads at once: while a MaskFiller's future is pending its matchers stay untouched.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        alternatives: list[Automaton],
        calls: Calls,
        begun: Automaton | None,
        thinking: bool,
        thinking_budget: int | None,
    ) -> None:
        """alternatives: own automata that describe content; empty: free content. begun: a shared automaton behind the
        first DSML token of a block; copied when it is needed."""
        self._vocabulary = vocabulary
        self._alternatives = alternatives
        self._calls = calls
        self._begun_shared = begun
        self._begun: Automaton | None = None
        self._budget = thinking_budget
        self._reasoned = 0
        self._behind_angle = False
        self._error: str | None = None
        self._phase = Phase.REASONING if thinking else self._after_reasoning()

    # -- the Constraint protocol -------------------------------------------------------------------------------------

    def masks(self, path: Sequence[int]) -> np.ndarray:
        """What may follow path[:j], int32 [len(path) + 1, words]: bit t % 32 of word t // 32 of row j is token t.
        Changes nothing. Rows behind a token that may not stand where it does, or behind the end token, are all ones."""
        rows = np.empty((len(path) + 1, self._vocabulary.words), np.int32)
        walk = self.walk(path)
        first = write_known(walk, rows, 0)
        if walk.automata:
            write_union(walk, rows, first)
        return rows

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens are kept. One that may not stand where it does sets `error`."""
        for place, token in enumerate(token_ids):
            if self._phase is Phase.GRAMMAR:
                self._consume(token_ids[place:])
                return
            if self._error is not None:
                return
            if not allows(self._row(), token):
                self._error = f"token {token} may not stand {self._phase.value}"
                return
            self._step(token)

    def copy(self) -> Matcher:
        other = Matcher.__new__(Matcher)
        other.__dict__.update(self.__dict__)
        other._alternatives = [automaton.copy() for automaton in self._alternatives]
        other._begun = None
        return other

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def error(self) -> str | None:
        if self._error is not None or self._phase is not Phase.GRAMMAR:
            return self._error
        broken = [automaton.error for automaton in self._alternatives]
        return None if None in broken else broken[0]

    @property
    def ended(self) -> bool:
        """The end token was accepted."""
        return self._phase is Phase.ENDED

    @property
    def may_end(self) -> bool:
        """The end token is allowed here."""
        if self._phase is Phase.GRAMMAR:
            return any(automaton.accepting for automaton in self._alternatives)
        return self._phase is Phase.FREE

    def walk(self, path: Sequence[int]) -> Walk:
        """See Walk. The automata are the matcher's own: they are to be left where they are."""
        if self.error is not None:
            return Walk([self._vocabulary.only_eos], [], [], True)
        # The phases before a grammar hold no automaton, so a shallow copy can walk for us.
        scout = Matcher.__new__(Matcher)
        scout.__dict__.update(self.__dict__)
        rows: list[np.ndarray] = []
        for place in range(len(path) + 1):
            if scout._phase is Phase.GRAMMAR:
                self._begun = scout._begun  # keep what the scout had to copy
                return Walk(rows, scout._alternatives, self._before_end(path[place:]), False)
            row = scout._row()
            rows.append(row)
            if scout._phase is Phase.ENDED or (place < len(path) and not allows(row, path[place])):
                break
            if place < len(path):
                scout._step(path[place])
        return Walk(rows, [], [], True)

    def _row(self) -> np.ndarray:
        """What may follow, outside of a grammar."""
        vocabulary = self._vocabulary
        match self._phase:
            case Phase.REASONING if self._budget is not None and self._reasoned >= self._budget:
                return vocabulary.only_end_think
            case Phase.REASONING:
                return vocabulary.reasoning
            case Phase.FREE if self._calls == "free" or (self._calls == "block" and self._behind_angle):
                return vocabulary.free
            case Phase.FREE:
                return vocabulary.free_without_calls
            case _:
                return vocabulary.everything

    def _step(self, token: int) -> None:
        """Moves behind an allowed token, outside of a grammar."""
        if self._phase is Phase.REASONING:
            self._reasoned += 1
            if token == self._vocabulary.end_think:
                self._phase = self._after_reasoning()
        elif token == self._vocabulary.eos_token_id:
            self._phase = Phase.ENDED
        elif token == self._vocabulary.dsml and self._calls == "block":
            if self._begun is None:
                assert self._begun_shared is not None
                self._begun = self._begun_shared.copy()
            self._alternatives = [self._begun]
            self._phase = Phase.GRAMMAR
        else:
            self._behind_angle = self._vocabulary.token_bytes(token).endswith(b"<")

    def _after_reasoning(self) -> Phase:
        return Phase.GRAMMAR if self._alternatives else Phase.FREE

    def _consume(self, token_ids: Sequence[int]) -> None:
        before = self._before_end(token_ids)
        ends = len(before) < len(token_ids)
        alive = [automaton for automaton in self._alternatives if automaton.consume(before)]
        if ends and alive:
            alive = [automaton for automaton in alive if automaton.accepting]
            if alive:
                self._phase = Phase.ENDED
                return
        if not alive:
            self._error = f"the grammar does not allow these tokens: {list(token_ids)}"
            return
        self._alternatives = alive

    def _before_end(self, token_ids: Sequence[int]) -> list[int]:
        ids = list(token_ids)
        eos = self._vocabulary.eos_token_id
        return ids[: ids.index(eos)] if eos in ids else ids


def write_known(walk: Walk, rows: np.ndarray, first: int) -> int:
    """Writes the rows that are known and returns the number of the next one; where nothing else will be written, the
    remaining rows are all ones."""
    for row in walk.rows:
        rows[first] = row
        first += 1
    if walk.open:
        rows[first:] = -1
    return first


def write_union(walk: Walk, rows: np.ndarray, first: int) -> None:
    """Writes rows[first:] with what any of the automata allows."""
    rows[first:] = 0
    walk.automata[0].fill(rows, first, walk.path)
    for automaton in walk.automata[1:]:
        apart = np.zeros_like(rows[first:])
        automaton.fill(apart, 0, walk.path)
        rows[first:] |= apart
    close_gaps(rows[first + 1 :])


def close_gaps(rows: np.ndarray) -> None:
    """Rows that nobody wrote stand behind a token that no automaton allows: all ones."""
    rows[~rows.any(1)] = -1
