"""What a request may weigh before anything reads it: ASGI middleware that takes in the body, counting.

The app behind gets the whole body in one message, so it never waits for a slow client; what is too big, too deep, too
slow or too many is answered here and the connection closed. Depth is checked on the bytes as they come: a JSON parser
that recurses would meet the brackets first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.codec.errors import RequestError
from deepinfer.server.access_log import note_error
from deepinfer.server.asgi import App, Message, Receive, Scope, Send, refuse_unread, send_error
from deepinfer.server.refusal import Refusal

MIB = 1 << 20
_OTHER_BYTES = bytes(set(range(256)) - set(b"[]{}"))
_STEP = np.zeros(256, np.int64)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bytes, seconds, and numbers of one request; `max_held` is for all of them together."""

    max_body: int = 8 * MIB
    max_image_body: int = 48 * MIB
    """On `image_paths`, where pictures may stand in the body."""
    image_paths: frozenset[str] = frozenset()
    max_depth: int = 64
    """Of brackets in brackets."""
    max_containers: int = 200_000
    """Objects and lists in a body: each costs twenty times what it has in bytes."""
    max_headers: int = 100
    max_header_bytes: int = 32 * 1024
    """Names, values, and the path with its query."""
    body_grace: float = 10.0
    """Seconds that every body may take; a long one gets more at `min_body_rate`."""
    min_body_rate: int = 16 * 1024
    """Bytes per second."""
    max_held: int = 1024 * MIB
    """Bodies of all requests that have no answer yet."""

    def __post_init__(self) -> None:
        for name in ("max_body", "max_image_body", "max_depth", "max_containers", "max_headers", "max_header_bytes",
                     "body_grace", "min_body_rate", "max_held"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, is {getattr(self, name)}")


DEFAULT_LIMITS = RequestLimits()


class DepthScanner:
    """Finds out how deep a JSON text nests, and of how many objects and lists it is made, while it arrives. Of a text
    that is not JSON it says something else, and never less than a parser would see before it meets the error.
    """

    def __init__(self) -> None:
        self.deepest = 0
        self.containers = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the piece before ended behind a backslash

    def feed(self, piece: bytes) -> int:
        """Returns `deepest` so far. Time is linear in the piece, whatever it holds."""
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        if b"\\" in piece:
            piece = self._without_escapes(piece)
        parts = piece.split(b'"')
        outside = parts[1 if self._in_string else 0 :: 2]
        self._in_string ^= len(parts) % 2 == 0
        brackets = b"".join(outside).translate(None, _OTHER_BYTES)
        opening = brackets.count(b"[") + brackets.count(b"{")
        self.containers += opening
        if self._depth + opening > self.deepest:  # else there is nothing new to find
            depths = self._depth + np.cumsum(_STEP[np.frombuffer(brackets, np.uint8)])
            self.deepest = max(self.deepest, int(depths.max()))
        self._depth += 2 * opening - len(brackets)
        return self.deepest

    def _without_escapes(self, piece: bytes) -> bytes:
        """The piece without what backslashes escape, so that every quote left begins or ends a string."""
        piece = piece.replace(b"\\\\", b"")
        self._escaped = piece.endswith(b"\\")
        return piece.replace(b'\\"', b"")


class BodyLimits:
    """The middleware. render: path and error -> the error's body, in the shape of the path's protocol."""

    def __init__(self, app: App, limits: RequestLimits, render: Callable[[str, RequestError], bytes]) -> None:
        self._app = app
        self._limits = limits
        self._render = render
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes of bodies that are in memory now."""
        return self._held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body = _Body(self, scope["path"], receive)
        try:
            try:
                self._check_headers(scope)
                await body.read(dict(scope["headers"]))
            except RequestError as error:
                return await self._refuse(scope, receive, send, error, body.complete)
            except _GoneError:
                return
            await self._app(scope, body.replay, send)
        finally:
            self._held -= body.size

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        size += sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._limits.max_headers or size > self._limits.max_header_bytes:
            raise _refusal(431, "The request's headers are too large.", "headers_too_large")
        if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers):
            raise _refusal(415, "Compressed bodies are not accepted; send plain JSON.", "unsupported_encoding")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: RequestError, complete: bool) -> None:
        note_error(scope, error)
        page = self._render(scope["path"], error)
        if complete:
            await send_error(send, error, page)
        else:
            await refuse_unread(receive, send, error, page)


class _GoneError(Exception):
    """The client left before its body was complete."""


class _Body:
    """The body of one request on its way in."""

    def __init__(self, owner: BodyLimits, path: str, receive: Receive) -> None:
        limits = owner._limits
        self._owner = owner
        self._limits = limits
        self._cap = limits.max_image_body if path in limits.image_paths else limits.max_body
        self._receive = receive
        self._pieces: list[bytes] = []
        self._handed_over = False
        self.size = 0
        self.complete = False

    async def read(self, headers: dict[bytes, bytes]) -> None:
        """Raises a Refusal (413, 400 for depth, 408, 503), or _GoneError."""
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            self.complete = True
            return
        if length is not None and length.isdigit() and int(length) > self._cap:
            raise self._too_large()
        scanner = DepthScanner()
        loop = asyncio.get_running_loop()
        start = loop.time()
        while not self.complete:
            until = start + self._limits.body_grace + self.size / self._limits.min_body_rate
            try:
                async with asyncio.timeout_at(until):
                    message = await self._receive()
            except TimeoutError:
                raise _refusal(408, "The request's body came too slowly.", "body_timeout") from None
            piece = self._take(message)
            if b"\0" in piece:  # UTF-16 and UTF-32, in which the scanner would lose its way
                raise _refusal(400, "The body is not JSON in UTF-8.", "invalid_json")
            if scanner.feed(piece) > self._limits.max_depth:
                raise _refusal(
                    400, f"The JSON nests deeper than {self._limits.max_depth} levels.", "json_too_deep"
                )  # fmt: skip
            if scanner.containers > self._limits.max_containers:
                most = self._limits.max_containers
                raise _refusal(400, f"The JSON has more than {most} objects and lists.", "json_too_large")

    def _take(self, message: Message) -> bytes:
        if message["type"] == "http.disconnect":
            raise _GoneError
        piece: bytes = message.get("body", b"")
        self.complete = not message.get("more_body", False)
        self.size += len(piece)
        self._owner._held += len(piece)
        if self.size > self._cap:
            raise self._too_large()
        if self._owner._held > self._limits.max_held:
            raise Refusal(
                "The server is overloaded: it holds too many request bodies already. Try again later.",
                status=503, kind="overloaded_error", code="overloaded", retry_after=1.0,
            )  # fmt: skip
        if piece:
            self._pieces.append(piece)
        return piece

    async def replay(self) -> Message:
        """The app's `receive`: the body at once, then what the server says (that the client left)."""
        if self._handed_over:
            return await self._receive()
        self._handed_over = True
        body, self._pieces = b"".join(self._pieces), []
        return {"type": "http.request", "body": body, "more_body": False}

    def _too_large(self) -> Refusal:
        return _refusal(413, f"The request's body is larger than {self._cap} bytes.", "body_too_large")


def _refusal(status: int, message: str, code: str, **more: Any) -> Refusal:
    return Refusal(message, status=status, kind="invalid_request_error", code=code, **more)
