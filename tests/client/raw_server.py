"""A server of raw bytes: what a client does when the other side does anything at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(serve: Serve) -> AsyncIterator[str]:
    """Address. serve: called with every connection, which is closed behind it."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the test is over
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes] | None:
    """(request line, body) of the next request; None at the end of the connection."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    length = next((int(line[15:]) for line in head.splitlines() if line.startswith("content-length:")), 0)
    return head.splitlines()[0], await reader.readexactly(length)


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
