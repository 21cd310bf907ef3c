"""What the prefix cache learnt and lost, for those who keep a picture of it elsewhere (a router, for one).

Replaying the events from the start, or from a "removed" of everything, gives exactly the set of hashes in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

STORED, REMOVED = "stored", "removed"
DEVICE, WINDOW = "device", "window"  # tiers: blocks of the device, windows in host memory


class CacheEvent(NamedTuple):
    """Several hashes at once, because a prefill of a long prompt stores hundreds of blocks."""

    kind: str  # "stored" | "removed"
    hashes: tuple[bytes, ...]  # stored on the device: consecutive blocks of one chain; removed: in any order
    parent: bytes | None  # stored on the device: the hash before the first one, h_0 for a sequence's first block
    tier: str  # "device": blocks; "window": window rows, whose hash is that of the last block before the boundary


class EventBuffer:
    """Collects events until somebody takes them: `CacheManager(on_event=buffer.append)`."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def append(self, event: CacheEvent) -> None:
        self._events.append(event)

    def take(self) -> list[CacheEvent]:
        """All events since the last call, in order."""
        taken, self._events = self._events, []
        return taken
