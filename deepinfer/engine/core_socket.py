"""The engine's end of the wire: one thread that owns the socket, so that neither a long step nor loading a model keeps
the engine from saying that it lives, and from noticing that a client does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import stat
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import zmq

from deepinfer.engine import wire

logger = logging.getLogger(__name__)

_TURN_SECONDS = 0.05  # longest time that one turn only receives
_QUIET_SECONDS = 0.05  # nothing has come for so long: what was sent before is here
_SWEEP_SECONDS = 1.0  # longest time to wait for that


class Received(NamedTuple):
    client: bytes
    message: wire.ToEngine


class Gone(NamedTuple):
    """A client left, or is taken for dead; nothing reaches it any more."""

    client: bytes
    reason: str


class Swept(NamedTuple):
    """What clients had sent when `sweep` was called has been received."""


class Orphaned(NamedTuple):
    """The process that started this one has ended."""


class Broken(NamedTuple):
    """The thread itself failed."""

    error: Exception


class Health:
    """How the engine is. Written by the thread that steps, read by the one that sends heartbeats."""

    def __init__(self) -> None:
        self.state = "loading"
        self.stage = ""
        self.fraction: float | None = None
        self._since: float | None = None  # when the last step ended or the work came; None without work

    def work(self, now: float) -> None:
        """There is something to do and a step begins."""
        if self._since is None:
            self._since = now

    def stepped(self, now: float) -> None:
        self._since = now

    def rest(self) -> None:
        """There is nothing to do."""
        self._since = None

    def last_step_age(self, now: float) -> float:
        since = self._since
        return 0.0 if since is None else now - since


class CoreSocket(threading.Thread):
    """Puts what clients say into `inbox` (Received, Gone, Swept, Orphaned, Broken) and sends what `send` is given.

    orphan_sentinel: a file descriptor that becomes readable when the parent process ends. ValueError for an endpoint
    that cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        health: Health,
        inbox: SimpleQueue,
        *,
        orphan_sentinel: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="engine-socket", daemon=True)
        _refuse_taken(endpoint)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a lost client is an error here, not a message dropped
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by what the clients' requests may generate
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.LARGEST_MESSAGE)
        self._socket.setsockopt(zmq.LINGER, 1000)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"endpoint: {endpoint!r} cannot be bound: {error}") from None
        self._health = health
        self._inbox = inbox
        self._orphan_sentinel = orphan_sentinel
        self._clock = clock
        self._outbox: SimpleQueue[tuple[bytes, tuple[bytes, bytes]]] = SimpleQueue()
        self._waker, self._wakened = sockets.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._silent: dict[bytes, float] = {}  # seconds without a word, of every client that said Hello
        self._closing = False
        self._last_words: wire.Fatal | None = None  # answer to whoever still says Hello
        self._last_words_sent = False
        self._hurries: SimpleQueue[None] = SimpleQueue()  # not an Event: a signal may strike whoever waits for it
        self._sweep_began: float | None = None
        self._last_heard = self._last_beat = clock()

    # -- called from other threads ----------------------------------------------------------------------------------

    def send(self, client: bytes, message: wire.ToClient) -> None:
        """Encoded here and now: the arrays of an output may change in the next step."""
        self._outbox.put((client, wire.encode(message)))
        self._wake()

    def sweep(self) -> None:
        """Reads until the socket is empty, then puts `Swept` behind what came."""
        self._sweep_began = self._clock()
        self._wake()

    def hurry(self) -> None:
        """Whoever owns this process wants it gone: `close` waits for no more clients. May be called by a signal."""
        self._hurries.put(None)

    def close(self, last_words: wire.Fatal | None = None) -> None:
        """Sends what is left and ends the thread. last_words: told to every client at once, also to one that says Hello
        within half a second, because a model that fails to load can fail before anyone has connected."""
        if last_words is not None:
            self._last_words = last_words
            self._wake()
            with contextlib.suppress(Empty):
                self._hurries.get(timeout=2 * wire.BEAT_SECONDS)
        self._closing = True
        self._wake()
        self.join(timeout=5)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of reasons to wake up
            self._waker.send(b"\0")

    # -- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wakened, zmq.POLLIN)
            if self._orphan_sentinel is not None:
                poller.register(self._orphan_sentinel, zmq.POLLIN)
            while not self._closing:
                self._turn(poller)
            self._send_waiting()
            self._say_last_words()
        except Exception as error:
            logger.exception("the engine's socket failed")
            self._inbox.put(Broken(error))
        finally:
            self._context.destroy(linger=1000)
            self._waker.close()
            self._wakened.close()

    def _turn(self, poller: zmq.Poller) -> None:
        wait = self._last_beat + wire.BEAT_SECONDS - self._clock()
        if self._sweep_began is not None:
            wait = min(wait, _QUIET_SECONDS)
        ready = dict(poller.poll(max(0, int(wait * 1000) + 1)))
        if self._wakened.fileno() in ready or self._wakened in ready:
            self._drop_wakes()
        if self._orphan_sentinel in ready:
            assert self._orphan_sentinel is not None
            poller.unregister(self._orphan_sentinel)
            self._orphan_sentinel = None
            self._inbox.put(Orphaned())
        self._send_waiting()
        self._receive_waiting()
        self._say_last_words()
        if self._sweep_began is not None:
            self._end_sweep(self._sweep_began)
        if self._clock() >= self._last_beat + wire.BEAT_SECONDS:
            self._beat()

    def _end_sweep(self, began: float) -> None:
        now = self._clock()
        if now - max(began, self._last_heard) >= _QUIET_SECONDS or now - began >= _SWEEP_SECONDS:
            self._sweep_began = None
            self._inbox.put(Swept())

    def _say_last_words(self) -> None:
        if self._last_words is not None and not self._last_words_sent:
            self._last_words_sent = True
            for client in list(self._silent):
                self._answer(client, self._last_words)

    def _drop_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._wakened.recv(4096)) == 4096:
                pass

    def _send_waiting(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._transmit(*self._outbox.get_nowait())

    def _transmit(self, client: bytes, frames: tuple[bytes, bytes]) -> None:
        try:
            self._socket.send_multipart([client, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # its connection broke, so messages are lost and its streams cannot go on, whether or not it comes back
            if client in self._silent:
                self._lose(client, f"cannot be reached: {error}")

    def _receive_waiting(self) -> None:
        until = self._clock() + _TURN_SECONDS
        while self._clock() < until:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard = self._clock()
            self._receive(client, frames)

    def _receive(self, client: bytes, frames: list[bytes]) -> None:
        try:
            message = wire.decode_to_engine(frames)
        except Exception as error:  # whatever a stranger sends, it concerns nobody else
            logger.warning("refused a message of client %s: %s", client.hex(), error)
            field = "protocol" if isinstance(error, wire.ProtocolMismatchError) else "message"
            self._answer(client, wire.Refused(number=None, field=field, message=str(error)))
            return
        if isinstance(message, wire.Pulse):
            client = message.client
        elif isinstance(message, wire.Hello):
            if self._last_words is not None:
                self._answer(client, self._last_words)
            if client not in self._silent:
                logger.info("client %s (%s) connected", client.hex(), message.client)
        elif client in self._silent and isinstance(message, wire.Bye):
            self._lose(client, "left")
            return
        if client not in self._silent and not isinstance(message, wire.Hello):
            known = "this client is unknown here: it has said no Hello, or was silent too long and is taken for dead"
            self._answer(client, wire.Refused(number=None, field="hello", message=known))
            return
        self._silent[client] = 0.0
        if not isinstance(message, wire.Pulse):
            self._inbox.put(Received(client, message))

    def _answer(self, client: bytes, message: wire.ToClient) -> None:
        self._transmit(client, wire.encode(message))

    def _beat(self) -> None:
        now = self._clock()
        # A thread that did not run itself has heard nobody: the time that it missed counts as one beat.
        elapsed = min(now - self._last_beat, 2 * wire.BEAT_SECONDS)
        self._last_beat = now
        beat = wire.encode(
            self._last_words
            or wire.Heartbeat(
                state=self._health.state,
                stage=self._health.stage,
                fraction=self._health.fraction,
                last_step_age=self._health.last_step_age(now),
            )
        )
        for client in list(self._silent):
            self._silent[client] += elapsed
            if self._silent[client] > wire.SILENCE_SECONDS:
                self._lose(client, f"was silent for {self._silent[client]:.1f} s")
            else:
                self._transmit(client, beat)

    def _lose(self, client: bytes, reason: str) -> None:
        if self._silent.pop(client, None) is not None:
            self._inbox.put(Gone(client, reason))


def _refuse_taken(endpoint: str) -> None:
    """ZeroMQ takes over the path of another engine's socket without a word."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not os.path.exists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ValueError(f"endpoint: {path!r} exists and is no socket")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # left behind by a process that is gone
    raise ValueError(f"endpoint: another engine listens at {endpoint!r}; give it another one, or end the other")
