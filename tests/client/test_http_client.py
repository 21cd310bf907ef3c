"""The HTTP client against servers that behave, and servers that do not."""

from __future__ import annotations

import asyncio

import pytest
from raw_server import CHUNKED, answer, chunk, raw_server, read_request

from deepinfer.client import Address, Connection, Exposition, ServerRefusal, ServerUnreachable, model_names, scrape


@pytest.mark.parametrize(
    "url, whole",
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://example.org", "http://example.org:80"),
        ("https://example.org/", "https://example.org:443"),
        ("http://example.org:8000/v1/", "http://example.org:8000"),
        ("http://[::1]:9/behind/a/proxy", "http://[::1]:9/behind/a/proxy"),
    ],
)
def test_addresses_are_read_as_people_write_them(url: str, whole: str) -> None:
    assert str(Address.parse(url)) == whole


@pytest.mark.parametrize("url", ["", "http://", "ftp://a", "http://a:port", "http://a:99999", "http://a?b=c"])
def test_what_is_no_address_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match="server"):
        Address.parse(url)


@pytest.mark.parametrize("headers", [(), ("connection: close",)])
def test_a_connection_is_kept_as_long_as_the_server_wants_and_then_opened_again(headers: tuple[str, ...]) -> None:
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        while connections[-1] < 2 and await read_request(reader) is not None:
            connections[-1] += 1
            writer.write(answer(b'{"data": [{"id": "a"}]}', "200 OK", *headers))

    async def ask() -> None:
        async with raw_server(serve) as url, Connection(Address.parse(url)) as connection:
            for _ in range(5):
                assert await model_names(connection) == ["a"]

    asyncio.run(ask())
    assert connections == ([1] * 5 if headers else [2, 2, 1])


def test_the_key_and_the_path_before_the_api_go_along() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(b'dsv_tokens_total{a="1"} 3\n'))

    async def ask() -> Exposition:
        async with (
            raw_server(serve) as url,
            Connection(Address.parse(url + "/proxy/v1"), api_key="secret") as connection,
        ):
            return await scrape(connection)

    assert asyncio.run(ask()).sums == {"tokens_total": 3.0}
    assert seen[0].startswith(b"GET /proxy/metrics HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nauthorization: Bearer secret\r\n" in seen[0]


@pytest.mark.parametrize(
    "sent, words",
    [
        (b"", "closed the connection before the end"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "closed the connection before the end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", "closed the connection before the end"),
        (CHUNKED + chunk(b"abc"), "closed the connection before the end"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak HTTP"),
        (answer(b"<html>"), "no model server"),
    ],
)
def test_a_server_that_breaks_off_or_is_none_is_told_in_words(sent: bytes, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)

    async def ask() -> None:
        async with raw_server(serve) as url, Connection(Address.parse(url)) as connection:
            await model_names(connection)

    with pytest.raises(ServerUnreachable, match=words):
        asyncio.run(ask())


def test_nobody_there_is_told_in_words() -> None:
    with pytest.raises(ServerUnreachable, match="nobody listens there"):
        asyncio.run(model_names(Connection(Address.parse("http://127.0.0.1:1"))))


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"error": {"message": "no", "code": "c"}}', "no"),
        (b"<h1>Bad gateway</h1>", "status 503: <h1>Bad gateway</h1>"),
        (b'["x"]', 'status 503: ["x"]'),
    ],
)
def test_a_refusal_says_what_the_server_said(body: bytes, message: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer(body, "503 Service Unavailable", "retry-after: 2"))

    async def ask() -> None:
        async with raw_server(serve) as url, Connection(Address.parse(url)) as connection:
            await scrape(connection)

    with pytest.raises(ServerRefusal) as caught:
        asyncio.run(ask())
    assert (caught.value.message, caught.value.status, caught.value.retry_after) == (message, 503, 2.0)


def test_figures_are_summed_over_labels_and_a_restart_does_not_count_backwards() -> None:
    before = Exposition.parse('dsv_n_total{a="x y",b="1"} 5\ndsv_n_total{a="z"} 1.5e1\nother 7\n# dsv_n_total 9\n')
    after = Exposition.parse('dsv_n_total 4\ndsv_build_info{model="a\\"b",version="1"} 1.0\n')
    assert before.sums == {"n_total": 20.0}
    assert (after.growth(before, "n_total"), before.growth(after, "n_total")) == (4.0, 16.0)
    assert after.growth(before, "nothing") == 0.0
    assert after.build == {"model": 'a\\"b', "version": "1"}
