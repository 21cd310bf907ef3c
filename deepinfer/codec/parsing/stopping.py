"""What a parser needs of the search for stop strings."""

from __future__ import annotations

from typing import Protocol


class StopText(Protocol):
    """Cuts a text at the first stop string, and holds back what may be the beginning of one. The caller brings it
    (`engine.stop.OutputText`), for this folder knows no engine."""

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """(newly released text, the stop string that ended it or None)."""

    def finish(self) -> str:
        """Releases what was held back."""
