"""A connection that cannot be held open, or filled, for nothing: uvicorn's HTTP protocol with limits of its own.

    uvicorn.Config(app, http=bounded_protocol(ConnectionLimits()), ws="none")

What uvicorn leaves open, and this closes: a head (request line and headers) that never ends, framing without content
(endless trailers, chunk extensions), a reader that stops reading, connections without number, requests without number
behind a running one, and a client that leaves while a second request waits behind its first: there only the second
would learn of it, or nobody, for nothing is read any more.

A wish to go on in another protocol (`Upgrade: h2c`, which Java's client sends with every request) is passed over, as
HTTP allows; uvicorn would lose the body.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bytes and seconds of a connection."""

    max_connections: int = 8192
    head_seconds: float = 10.0
    """From a connection's start, or a request's first byte on one that was idle, to the end of its headers."""
    max_head_bytes: int = 64 * 1024
    """Of request line and headers; of what frames a body as much, and 8 bytes more per byte of content."""
    max_waiting: int = 16
    """Requests behind one that is being answered,"""
    max_waiting_bytes: int = 1 << 20
    """and their bytes. A client that sends more is given up."""
    write_seconds: float = 30.0
    """That a client may take to read what waits for it."""


_FRAMING = (b"content-length", b"transfer-encoding")


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
        self._waiting_bytes = 0  # that came while requests waited behind another one
        self._has_read_head = False  # of the request whose body a new parser reads

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

    def shutdown(self) -> None:
        """The server ends, and what it was asked is answered: a request that is not whole will get no answer."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.close()
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._start_head_timer()
        self._framing += len(data)
        self._parse(data)
        if self.transport.is_closing():
            return
        self._waiting_bytes = self._waiting_bytes + len(data) if self.pipeline else 0
        if self._waiting_bytes > self._limits.max_waiting_bytes:
            return self._refuse(503, "Too many requests at once.")
        if self.pipeline:
            self.flow.resume_reading()  # else nobody would learn that the client has left
        if self._framing > self._limits.max_head_bytes + 8 * self._content + len(data):
            # `len(data)`: one piece may hold the end of this head and the beginning of more.
            self._refuse(431, "Headers too large.")

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")

    def _go_on_without(self, rest: bytes) -> None:
        """The parser has ended behind a head that asks for another protocol, and reads no body then. A new one gets
        what of the head says where the body ends, and the rest."""
        self.parser = httptools.HttpRequestParser(self)
        if self._has_body():
            framing = [b"%b: %b\r\n" % item for item in self.scope["headers"] if item[0] in _FRAMING]
            self._has_read_head = True
            self._parse(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
            self._has_read_head = False
        if rest and not self.transport.is_closing():
            self._parse(rest)

    def _has_body(self) -> bool:
        return any(name in _FRAMING and value != b"0" for name, value in self.scope["headers"])

    def on_message_begin(self) -> None:
        if self._has_read_head:
            return
        super().on_message_begin()
        self._in_head = True
        self._framing = self._content = 0

    def on_url(self, url: bytes) -> None:
        if not self._has_read_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._has_read_head:
            return
        if len(self.pipeline) >= self._limits.max_waiting:
            raise OverflowError("too many requests at once")  # ends the parsing: one read has room for thousands
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
        if self.parser.should_upgrade() and self._has_body():
            return  # another parser reads it
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
