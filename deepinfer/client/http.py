"""HTTP/1.1 as far as asking one server needs it: a connection that is kept, answers that stream.

A body's pieces come with the moment when they were read, so that who measures does not measure himself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 10.0
READ_BYTES = 1 << 16


class ServerUnreachable(OSError):
    """Nobody answers, or what answers does not speak HTTP, or it hung up. The message is for people."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    scheme: str
    host: str
    port: int
    path: str
    """Before every path of the API; no slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """ValueError for what is no address of a server. An address that ends in /v1, as SDKs want it, works too."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"server: {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"server: {url!r} is not an address such as http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, default if port is None else port, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


class Answer:
    """What came back. `pieces` may be read once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._arrived: list[tuple[float, bytes]] = []
        self._read_at = 0.0
        self.is_headed = False
        self.is_whole = False
        self.keeps_alive = False
        """The connection may be used again."""

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.is_headed = True

    def on_body(self, body: bytes) -> None:
        self._arrived.append((self._read_at, body))

    def on_message_complete(self) -> None:
        self.is_whole = True
        self.keeps_alive = self._connection.keeps_alive()

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """(time.perf_counter() when it was read, bytes). ServerUnreachable if the body does not come to its end."""
        while True:
            for piece in self._arrived:
                yield piece
            self._arrived.clear()
            if self.is_whole:
                return
            await self._connection.read_into(self)

    async def body(self) -> bytes:
        return b"".join([piece async for _, piece in self.pieces()])

    def arrived_now(self) -> None:
        self._read_at = time.perf_counter()


class Connection:
    """One connection to a server, opened when it is needed and kept between requests; for one request at a time.

    An answer that is not read to its end closes it, which tells the server that nobody wants the rest.
    """

    def __init__(self, address: Address, *, api_key: str | None = None) -> None:
        self.address = address
        self._headers = {} if not api_key else {"authorization": f"Bearer {api_key}"}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._parser: httptools.HttpResponseParser | None = None

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """At once: nothing waits for the other side."""
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed already
                self._writer.transport.abort()
        self._reader = self._writer = None

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Answer]:
        """path: behind the address's own. ServerUnreachable."""
        head = self._head(method, path, body, headers or {})
        answer = await self._exchange(head + (body or b""))
        try:
            yield answer
        finally:
            if not answer.keeps_alive:
                self.close()

    def keeps_alive(self) -> bool:
        """Whether the answer allows another request here; known when its last byte is parsed, and not later."""
        return self._parser is not None and self._parser.should_keep_alive()

    async def _exchange(self, message: bytes) -> Answer:
        """Sends, and reads until the headers are there; once more on a new connection if a kept one turns out closed:
        servers hang up on idle connections, most likely before this request came."""
        is_kept = self._writer is not None
        try:
            return await self._send(message)
        except ServerUnreachable:
            if not is_kept:
                raise
        return await self._send(message)

    async def _send(self, message: bytes) -> Answer:
        try:
            if self._writer is None:
                await self._open()
            assert self._writer is not None
            answer = Answer(self)
            self._parser = httptools.HttpResponseParser(answer)
            self._writer.write(message)
            await self._writer.drain()
            while not answer.is_headed:
                await self.read_into(answer)
            answer.status = self._parser.get_status_code()
            return answer
        except ServerUnreachable:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ServerUnreachable(f"{self.address}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    async def _open(self) -> None:
        address = self.address
        secure = ssl.create_default_context() if address.scheme == "https" else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._reader, self._writer = await asyncio.open_connection(address.host, address.port, ssl=secure)
        except TimeoutError:
            raise ServerUnreachable(f"{address}: no connection in {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                raise ServerUnreachable(f"{address}: nobody listens there; is `deepinfer serve` running?") from error
            raise ServerUnreachable(f"{address}: {error.strerror or error}") from error

    async def read_into(self, answer: Answer) -> None:
        """Waits for more bytes. ServerUnreachable."""
        if self._reader is None or self._parser is None:
            raise ServerUnreachable(f"{self.address}: the connection is closed")
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise ServerUnreachable(f"{self.address}: the connection was lost ({error.strerror or error})") from error
        if not data:
            raise ServerUnreachable(f"{self.address}: the server closed the connection before the end of its answer")
        answer.arrived_now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ServerUnreachable(f"{self.address}: what answers does not speak HTTP ({error})") from None

    def _head(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        address = self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        default = {"http": 80, "https": 443}[address.scheme]
        lines = {"host": host if address.port == default else f"{host}:{address.port}", **self._headers}
        if body is not None:
            lines |= {"content-type": "application/json", "content-length": str(len(body))}
        text = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **headers}.items())
        return f"{method} {address.path}{path} HTTP/1.1\r\n{text}\r\n".encode("latin-1")
