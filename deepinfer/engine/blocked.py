"""What a waiting sequence may have to wait for besides room: a grammar, a picture, a load. The others pass it by."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol


class Condition(Protocol):
    """Something that is prepared elsewhere. `reason` is a word for the statistics: "grammar", "vision", "kv"."""

    reason: str

    def ready(self) -> bool:
        """Called between steps, so it must not block. Raises when it can never be ready: the sequence ends with it."""


class FutureCondition:
    """Ready when a future has a result; a future that failed or was cancelled fails the sequence."""

    def __init__(self, reason: str, future: Future) -> None:
        self.reason = reason
        self._future = future

    def ready(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True
