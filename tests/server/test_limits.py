"""Bodies that are too big, too deep, too slow or too many; and connections that are held for nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Iterator

import pytest
from asgi_calls import Answer, Call, echo, make_scope, read_all, render, run, serving
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.server.asgi import Message, Receive, Scope, Send
from deepinfer.server.connections import ConnectionLimits
from deepinfer.server.limits import BodyLimits, DepthScanner, RequestLimits

SMALL = RequestLimits(max_body=1000, max_image_body=3000, image_paths=frozenset({"/v1/images"}), max_depth=4)


def ask(body: bytes | Iterator[bytes] = b"", limits: RequestLimits = SMALL, **request) -> Answer:  # type: ignore[no-untyped-def]
    async def work() -> Answer:
        return await Call(BodyLimits(echo, limits, render), body, **request)

    return run(work())


# The depth of JSON, found in bytes.


def depth_of(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


texts = st.text(st.sampled_from('\\"[]{}a,:é\n'), max_size=8) | st.text(max_size=4)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]), data=st.data())
def test_depth_is_what_a_parser_would_see_wherever_the_body_is_cut(value, ascii_only, indent, data) -> None:  # type: ignore[no-untyped-def]
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    scanner = DepthScanner()
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        scanner.feed(body[start:end])
    assert scanner.deepest == depth_of(value)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 5,
        b'{"a":' * 5,
        b'["\\\\",[[[[',
        b'["\\"",[[[[',
        b'["]]]]",[[[[',
        b'["\\\\\\"]]]]\\\\",[[[[',
        b"[[]]" * 50 + b"[[[[[",
    ],
)
def test_brackets_that_nest_too_deeply_are_refused_before_a_parser_sees_them(body: bytes) -> None:
    answer = ask(body)
    assert (answer.status, answer.json["code"]) == (400, "json_too_deep")
    pieces = [body[i : i + 1] for i in range(len(body))]
    assert ask(iter(pieces)).json["code"] == "json_too_deep"


@pytest.mark.parametrize("body", [b"[[[[1]]]]", b'["[[[[[[[["]', b'["\\"[[[[[["]', b'{"a":"{{{{{{\\\\"}', b"]" * 500])
def test_brackets_in_strings_are_text(body: bytes) -> None:
    assert ask(body).status == 200


def test_utf_16_does_not_hide_brackets() -> None:
    body = '["\\"", [[[[[[[[1]]]]]]]]]'.encode("utf-16-le")
    assert (ask(body).status, ask(body).json["code"]) == (400, "invalid_json")


def test_a_hostile_body_is_scanned_in_time_that_its_length_bounds() -> None:
    """Steps of the scanner per byte do not grow: what is kept between pieces is a few numbers."""
    for piece in (b"[]" * 32768, b'"' * 65536, b"\\" * 65535, b'\\"' * 32768, b'["' * 32768):
        scanner = DepthScanner()
        for _ in range(16):
            scanner.feed(piece)
        assert set(vars(scanner)) == {"deepest", "containers", "_depth", "_in_string", "_escaped"}
        assert all(isinstance(value, int) for value in vars(scanner).values())


# Sizes.


def test_a_body_up_to_the_limit_passes_and_one_byte_more_does_not() -> None:
    assert (ask(b"x" * 1000).status, ask(b"x" * 1000).body) == (200, b"1000")
    answer = ask(b"x" * 1001)
    assert (answer.status, answer.json["code"], answer.headers["connection"]) == (413, "body_too_large", "close")
    assert answer.complete


def test_where_pictures_may_stand_more_is_allowed() -> None:
    assert ask(b"x" * 3000, path="/v1/images").status == 200
    assert ask(b"x" * 3001, path="/v1/images").status == 413


def test_a_length_that_lies_or_is_missing_is_counted_all_the_same() -> None:
    pieces = [b"x" * 100] * 11
    assert ask(iter(pieces), headers={"content-length": "10"}).status == 413
    scope = make_scope(headers={"transfer-encoding": "chunked"})
    assert ask(iter(pieces), scope=scope).status == 413
    assert ask(iter(pieces[:10]), scope=make_scope(headers={"transfer-encoding": "chunked"})).body == b"1000"


def test_the_announced_length_is_refused_without_reading() -> None:
    answer = ask(iter([b"x" * 500] * 3))
    assert (answer.status, answer.unread) == (413, 3)
    answer = ask(iter([b"x" * 500] * 4), headers={"content-length": "10"})
    assert (answer.status, answer.unread) == (413, 1)  # as far as it took to see


def test_too_many_or_too_long_headers_are_refused() -> None:
    many = {f"h{number}": "" for number in range(101)}
    for given_headers in (many, {"h": "x" * 40_000}):
        answer = ask(b"{}", headers=given_headers)
        assert (answer.status, answer.json["code"]) == (431, "headers_too_large")
    assert ask(b"{}", path="/" + "x" * 40_000).status == 431
    assert ask(b"{}", headers={f"h{number}": "x" for number in range(90)}).status == 200


def test_a_compressed_body_is_refused_so_that_no_bomb_unfolds() -> None:
    bomb = gzip.compress(b"0" * 100_000)
    assert len(bomb) < 1000
    assert ask(bomb, headers={"content-encoding": "gzip"}).status == 415
    assert ask(b"{}", headers={"content-encoding": "identity"}).status == 200


def test_a_request_without_a_body_waits_for_none() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def work() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await BodyLimits(app, SMALL, render)(make_scope(method="GET"), never, send)
        return sent

    assert run(work())[0]["status"] == 204


def test_bodies_of_all_requests_together_are_bounded_and_given_back() -> None:
    release = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()
        await echo(scope, receive, send)

    async def work() -> None:
        app = BodyLimits(slow, RequestLimits(max_body=1000, max_held=2500), render)
        held = [Call(app, b"x" * 1000) for _ in range(2)]
        await asyncio.sleep(0.01)
        answer = await Call(app, b"x" * 1000)
        assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, "overloaded", "1")
        release.set()
        assert [(await call).status for call in held] == [200, 200]
        assert app.held == 0
        assert (await Call(app, b"x" * 1000)).status == 200

    run(work())


def test_a_client_that_leaves_within_its_body_leaves_nothing() -> None:
    async def never_called(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    async def work() -> None:
        app = BodyLimits(never_called, SMALL, render)
        call = Call(app, [b"x" * 10], headers={"content-length": "100"})
        call._pieces = []
        call.leave()
        answer = await call
        assert answer.status == 0 and app.held == 0

    run(work())


def test_the_app_still_learns_that_its_client_left() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"{}"
        assert (await receive())["type"] == "http.disconnect"

    async def work() -> None:
        call = Call(BodyLimits(app, SMALL, render), b"{}")
        await asyncio.sleep(0)
        call.leave()
        await call

    run(work())


@pytest.mark.parametrize("name", ["max_body", "max_image_body", "max_depth", "max_headers", "max_held", "body_grace"])
def test_limits_of_nothing_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RequestLimits(**{name: 0})


# Over real sockets.


def request_head(length: int, path: str = "/v1/x") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {length}\r\n\r\n".encode()


def test_who_sends_too_much_reads_why_before_the_connection_closes() -> None:
    async def work() -> None:
        async with serving(BodyLimits(echo, RequestLimits(), render), ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head(20 << 20))

            async def pour() -> None:
                for _ in range(320):
                    writer.write(b"x" * 65536)
                    await writer.drain()

            pouring = asyncio.create_task(pour())
            answer = await read_all(reader)
            await pouring  # all of it was taken: no reset within
            assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer
            writer.close()

    run(work())


def test_a_body_that_drips_is_given_up() -> None:
    limits = RequestLimits(body_grace=0.2, min_body_rate=1000)

    async def work() -> None:
        async with serving(BodyLimits(echo, limits, render), ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head(10_000) + b"x")
            answer = await read_all(reader)
            assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
            writer.close()

    run(work())


def test_a_long_body_has_the_time_that_its_length_needs() -> None:
    limits = RequestLimits(body_grace=0.5, min_body_rate=200)

    async def work() -> None:
        async with serving(BodyLimits(echo, limits, render), ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head(5000))
            for _ in range(6):  # takes longer than the grace
                writer.write(b"x" * 500)
                await asyncio.sleep(0.1)
            writer.write(b"x" * 2000)
            answer = await asyncio.wait_for(reader.read(65536), 20)
            assert answer.startswith(b"HTTP/1.1 200")
            writer.close()

    run(work())


@pytest.mark.parametrize("sent", [b"", b"POST /v1/x HT", b"POST /v1/x HTTP/1.1\r\nHost: h", b"\r\n\r\n\r\n"])
def test_a_head_that_never_ends_is_given_up(sent: bytes) -> None:
    async def work() -> None:
        async with serving(echo, ConnectionLimits(head_seconds=0.15)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert (await read_all(reader)).startswith(b"HTTP/1.1 408")
            writer.close()

    run(work())


def test_a_head_that_drips_after_a_first_request_is_given_up_too() -> None:
    async def work() -> None:
        async with serving(echo, ConnectionLimits(head_seconds=0.15)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head(2) + b"{}")
            assert (await reader.read(65536)).startswith(b"HTTP/1.1 200")
            start = time.monotonic()
            dripping = asyncio.create_task(drip(writer, b"POST /v1/x HTTP/1.1\r\nHost: " + b"h" * 10_000))
            answer = await read_all(reader)
            dripping.cancel()
            assert answer.startswith(b"HTTP/1.1 408") and time.monotonic() - start >= 0.15
            writer.close()

    run(work())


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    for i in range(len(data)):
        writer.write(data[i : i + 1])
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"x" * 65536,
        b"POST /v1/x HTTP/1.1\r\nh: " + b"x" * 65536,
        b"POST /v1/x HTTP/1.1\r\n" + b"h: x\r\n" * 10_000,
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"t: x\r\n" * 10_000,
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"e" * 65536,
    ],
    ids=["path", "header", "headers", "trailers", "chunk extension"],
)
def test_what_frames_a_request_cannot_go_on_for_ever(endless: bytes) -> None:
    async def work() -> None:
        limited = BodyLimits(echo, RequestLimits(), render)
        async with serving(limited, ConnectionLimits(max_head_bytes=32768)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sent = 0

            async def pour() -> None:
                nonlocal sent
                tail = endless[-6:] * 8000
                writer.write(endless)
                while True:
                    writer.write(tail)
                    sent += len(tail)
                    await writer.drain()

            pouring = asyncio.create_task(pour())
            answer = await read_all(reader)
            pouring.cancel()
            await asyncio.gather(pouring, return_exceptions=True)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
            writer.close()

    run(work())


def test_a_trailer_never_becomes_a_header() -> None:
    seen: list[dict[bytes, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def work() -> None:
        async with serving(app, ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
            writer.write(b"x-api-key: forged\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(request_head(2) + b"{}")  # the next request's headers are its own again
            await until(lambda: len(seen) == 2)
            writer.close()

    run(work())
    assert set(seen[0]) == {b"host", b"transfer-encoding"} and set(seen[1]) == {b"host", b"content-length"}


def test_tiny_chunks_are_slow_but_fine() -> None:
    async def work() -> None:
        async with serving(BodyLimits(echo, RequestLimits(), render), ConnectionLimits(max_head_bytes=2000)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"5000"), 20)
            assert answer.startswith(b"HTTP/1.1 200")
            writer.close()

    run(work())


async def endless_stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Streams until its client has left; counts in `scope["app_state"]`."""
    gone = asyncio.create_task(until_gone(receive))
    running.add(gone)
    try:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
            await asyncio.sleep(0)
    finally:
        gone.cancel()
        running.discard(gone)


running: set[asyncio.Task[None]] = set()


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until(condition, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_reader_that_stops_reading_is_given_up() -> None:
    async def work() -> None:
        async with serving(endless_stream, ConnectionLimits(write_seconds=0.1)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(request_head(2) + b"{}")
            await until(lambda: running)
            await until(lambda: not running)
            writer.close()

    run(work())


def test_a_client_that_leaves_with_a_second_request_behind_the_first_ends_both() -> None:
    async def work() -> None:
        async with serving(endless_stream, ConnectionLimits()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((request_head(2) + b"{}") * 2)
            await reader.read(10_000)
            assert running
            writer.transport.abort()
            await until(lambda: not running)

    run(work())


def test_bytes_too_many_behind_a_request_do_not_cut_its_stream() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
            await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b""})

    async def work() -> None:
        async with serving(app, ConnectionLimits(head_seconds=0.1)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head(2) + b"{}")
            await reader.readuntil(b"piece")
            writer.write(b"\r\nPOST /v1")
            answer = await read_all(reader)
            assert answer.count(b"piece") == 3 and b"0\r\n\r\nHTTP/1.1 408" in answer
            writer.close()

    run(work())


def test_connections_are_numbered() -> None:
    async def work() -> None:
        async with serving(echo, ConnectionLimits(max_connections=3)) as port:
            open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert (await read_all(reader)).startswith(b"HTTP/1.1 503")
            writer.close()
            open_ones.pop()[1].close()
            await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head(2) + b"{}")
            assert (await reader.read(65536)).startswith(b"HTTP/1.1 200")
            for _, each in [*open_ones, (reader, writer)]:
                each.close()

    run(work())


def test_requests_one_after_another_share_a_connection() -> None:
    async def work() -> None:
        async with serving(BodyLimits(echo, RequestLimits(), render), ConnectionLimits(head_seconds=0.6)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(4):
                writer.write(request_head(2) + b"{}")
                assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.2)  # idle in between; together longer than a head may take
            writer.close()

    run(work())
