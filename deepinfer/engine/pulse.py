"""A client's sign of life, from a thread and through a socket of its own, however busy its event loop is."""

from __future__ import annotations

import contextlib
import threading

import zmq

from deepinfer.engine import wire


class Pulse(threading.Thread):
    """Tells the engine at `endpoint` in every beat that the client of this identity lives. Start it once the engine has
    answered the client's Hello: it does not know a pulse that comes before."""

    def __init__(self, endpoint: str, identity: bytes) -> None:
        super().__init__(name="engine-client-pulse", daemon=True)
        self._endpoint = endpoint
        self._frames = wire.encode(wire.Pulse(client=identity))
        self._ended = threading.Event()

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.SNDHWM, 4)  # to an engine that is gone only the last few are kept
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._endpoint)
            while not self._ended.wait(wire.BEAT_SECONDS):
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(self._frames, zmq.NOBLOCK)

    def stop(self) -> None:
        self._ended.set()
