"""What all routes of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from deepinfer.grammar.checker import Checker
from deepinfer.metrics.server import ServerMetrics
from deepinfer.server.engine_host import EngineHost
from deepinfer.server.errors import unavailable
from deepinfer.server.gate import Gate
from deepinfer.server.heart import Heart
from deepinfer.server.models import ServedModel
from deepinfer.server.response_store import ResponseStore
from deepinfer.server.settings import ServerSettings


class ServerState:
    """Made before the event loop runs; `close` ends what it holds."""

    def __init__(
        self,
        settings: ServerSettings,
        model: ServedModel,
        host: EngineHost,
        gate: Gate,
        checker: Checker,
        metrics: ServerMetrics,
        store: ResponseStore,
    ) -> None:
        self.settings = settings
        self.model = model
        self.host = host
        self.gate = gate
        self.checker = checker
        self.metrics = metrics
        self.store = store
        self.heart = Heart()
        self.threads = ThreadPoolExecutor(settings.encode_threads, thread_name_prefix="encode")
        self.draining = False
        self._open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        """Answers under way."""
        return self._open

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around one answer: a drain waits for it. RequestError 503 if the server is draining."""
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests; send it to another one")
        self._open += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._empty.set()

    async def drain(self, timeout: float) -> bool:
        """Takes nothing new and waits until everything is answered; False if some of it was not in time."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        await self.heart.close()
        await self.host.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.checker.close()
        await self.store.close()
