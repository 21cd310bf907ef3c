"""Which tokens may follow: structured output as sampling sees it. Grammars are compiled and matched in grammar/."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Masks = npt.NDArray[np.int32]
"""[rows, (vocab + 31) // 32]: bit t % 32 of word t // 32 says whether token t may follow."""


class Constraint(Protocol):
    """Stands behind the tokens that a sequence has kept so far. Not to be used by two threads at once."""

    def masks(self, path: Sequence[int]) -> Masks:
        """len(path) + 1 rows: row j says what may follow path[:j]; changes nothing. Behind a token that may not stand
        where it does rows are all ones: none that counts comes from there."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens are kept; each may stand where it does."""

    @property
    def error(self) -> str | None:
        """Why it knows nothing any more (a limit of its matcher, tokens that may not stand where they do), else None.
        What it says from then on means nothing."""

    def copy(self) -> Constraint:
        """Another one that stands where this one does and goes its own way."""


class Prototype(Protocol):
    """A compiled grammar. Any number of sequences start from one."""

    def start(self, output_ids: Sequence[int] = ()) -> Constraint:
        """A constraint that stands behind this output: nothing yet, or what a preempted sequence has said."""


class MaskFiller(Protocol):
    """Fills the rows of a step at once, while something else is computed."""

    def begin(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> Future[Masks]:
        """rows: (constraint, path), no constraint twice -> the rows of all `constraint.masks(path)`, in order. Nobody
        touches these constraints until the future is done."""


class LoopFiller:
    """Fills on the spot, one constraint after the other: for any constraint, and at no time but the caller's."""

    def begin(self, rows: Sequence[tuple[Constraint, Sequence[int]]]) -> Future[Masks]:
        future: Future[Masks] = Future()
        try:
            future.set_result(np.concatenate([constraint.masks(path) for constraint, path in rows]))
        except Exception as error:
            future.set_exception(error)
        return future
