"""A client's end of the wire: greets the engine, hears it, and finds out that it is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from deepinfer.engine import wire
from deepinfer.engine.engine_process import EngineProcess
from deepinfer.engine.pulse import Pulse

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.2  # what an engine sent before its process ended is here after this time


class EngineDeadError(RuntimeError):
    """The engine process is gone, or cannot be reached any more; what it was doing is lost."""


class EngineDrainingError(RuntimeError):
    """The engine finishes what it has and takes nothing new, or has ended after that; another one would take it."""


class Connection:
    """To the engine at `endpoint`, from the event loop that runs. on_message is given everything but Ready and
    complaints about the connection; on_death is called once, with the reason. process: if it is ours, its end is
    noticed at once; else, and if it is stopped or the network is cut, its silence is.
    """

    def __init__(
        self,
        endpoint: str,
        on_message: Callable[[wire.ToClient], None],
        on_death: Callable[[Exception], None],
        process: EngineProcess | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.identity = os.urandom(8)
        self.death: Exception | None = None
        self.ended = asyncio.Event()
        self._on_message = on_message
        self._on_death = on_death
        self._process = process
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._heard = False
        self._silent = 0.0  # seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._pulse = Pulse(endpoint, self.identity)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # sending never waits: what waits here is what callers submitted
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.connect(endpoint)
        if process is not None:
            asyncio.get_running_loop().add_reader(process.sentinel, self._notice_exit)

    async def open(self, name: str, answer_within: float | None, ready_within: float | None) -> wire.Ready:
        """Says Hello and waits until the engine takes requests. answer_within, ready_within: seconds, None = for ever;
        an engine that loads its model answers, but is not ready. EngineDeadError, ProtocolMismatchError."""
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        self.send(wire.Hello(client=name))
        if answer_within is not None:
            await asyncio.wait({self._ready}, timeout=answer_within)
            if not self._ready.done() and not self._heard:
                raise EngineDeadError(f"no engine answers at {self.endpoint} within {answer_within:g} s")
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), ready_within)
        except TimeoutError:
            raise EngineDeadError(f"the engine was not ready within {ready_within:g} s") from None

    async def close(self) -> None:
        self.send(wire.Bye())
        self.die(EngineDeadError("this client was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._context.destroy(linger=200)

    def send(self, message: wire.ToEngine) -> None:
        self.transmit(wire.encode(message))

    def transmit(self, frames: tuple[bytes, bytes]) -> None:
        """Sends an encoded message; nothing to an engine that is gone."""
        if self.death is None:
            self._socket.send_multipart(frames)

    def die(self, error: Exception) -> None:
        """Nothing will come any more. The first reason counts."""
        if self.death is not None:
            return
        self.death = error
        self._pulse.stop()
        self.ended.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # looked at, even if nobody awaits it
        self._on_death(error)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._silent = 0.0
            if not self._heard:  # it knows this client now; a pulse that overtook the Hello would be a stranger's
                self._heard = True
                self._pulse.start()
            try:
                self._take(wire.decode_to_client(frames))
            except wire.ProtocolMismatchError as error:
                self.die(error)
            except Exception as error:  # without what it said nothing that runs there can be trusted to be whole
                logger.exception("a message of the engine cannot be used")
                self.die(EngineDeadError(f"a message of the engine cannot be used: {error}"))

    def _take(self, message: wire.ToClient) -> None:
        match message:
            case wire.Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case wire.Refused(number=None, field="protocol"):
                self.die(wire.ProtocolMismatchError(message.message))
            case wire.Refused(number=None, field="hello"):
                self.die(EngineDeadError(f"the engine has given this client up: {message.message}"))
            case wire.Drained():
                self.die(EngineDrainingError("the engine has finished what it had and ended"))
            case wire.Fatal():
                self.die(EngineDeadError(f"the engine ended with an error: {message.message}"))
            case _:
                self._on_message(message)

    async def _watch(self) -> None:
        """Counts the time in which the engine says nothing. Time in which this loop itself did not run is not its
        fault, and what it said meanwhile lies in the socket."""
        last = time.monotonic()
        while self.death is None:
            await asyncio.sleep(wire.BEAT_SECONDS)
            now = time.monotonic()
            self._silent += min(now - last, 2 * wire.BEAT_SECONDS)
            last = now
            if self._heard and self._silent > wire.SILENCE_SECONDS:
                self.die(EngineDeadError(f"the engine has said nothing for {self._silent:.1f} s"))

    def _notice_exit(self) -> None:
        """The process has ended; its last words may still be on their way."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        loop.call_later(LAST_WORDS_SECONDS, self._bury, self._process)

    def _bury(self, process: EngineProcess) -> None:
        self.die(EngineDeadError(f"the engine process has ended with exit code {process.exitcode}"))
