"""Clients by the hundred: requests of every kind, and the ways in which clients fail to wait for the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

from faulty_core import SLOW

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
PHASES = (
    "connected", "half a head", "a head", "half a body", "sent", "sent", "a moment", "a moment", "first byte",
    "some bytes", "half closed", "more behind", "everything",
)  # fmt: skip


def body(path: str, chance: random.Random) -> dict[str, Any]:
    """Of a request to the tiny model: short or long, streamed or not, for one answer or several, held to a form or not,
    with a slow engine or a fast one."""
    text = chance.choice(("", "", "", SLOW)) + "".join(chance.choices("abc xyz", k=chance.randrange(1, 60)))
    said = [{"role": "user", "content": text}]
    length = chance.randrange(1, 50)
    fields: dict[str, Any] = {"model": "tiny", "stream": chance.random() < 0.5}
    if path == "/v1/completions":
        prompt: Any = chance.choice((text, [text, text + "!"]))
        return fields | {"prompt": prompt, "max_tokens": length, "n": chance.choice((1, 2)), "ignore_eos": True}
    if path == "/v1/responses":
        return fields | {"input": said, "max_output_tokens": length, "store": chance.random() < 0.5}
    fields |= {"messages": said, "max_tokens": length}
    if path == "/v1/messages":
        return fields | chance.choice(({}, {"stop_sequences": ["e"]}))
    schema = {"type": "object", "properties": {f"p{chance.randrange(20)}": {"type": "integer"}}}
    forms: tuple[dict[str, Any], ...] = (
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 3},
        {"stop": ["e"], "reasoning_effort": "none"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"regex": f"a{{{chance.randrange(20)}}}b*"}, "reasoning_effort": "none"},
    )
    return fields | chance.choice(forms)


def request(path: str, content: bytes, chance: random.Random) -> tuple[bytes, bytes]:
    """Head and body as they are sent."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    if chance.random() < 0.15:
        head += f"idempotency-key: {chance.randrange(8)}\r\n"
    if chance.random() < 0.1:
        head += "expect: 100-continue\r\n"
    if chance.random() < 0.2:
        return f"{head}transfer-encoding: chunked\r\n\r\n".encode(), b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    return f"{head}content-length: {len(content)}\r\n\r\n".encode(), content


async def vanish(port: int, seed: int) -> str:
    """One client, which leaves at some moment or other -> which."""
    chance = random.Random(seed)
    path = chance.choice(PATHS)
    head, content = request(path, json.dumps(body(path, chance)).encode(), chance)
    phase = chance.choice(PHASES)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        match phase:
            case "connected":
                pass
            case "half a head":
                writer.write(head[: chance.randrange(1, len(head))])
            case "a head":
                writer.write(head)
            case "half a body":
                writer.write(head + content[: chance.randrange(1, len(content))])
            case _:
                writer.write(head + content)
                await _wait(phase, reader, writer, chance)
    finally:
        if chance.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return phase


async def _wait(phase: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> None:
    match phase:
        case "sent":
            await writer.drain()
        case "a moment":
            await asyncio.sleep(chance.random() * 0.05)
        case "first byte":
            await reader.read(1)
        case "some bytes":
            for _ in range(chance.randrange(1, 5)):
                await reader.read(300)
        case "half closed":
            writer.write_eof()
            await reader.read()
        case "more behind":
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * chance.randrange(1, 10))
            await asyncio.sleep(chance.random() * 0.05)
        case "everything":
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            assert b"HTTP/1.1 5" not in answer, answer
            assert answer.endswith(b'{"status":"ok"}'), answer


async def storm(port: int, seeds: range, at_once: int) -> list[str]:
    """All of these clients, so many at once."""
    places = asyncio.Semaphore(at_once)

    async def one(seed: int) -> str:
        async with places:
            return await vanish(port, seed)

    return await asyncio.gather(*map(one, seeds))
