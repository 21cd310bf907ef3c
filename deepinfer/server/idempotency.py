"""Idempotency-Key: whoever sends a request again joins the one that runs, or gets the answer that it had.

ASGI middleware, so routes know nothing of it. A request with a key runs apart from its connection: what it sends goes
into a recording, every connection with the same key (of the same tenant) reads that from its beginning, and the request
learns of a disconnect when the last reader has left. Only answers of status 200 to 299 that came to their end well are
kept; after any other, the key is free again.

An answer longer than `max_answer` is not kept: its readers get it whole, but slow ones slow it down, and who comes
later with that key is told so (409).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.codec.errors import RequestError
from deepinfer.server.access_log import note_error
from deepinfer.server.asgi import App, Message, Receive, Scope, Send, header, send_error
from deepinfer.server.refusal import Refusal

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyLimits:
    lifetime: float = 600.0
    """Seconds that an answer is kept after its end."""
    max_requests: int = 4096
    """Running ones and kept ones."""
    max_answer: int = 4 << 20
    """Bytes of an answer that can be kept."""
    max_kept: int = 128 << 20
    """Bytes of all recordings; the oldest answers make room."""
    max_lag: int = 256 << 10
    """Bytes that a reader of an answer that is not kept may be behind before the answer waits for it."""


DEFAULT_IDEMPOTENCY = IdempotencyLimits()


class Recording:
    """What a request sends, for any number of readers."""

    def __init__(self, fingerprint: bytes, limits: IdempotencyLimits) -> None:
        self.fingerprint = fingerprint
        self.complete = False
        self.kept = True  # from its first message; False: too long
        self.size = 0  # bytes of the bodies that are in memory
        self.status = 0  # of the answer; 0 before it began
        self.ended: float | None = None  # when the app was done
        self._limits = limits
        self._messages: list[Message] = []
        self._first = 0  # number of _messages[0]
        self._readers: dict[object, int] = {}  # next message of each
        self._change = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def end(self) -> int:
        return self._first + len(self._messages)

    @property
    def abandoned(self) -> bool:
        """Nobody reads it, and it is not complete."""
        return not self._readers and not self.complete

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.wake()

    def wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def wait(self) -> None:
        """Until anything changed."""
        await self._change.wait()

    async def record(self, message: Message) -> None:
        """The app's `send`."""
        if self.abandoned or self.complete:
            return
        self._messages.append(message)
        self.status = message.get("status", self.status)
        self.size += len(message.get("body", b""))
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        self.kept = self.kept and self.size <= self._limits.max_answer
        self.wake()
        while not self.kept and not self.abandoned and not self.complete:
            self._forget_what_all_have_read()
            if self.size <= self._limits.max_lag:
                break
            await self.wait()

    async def read(self, send: Send, left: asyncio.Event, replayed: bool) -> None:
        """Sends everything from the first message on, until the end, or until `left` is set (and `wake` called).
        Raises what the app raised. A reader must be added before the first await after the recording was found.
        """
        reader = object()
        self._readers[reader] = 0
        try:
            while not left.is_set():
                number = self._readers[reader]
                if number < self.end:
                    message = dict(self._messages[number - self._first])  # those outside of us may change it
                    self._readers[reader] = number + 1
                    if message["type"] == "http.response.start" and replayed:
                        message["headers"] = [*message.get("headers", ()), (b"idempotency-replayed", b"true")]
                    if not self.kept:
                        self.wake()
                    await send(message)
                elif self.complete:
                    return
                elif self._error is not None:
                    raise RuntimeError("the request of this idempotency key failed") from self._error
                else:
                    await self.wait()
        finally:
            del self._readers[reader]
            if self.complete and not self.kept:
                self._forget_what_all_have_read()
            self.wake()

    def _forget_what_all_have_read(self) -> None:
        done = min(self._readers.values(), default=self.end) - self._first
        self.size -= sum(len(message.get("body", b"")) for message in self._messages[:done])
        del self._messages[:done]
        self._first += done


class Idempotency:
    """The middleware. render: path and error -> the error's body. now: seconds of a clock that never goes back."""

    def __init__(
        self,
        app: App,
        limits: IdempotencyLimits,
        render: Callable[[str, RequestError], bytes],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._limits = limits
        self._render = render
        self._now = now
        self._recordings: OrderedDict[tuple[str, str], Recording] = OrderedDict()
        """Running ones and kept ones; those that ended are in the order of their ends."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = header(scope, HEADER.lower().encode()) if scope["type"] == "http" and scope["method"] == "POST" else None
        if key is None:
            return await self._app(scope, receive, send)
        message: Message = {"more_body": True}
        pieces: list[bytes] = []
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            pieces.append(message.get("body", b""))
        try:
            recording, is_new = self._find(scope, key, b"".join(pieces))
        except RequestError as error:
            note_error(scope, error)
            return await send_error(send, error, self._render(scope["path"], error))
        left = asyncio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            recording.wake()

        watcher = asyncio.create_task(watch())
        try:
            await recording.read(send, left, replayed=not is_new)
        finally:
            watcher.cancel()

    def _find(self, scope: Scope, key: str, body: bytes) -> tuple[Recording, bool]:
        """The recording to read, and whether this is the request that makes it. Raises Refusal."""
        if not _KEY.fullmatch(key):
            raise _refusal(400, f"{HEADER} must be 1 to 255 visible ASCII characters.", "invalid_idempotency_key")
        principal = scope.get("state", {}).get("principal")
        name = (principal.tenant if principal else "", key)
        fingerprint = _fingerprint(scope, body)
        self._make_room()
        recording = self._recordings.get(name)
        if recording is not None:
            if recording.fingerprint != fingerprint:
                raise _refusal(
                    422, f"This {HEADER} was used for another request; take a new one.", "idempotency_key_reused"
                )
            if not recording.kept:
                raise _refusal(
                    409,
                    f"The answer to this {HEADER} is too long to be sent again; take a new one.",
                    "idempotency_answer_not_kept",
                )
            if (record := scope.get("state", {}).get("record")) is not None:
                record.replayed = True
            return recording, False
        if len(self._recordings) >= self._limits.max_requests:
            raise Refusal(
                f"Too many requests with an {HEADER} run already. Try again later.",
                status=503, kind="overloaded_error", code="overloaded", retry_after=1.0,
            )  # fmt: skip
        recording = self._recordings[name] = Recording(fingerprint, self._limits)
        task = asyncio.create_task(self._run(scope, body, name, recording))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return recording, True

    async def _run(self, scope: Scope, body: bytes, name: tuple[str, str], recording: Recording) -> None:
        pending: bytes | None = body

        async def receive() -> Message:
            nonlocal pending
            if pending is not None:
                given, pending = pending, None
                return {"type": "http.request", "body": given, "more_body": False}
            while not recording.abandoned and not recording.complete:
                await recording.wait()
            return {"type": "http.disconnect"}

        error: BaseException | None = None
        try:
            await self._app(scope, receive, recording.record)
        except BaseException as raised:
            error = raised
            if isinstance(raised, asyncio.CancelledError):
                raise
        finally:
            self._end(scope, name, recording, error)

    def _end(self, scope: Scope, name: tuple[str, str], recording: Recording, error: BaseException | None) -> None:
        record = scope.get("state", {}).get("record")
        if not recording.complete:
            recording.fail(error or RuntimeError("the app sent no whole answer"))
        well = recording.complete and 200 <= recording.status < 300
        well = well and not (record is not None and record.failed)
        if self._recordings.get(name) is not recording:
            return
        if not well:
            del self._recordings[name]
            return
        recording.ended = self._now()
        self._recordings.move_to_end(name)
        self._make_room()

    def _make_room(self) -> None:
        """Forgets answers that are old, the oldest where there are too many, and requests that nobody waits for."""
        oldest_kept = self._now() - self._limits.lifetime
        size = sum(recording.size for recording in self._recordings.values())
        for name, recording in list(self._recordings.items()):
            too_much = size > self._limits.max_kept or len(self._recordings) >= self._limits.max_requests
            old = recording.ended is not None and (recording.ended < oldest_kept or too_much)
            if recording.abandoned or old:
                size -= recording.size
                del self._recordings[name]


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    digest = hashlib.sha256(f"{scope['path']}?{scope.get('query_string', b'')!r}\n".encode(errors="surrogatepass"))
    digest.update(body)
    return digest.digest()


def _refusal(status: int, message: str, code: str) -> Refusal:
    return Refusal(message, status=status, kind="invalid_request_error", code=code, param=HEADER)
