"""The words of ASGI, and the few answers that are given before any framework has seen the request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from deepinfer.codec.errors import RequestError
from deepinfer.server.refusal import headers_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LINGER_SECONDS = 1.0
LINGER_BYTES = 64 << 20
"""What is read of a body that nobody wants, so that the client gets to read why."""


async def send_error(send: Send, error: RequestError, body: bytes) -> None:
    """body: JSON."""
    await _send_error(send, error, body, last=True)


async def refuse_unread(receive: Receive, send: Send, error: RequestError, body: bytes) -> None:
    """Answers a request whose own body has not been read to its end, and closes the connection.

    Whoever closes a connection with unread data resets it, and the client may lose the answer that it has not read. So
    the answer goes out whole, what still comes is thrown away for a while, and then the connection closes.
    """
    await _send_error(send, error, body, last=False)
    dropped, more = 0, True
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while more and dropped < LINGER_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_error(send: Send, error: RequestError, body: bytes, *, last: bool) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers_of(error)]
    if not last:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not last})


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name (in lower case)."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None
