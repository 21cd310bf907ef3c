"""Connections as odd or hostile clients use them: many requests at once, other protocols asked for, early leaves."""

from __future__ import annotations

import asyncio

import pytest
from asgi_calls import read_all, run, serving

from deepinfer.server.asgi import Receive, Scope, Send
from deepinfer.server.connections import ConnectionLimits

POST = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


class Recorder:
    """An app that notes the bodies it gets, and the paths; it answers when `release` is set."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.left = 0  # requests whose client went away before the answer
        self.release = asyncio.Event()
        self.release.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        gone = asyncio.create_task(receive())
        released = asyncio.create_task(self.release.wait())
        await asyncio.wait({gone, released}, return_when=asyncio.FIRST_COMPLETED)
        self.left += gone.done()
        for task in (gone, released):
            task.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def post(body: bytes, headers: bytes = b"") -> bytes:
    return POST + headers + b"content-length: %d\r\n\r\n" % len(body) + body


CHUNKED = POST + H2C + b'transfer-encoding: chunked\r\n\r\n3\r\n{"a\r\n3\r\n":1\r\n1\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n'


@pytest.mark.parametrize("size", [1, 7, 1 << 20], ids=["byte by byte", "in pieces", "at once"])
@pytest.mark.parametrize("whole", [post(b'{"a":1}', H2C), CHUNKED], ids=["length", "chunks"])
def test_a_client_that_would_rather_speak_http_2_is_served_as_it_is(size: int, whole: bytes) -> None:
    """Java's client asks so with every request; the body and what comes behind it must not get lost."""

    async def work() -> None:
        app = Recorder()
        async with serving(app, ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for data in (whole, post(b"{}"), whole):
                for at in range(0, len(data), size):
                    writer.write(data[at : at + size])
                    await asyncio.sleep(0)
                    if size == 1:
                        await writer.drain()
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 20)).startswith(b"HTTP/1.1 200")
            writer.close()
        assert app.bodies == [b'{"a":1}', b"{}", b'{"a":1}']
        assert b"x-trailer" not in app.headers[0] and app.headers[0][b"upgrade"] == b"h2c"

    run(work())


def test_a_request_for_a_web_socket_without_a_body_is_answered_and_the_next_one_too() -> None:
    async def work() -> None:
        app = Recorder()
        async with serving(app, ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"GET /v1/x HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" + post(b"2")
            )
            answers = [await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 20) for _ in range(2)]
            assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
            writer.close()
        assert app.bodies == [b"", b"2"]

    run(work())


def test_framing_that_contradicts_itself_is_refused_behind_an_upgrade_too() -> None:
    """Where two readers disagree on the end of a body, the second could be made to read a request that is none."""

    async def work() -> None:
        app = Recorder()
        async with serving(app, ConnectionLimits()) as port:
            for framing in (
                b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
                b"content-length: 2\r\ncontent-length: 9\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(POST + H2C + framing + b"\r\n{}" + post(b"forged"))
                assert b"HTTP/1.1 200" not in await read_all(reader)
                writer.close()
        assert b"forged" not in app.bodies

    run(work())


def test_requests_without_number_behind_one_that_runs_end_the_connection() -> None:
    async def work() -> None:
        app = Recorder()
        app.release.clear()
        async with serving(app, ConnectionLimits(max_waiting=4, max_waiting_bytes=100_000)) as port:
            for flood in (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 10_000, post(b"x" * 200_000) * 2):
                before = app.left
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(post(b"first") + flood)
                assert await read_all(reader) == b""
                writer.close()
                await until(lambda before=before: app.left == before + 1)  # type: ignore[misc]
        assert app.bodies == [b"first", b"first"]

    run(work())


def test_a_few_requests_behind_one_that_runs_are_answered_in_their_order() -> None:
    async def work() -> None:
        app = Recorder()
        app.release.clear()
        async with serving(app, ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for number in range(8):
                writer.write(post(b"%d" % number + b"x" * 70_000))
            await until(lambda: app.bodies)
            await asyncio.sleep(0.2)
            app.release.set()
            for _ in range(8):
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 20)).startswith(b"HTTP/1.1 200")
            writer.close()
        assert [body[:1] for body in app.bodies] == [b"%d" % number for number in range(8)]

    run(work())


def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_behind_its_request() -> None:
    """Not only when the answer is written: one that comes at once, at its end, would be computed for nobody."""

    async def work() -> None:
        app = Recorder()
        app.release.clear()
        async with serving(app, ConnectionLimits()) as port:
            for behind in (b"", b"GE", post(b"{}"), post(b"{}") * 3, post(b"x" * 100_000), b"\r\n\r\n"):
                before = app.left
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(post(b"{}") + behind)
                await until(lambda before=before: len(app.bodies) > before)  # type: ignore[misc]
                await asyncio.sleep(0.05)  # what is behind has come too
                writer.close()
                await until(lambda before=before: app.left == before + 1, 5)  # type: ignore[misc]

    run(work())


def test_garbage_behind_a_request_never_gets_into_its_answer() -> None:
    async def work() -> None:
        app = Recorder()
        app.release.clear()
        async with serving(app, ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(b"{}"))
            await until(lambda: app.bodies)
            writer.write(b"\x16\x03\x01\x02\r\n")
            assert await read_all(reader) == b""
            writer.close()

    run(work())


async def until(condition, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
