"""Which tokens may follow: structured output as sampling sees it. Grammars are compiled and matched elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Constraint(Protocol):
    """Stands behind the tokens that a sequence has kept so far."""

    def masks(self, path: Sequence[int]) -> Tensor:
        """Bool [len(path) + 1, vocab]: row j says what may follow path[:j]; changes nothing. Behind a token that may
        not stand where it does every row is all True: no row that counts comes from there."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens are kept; each may stand where it does."""

    def copy(self) -> Constraint:
        """Another one that stands where this one does and goes its own way."""
