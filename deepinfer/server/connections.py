"""A connection that cannot be held open, or filled, for nothing: uvicorn's HTTP protocol with limits of its own.

    uvicorn.Config(app, http=bounded_protocol(ConnectionLimits()), ws="none")

What uvicorn leaves open, and this closes: a head (request line and headers) that never ends, framing without content
(endless trailers, chunk extensions), a reader that stops reading, connections without number, and a client that leaves
while a second request waits behind its running one: there only the second would learn of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bytes and seconds of a connection."""

    max_connections: int = 8192
    head_seconds: float = 10.0
    """From a connection's start, or a request's first byte on one that was idle, to the end of its headers."""
    max_head_bytes: int = 64 * 1024
    """Of request line and headers; of what frames a body as much, and 8 bytes more per byte of content."""
    write_seconds: float = 30.0
    """That a client may take to read what waits for it."""


def bounded_protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """The class for uvicorn.Config(http=...)."""

    class BoundedHttpProtocol(_BoundedHttpProtocol):
        _limits = limits

    return BoundedHttpProtocol


class _BoundedHttpProtocol(HttpToolsProtocol):
    _limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._framing = 0  # bytes of this request that are no content
        self._content = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            return self._refuse(503, "Too many connections.")
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._start_head_timer()
        self._framing += len(data)
        super().data_received(data)
        if self._framing > self._limits.max_head_bytes + 8 * self._content + len(data):
            # `len(data)`: one piece may hold the end of this head and the beginning of more.
            self._refuse(431, "Headers too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._framing = self._content = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete] + [self.cycle]

    def on_body(self, body: bytes) -> None:
        self._content += len(body)
        self._framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True  # what comes next is one
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering():  # a line feed too many behind a request that runs, say: its answer goes on
            return self._start_head_timer()
        self._refuse(408, "The request came too slowly.")

    def _is_answering(self) -> bool:
        return any(not cycle.response_complete for cycle in self._unanswered)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_timers(self) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answers, if no answer is under way, and closes."""
        self._stop_timers()
        if self.transport.is_closing():
            return
        if self._is_answering():
            return self.transport.abort()
        body = message.encode()
        length = str(len(body)).encode()
        head = b"content-type: text/plain\r\nconnection: close\r\ncontent-length: " + length + b"\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
