"""What is wrong with a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["content", "tools"]
Kind = Literal["invalid", "too_large", "too_slow", "busy"]


class GrammarError(ValueError):
    """A structure that cannot be enforced, and why.

    message: for people. kind: "invalid" (not a grammar, or one that cannot be enforced), "too_large" (beyond a limit of
    limits.py or of the matcher), "too_slow" (not compiled, or not matched, within its time), "busy" (others are being
    checked: the same structure may pass later). part: what of the structure is to blame, None if that is not known.
    """

    def __init__(self, message: str, kind: Kind = "invalid", part: Part | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind: Kind = kind
        self.part: Part | None = part

    def __reduce__(self) -> tuple[type[GrammarError], tuple[str, Kind, Part | None]]:
        return GrammarError, (self.message, self.kind, self.part)


@contextmanager
def blaming(part: Part) -> Iterator[None]:
    """Around what only this part of a structure can make fail."""
    try:
        yield
    except GrammarError as error:
        error.part = part
        raise
