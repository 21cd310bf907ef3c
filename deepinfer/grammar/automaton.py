"""What compiled grammars have in common, whichever library matches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Automaton(Protocol):
    """One grammar, at one position of one text. Not to be used by two threads at once; copies are independent."""

    @property
    def accepting(self) -> bool:
        """The text may end here."""

    @property
    def error(self) -> str | None:
        """Why this automaton says nothing any more: matching exceeded a limit, or a token could not stand there."""

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Moves behind these tokens; False if one may not stand where it does, and then the automaton is spent. The
        end token is never among them."""

    def fill(self, rows: np.ndarray, first: int, path: Sequence[int]) -> None:
        """Writes what may follow path[:j] into rows[first + j], int32 [n, words]; changes nothing else. Rows behind a
        token that may not stand where it does are left as they are. The end token is never on the path."""

    def copy(self) -> Automaton: ...
