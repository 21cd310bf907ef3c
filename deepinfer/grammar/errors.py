"""What is wrong with a grammar."""

from __future__ import annotations

from typing import Literal

Kind = Literal["invalid", "too_large", "too_slow", "busy"]


class GrammarError(ValueError):
    """A structure that cannot be enforced, and why.

    message: for people. kind: "invalid" (not a grammar, or one that cannot be enforced), "too_large" (beyond a limit of
    limits.py or of the matcher), "too_slow" (not compiled, or not matched, within its time), "busy" (others are being
    checked: the same structure may pass later).
    """

    def __init__(self, message: str, kind: Kind = "invalid") -> None:
        super().__init__(message)
        self.message = message
        self.kind: Kind = kind

    def __reduce__(self) -> tuple[type[GrammarError], tuple[str, Kind]]:
        return GrammarError, (self.message, self.kind)
