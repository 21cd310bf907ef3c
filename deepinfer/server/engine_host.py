"""The engine behind the server: started, watched, started again when it dies, and let go at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.engine.client import AsyncEngineClient, EngineDeadError
from deepinfer.server.errors import unavailable
from deepinfer.server.stderr import queue_stderr_for_good

if TYPE_CHECKING:
    from deepinfer.engine.core import EngineCore
    from deepinfer.engine.core_process import MakeCore, Startup

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.5  # seconds before the first new start,
LONGEST_DELAY = 30.0  # doubled with every one that fails, up to this
STEADY_SECONDS = 60.0  # an engine that lived so long starts the delays anew
WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class OwnGroup:
    """A core whose process leaves the terminal's group: Ctrl-C is for the server, which says when the engine ends. What
    it says on standard error keeps it from no step."""

    make_core: MakeCore

    def __call__(self, startup: Startup) -> EngineCore:
        os.setpgid(0, 0)
        queue_stderr_for_good()
        return self.make_core(startup)


class EngineHost:
    """Owns the engine's process, on the event loop that calls `start`.

    hang_timeout: seconds without the end of a step, while there is work, after which the engine is taken for lost.
    """

    def __init__(self, make_core: MakeCore, *, model: str = "", hang_timeout: float = 300.0) -> None:
        self._make_core = OwnGroup(make_core)
        self._model = model
        self._hang_timeout = hang_timeout
        self._client: AsyncEngineClient | None = None
        self._ready: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._progress: tuple[str, float | None] = ("", None)
        self._ending = False
        self.restarts = 0
        self.error: Exception | None = None  # why the engine is not there

    async def start(self) -> None:
        """Begins to load. Does not wait for it; `wait_ready` does."""
        self._ready = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())

    async def wait_ready(self) -> None:
        """Returns when the engine takes requests for the first time; raises what kept it from doing so."""
        assert self._ready is not None
        await asyncio.shield(self._ready)

    @property
    def state(self) -> str:
        """ "loading", "ready", "draining" or "dead"; dead ones come back."""
        if self._client is not None:
            return self._client.state
        return "dead" if self.error is not None else "loading"

    @property
    def progress(self) -> str:
        """What is being loaded, for people."""
        stage, fraction = self._progress
        return stage if fraction is None else f"{stage} {fraction:.0%}"

    @property
    def client(self) -> AsyncEngineClient:
        """The engine, or RequestError 503 with the reason why there is none."""
        if self._client is not None and self._client.state == "ready":
            return self._client
        raise unavailable(self.describe(), code=f"engine_{self.state}", retry_after=5.0)

    @property
    def current(self) -> AsyncEngineClient | None:
        """The engine in whatever state, if there is one to talk to."""
        return self._client

    def describe(self) -> str:
        """The state in words."""
        match self.state:
            case "loading":
                return f"the model is being loaded{f' ({self.progress})' if self.progress else ''}"
            case "dead":
                return "the engine was lost and is started again"
            case state:
                return f"the engine is {state}"

    async def close(self) -> None:
        """Ends the engine with what it still has."""
        self._ending = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._ready is not None and not self._ready.done():
            self._ready.cancel()

    # -- the keeper ---------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """One engine after the other, as long as the server lives."""
        assert self._ready is not None
        delay = FIRST_DELAY
        while True:
            began = time.monotonic()
            try:
                async with await self._launch() as client:
                    self._client, self.error = client, None
                    if not self._ready.done():
                        self._ready.set_result(None)
                    self.error = await self._watch(client)
                    assert client.process is not None
                    client.process.kill()  # one that hangs would take its time to be asked
            except Exception as error:  # whatever it is (no more files, no memory), it may be over the next time
                self.error = error
                if not isinstance(error, EngineDeadError | OSError):
                    logger.exception("the engine was not started, or not watched, for a reason that nobody foresaw")
                if not self._ready.done():  # a model that cannot be loaded will not be better the next time
                    self._ready.set_exception(error)
                    return
            finally:
                self._client = None
            if time.monotonic() - began > STEADY_SECONDS:
                delay = FIRST_DELAY
            logger.error("the engine is gone (%s); a new one starts in %g s", self.error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)
            self.restarts += 1

    async def _launch(self) -> AsyncEngineClient:
        return await AsyncEngineClient.start(
            self._make_core, model=self._model, keep_outputs=False, on_progress=self._note_progress
        )

    async def _watch(self, client: AsyncEngineClient) -> Exception:
        """Returns why the engine is of no more use."""
        ended = asyncio.create_task(client.wait_ended())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=WATCH_SECONDS)
                if client.last_step_age > self._hang_timeout:
                    return EngineDeadError(f"no step has ended for {client.last_step_age:.0f} s")
            return ended.result()
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ended

    def _note_progress(self, stage: str, fraction: float | None) -> None:
        self._progress = (stage, fraction)
