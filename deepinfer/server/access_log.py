"""One line of JSON per request, and the request's id in every answer.

`AccessLog` is the outermost middleware. It puts a `RequestRecord` into `scope["state"]["record"]`; routes fill in what
only they know, `record_of(request.scope)` gets it. The text of prompts and answers is in no line unless the log was
made with `with_text=True`, and then only where a route gave it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import RawIOBase
from typing import BinaryIO

from deepinfer.codec.errors import RequestError
from deepinfer.codec.generation import Usage
from deepinfer.server.asgi import App, Message, Receive, Scope, Send, header
from deepinfer.server.keys import Principal

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SHOWN_PATH = 256  # characters
CLIENT_LEFT = 499  # the status in the log where a client left before its answer began
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines: a line only where one begins to fail, or fails in another way."""
FAILURES = frozenset({"error", "abort", "deadline"})
"""Reasons of Finish that are none of the model's."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What the log will say, and the traces. Who handles the request fills in what he knows; a field that stays None is
    not in the line. Moments are seconds of time.monotonic.
    """

    request_id: str
    """Echoed as x-request-id: the client's own where it is 1 to 128 of letters, digits and ._:/+=@-, so not unique."""
    method: str
    path: str
    arrival: float
    # Of the door.
    tenant: str | None = None
    key_id: str | None = None
    replayed: bool | None = None
    """The answer is that of an earlier request with the same idempotency key."""
    error: str | None = None
    """Code or kind of the error that was answered."""
    trace_id: str | None = None
    # Of the routes.
    operation: str | None = None
    """"chat" or "text_completion"."""
    model: str | None = None
    stream: bool | None = None
    parameters: dict[str, float] = field(default_factory=dict)
    """max_tokens, temperature, top_p, top_k, seed: as far as given. Not in the line."""
    ignored: list[str] | None = None
    """Fields without effect."""
    engine_id: str | None = None
    """Of the request in the engine's own log."""
    response_id: str | None = None
    encoding: tuple[float, float] | None = None
    """When rendering and encoding of the prompt began and ended."""
    submitted: float | None = None
    """When the engine was given it."""
    first_token: float | None = None
    last_token: float | None = None
    """None = when the request ended."""
    decoding_seconds: float = 0.0
    """Spent on parsing and rendering the answer."""
    queue_seconds: float | None = None
    """Waited in the engine before its first step."""
    accepted_ratio: float | None = None
    """Drafts accepted over drafts verified."""
    usage: Usage | None = None
    finish: str | None = None
    """How the first completion ended (Finish.reason); "error" for an answer that failed on its way."""
    prompt: str | None = None
    answer: str | None = None
    """In the line of a log with text only."""
    # Of the wire.
    status: int | None = None
    sent: int = 0
    """Bytes of the body."""
    disconnected: bool = False

    def identify(self, principal: Principal) -> None:
        self.tenant, self.key_id = principal.tenant or None, principal.key_id or None

    def saw_first_token(self) -> None:
        """Further calls do nothing."""
        if self.first_token is None:
            self.first_token = time.monotonic()

    @property
    def failed(self) -> bool:
        """The answer that was begun did not come to its end."""
        return self.finish in FAILURES

    def line(self, now: float, with_text: bool) -> bytes:
        """now: seconds, time.monotonic. Ends with a line feed and holds no other."""
        values: dict[str, object] = {
            "time": round(time.time(), 3),
            "request_id": self.request_id,
            "engine_id": self.engine_id,
            "trace_id": self.trace_id,
            "tenant": self.tenant,
            "key": self.key_id,
            "method": self.method,
            "path": self.path[:_SHOWN_PATH],
            "status": self.status,
            "model": self.model,
            "stream": self.stream,
            "finish": self.finish,
            "error": self.error,
            "ttft_ms": _milliseconds(self.arrival, self.first_token),
            "duration_ms": _milliseconds(self.arrival, now),
            "bytes": self.sent,
            "disconnected": self.disconnected or None,
            "replayed": self.replayed,
            "ignored": self.ignored or None,
        }
        if self.usage is not None:
            values |= self.usage._asdict()
        if with_text:
            values |= {"prompt": self.prompt, "answer": self.answer}
        shown = {name: value for name, value in values.items() if value is not None}
        return json.dumps(shown, separators=(",", ":"), default=str).encode() + b"\n"


def _milliseconds(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 1)


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["state"]["record"]
    return record


def note_error(scope: Scope, error: RequestError) -> None:
    """The line will name `error`. Without a record (no AccessLog outside) it does nothing."""
    record = scope.get("state", {}).get("record")
    if record is not None:
        record.error = error.code or error.kind


class AccessLog:
    """The middleware. write: takes a line; it must not block (`LogWriter.write` does not). None = no lines, but ids
    and records all the same.
    """

    def __init__(
        self,
        app: App,
        write: Callable[[bytes], object] | None,
        *,
        with_text: bool = False,
        quiet_paths: Iterable[str] = QUIET_PATHS,
    ) -> None:
        self._app = app
        self._write = write
        self._with_text = with_text
        self._quiet = dict.fromkeys(quiet_paths, 200)  # the latest status of each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = header(scope, b"x-request-id")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(
            request_id=request_id, method=scope["method"], path=scope["path"], arrival=time.monotonic()
        )
        scope.setdefault("state", {})["record"] = record
        ids = [(b"x-request-id", request_id.encode())]
        if scope["path"].startswith("/v1/messages"):
            ids.append((b"request-id", request_id.encode()))  # where Anthropic's clients look
        complete = False

        async def noting_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                record.disconnected = True
            return message

        async def noting_send(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *ids]
            else:
                record.sent += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, noting_receive, noting_send)
        except Exception:
            record.status, record.error = record.status or 500, record.error or "exception"
            raise
        finally:
            if record.status is None:
                record.status = CLIENT_LEFT
            if self._write is not None and self._has_news(record.path, record.status):
                self._write(record.line(time.monotonic(), self._with_text))

    def _has_news(self, path: str, status: int) -> bool:
        if path not in self._quiet:
            return True
        before, self._quiet[path] = self._quiet[path], status
        return status >= 400 and status != before


class LogWriter:
    """Writes lines in a thread of its own: a full pipe must not stop the event loop. When `max_lines` wait already, a
    line is dropped, and how many were is written as soon as there is room.
    """

    def __init__(self, file: BinaryIO | RawIOBase, max_lines: int = 10_000) -> None:
        self._file = file
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_lines)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float = 5.0) -> None:
        """Writes what waits, for at most `timeout` seconds."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            if self.dropped > told:
                line += json.dumps({"dropped_lines": self.dropped - told}).encode() + b"\n"
                told = self.dropped
            try:
                self._write_all(line)
                if self._lines.empty():
                    self._file.flush()
            except (OSError, ValueError):  # the disk is full, the pipe is closed: serving goes on
                self.dropped += 1
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()

    def _write_all(self, line: bytes) -> None:
        """A file without a buffer takes what it has room for, and one that never waits perhaps nothing."""
        while line:
            written = self._file.write(line)
            if written is None:
                time.sleep(0.05)
            else:
                line = line[written:]
