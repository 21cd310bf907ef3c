"""Keeps streams open that have nothing to say: one clock for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

TICK_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Beating:
    """A stream. `spoke` whenever it sends something."""

    interval: float  # seconds
    beat: Callable[[], Awaitable[None]]
    last: float = field(default_factory=time.monotonic)
    busy: bool = False  # it is sending

    def spoke(self) -> None:
        self.last = time.monotonic()


class Heart:
    """Beats for streams that were silent for their interval, give or take a second."""

    def __init__(self) -> None:
        self._streams: set[Beating] = set()
        self._beats: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def keeping(self, interval: float, beat: Callable[[], Awaitable[None]]) -> Iterator[Beating]:
        """While the stream lasts. beat: sends a sign of life; what it raises is the stream's own business."""
        stream = Beating(interval, beat)
        self._streams.add(stream)
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def close(self) -> None:
        tasks = [task for task in (self._ticker, *self._beats) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            for stream in [s for s in self._streams if not s.busy and now - s.last >= s.interval]:
                task = asyncio.create_task(self._beat(stream))
                self._beats.add(task)
                task.add_done_callback(self._beats.discard)

    async def _beat(self, stream: Beating) -> None:
        stream.busy = True
        stream.spoke()
        try:
            with contextlib.suppress(Exception):  # the connection is gone: its own task finds out
                await stream.beat()
        finally:
            stream.busy = False
