"""Calls to an ASGI app without a server, and a real server around one where sockets matter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvicorn

from deepinfer.codec.errors import RequestError
from deepinfer.server.asgi import App, Message, Receive, Scope, Send
from deepinfer.server.connections import ConnectionLimits, bounded_protocol

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
    return asyncio.run(asyncio.wait_for(work, seconds))


def render(path: str, error: RequestError) -> bytes:
    return json.dumps({"path": path, "code": error.code, "message": error.message, "param": error.param}).encode()


def make_scope(path: str = "/v1/x", method: str = "POST", headers: dict[str, str] | None = None) -> Scope:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": raw, "state": {},
    }  # fmt: skip


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    unread: int = 0  # pieces of the request that had not been taken when the answer began

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Call:
    """A request to `app`, and its client: `await call` for the answer, `leave()` to vanish."""

    def __init__(
        self, app: App, body: bytes | Iterable[bytes] = b"", *, scope: Scope | None = None, path: str = "/v1/x",
        method: str = "POST", headers: dict[str, str] | None = None, send_delay: float = 0.0,
    ) -> None:  # fmt: skip
        pieces = [body] if isinstance(body, bytes) else list(body)
        given = {} if method == "GET" else {"content-length": str(sum(map(len, pieces)))}
        self.scope = scope or make_scope(path, method, {**given, **(headers or {})})
        self.answer = Answer()
        self.left = asyncio.Event()
        self.progress = asyncio.Event()  # a message came
        self._pieces = pieces
        self._send_delay = send_delay
        self.task = asyncio.create_task(app(self.scope, self.receive, self.send))  # type: ignore[arg-type]

    async def receive(self) -> Message:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._send_delay:
            await asyncio.sleep(self._send_delay)
        if message["type"] == "http.response.start":
            self.answer.status, self.answer.unread = message["status"], len(self._pieces)
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.answer.body += message.get("body", b"")
            self.answer.complete = not message.get("more_body", False)
        self.progress.set()

    def leave(self) -> None:
        self.left.set()

    def __await__(self):  # type: ignore[no-untyped-def]
        async def done() -> Answer:
            await self.task
            return self.answer

        return done().__await__()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's size."""
    size = len((await receive())["body"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


@contextlib.asynccontextmanager
async def serving(app: App, limits: ConnectionLimits) -> AsyncIterator[int]:
    """A real uvicorn on a free port of this machine, in this event loop. Yields the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, http=bounded_protocol(limits), ws="none", lifespan="off", log_level="critical", access_log=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def read_all(reader: asyncio.StreamReader, seconds: float = 20.0) -> bytes:
    """Until the server closes; a reset counts as the end of what was read."""
    out = b""
    async with asyncio.timeout(seconds):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                out += piece
    return out
