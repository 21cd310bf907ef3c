"""What the server's writer put into a stream comes out of it again, however the network cuts it."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_server import CHUNKED, answer, chunk, raw_server, read_request

from deepinfer.client import Address, Chunk, Connection, ServerRefusal, ServerUnreachable, stream_chat
from deepinfer.codec.chat.models import ChatRequest
from deepinfer.codec.chat.writer import writer
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.generation import Finish, GenerationRequest, Usage, WriterContext

EVENTS: list[Event] = [
    Reasoning("I think\n\u2028 so ", (0, 1)),
    Reasoning("…"),
    Content('Zürich 深度 "quoted" \\ \x00', (2,)),
    Content("data: [DONE]\n\n", (3,)),
    ToolStart(0, "call_a", "get"),
    ToolArguments(0, '{"city": "R'),
    ToolArguments(0, 'om\\n"}'),
    ToolEnd(0, '{"city": "Rom\\n"}', True),
    ToolStart(1, "call_b", "put"),
    ToolArguments(1, "{}"),
    ToolEnd(1, "{}", True),
]
USAGE = Usage(17, 8, 30, 2)
BODY = {"model": "m", "messages": [{"role": "user", "content": "q"}], "stream": True}


def frames(*, options: dict[str, bool] | None = None, error: RequestError | None = None) -> bytes:
    """A stream as the server writes it."""
    body = ChatRequest.model_validate({**BODY, "stream_options": options})
    context = WriterContext(id="1", created=0, model="m", token_bytes=lambda _: b"")
    out = writer(body, GenerationRequest(model="m", stream=True), context)
    start = out.start(Usage(17, 8)) + out.events(0, EVENTS, {}) + out.heartbeat()
    if error is not None:
        return start + out.error(error)
    return start + out.finish(0, Finish("tool_calls")) + out.end(USAGE)


async def collected(pieces: list[bytes]) -> list[Chunk]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED)
        for piece in pieces:
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(chunk(b""))

    async with raw_server(serve) as url, Connection(Address.parse(url)) as connection:
        return [chunk async for chunk in stream_chat(connection, BODY)]


def bare(events: list[Event]) -> list[Event]:
    """As they come over the wire: without the places of tokens; the ends of calls stand at the answer's end."""
    ends = [event for event in events if isinstance(event, ToolEnd)]
    others = [event for event in events if not isinstance(event, ToolEnd)]
    return [event._replace(tokens=()) if isinstance(event, Content | Reasoning) else event for event in others] + ends


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 3000), max_size=30))
def test_a_stream_cut_anywhere_gives_the_events_that_were_written(cuts: list[int]) -> None:
    whole = frames(options={"include_usage": True})
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    chunks = asyncio.run(collected([whole[a:b] for a, b in itertools.pairwise(places)]))
    assert [event for chunk in chunks for event in chunk.events] == bare(EVENTS)
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["tool_calls"]
    assert chunks[-1].usage == USAGE and all(chunk.usage is None for chunk in chunks[:-1])
    assert [chunk.at for chunk in chunks] == sorted(chunk.at for chunk in chunks)


def test_tokens_are_counted_piece_by_piece_where_the_server_says_them() -> None:
    whole = frames(options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in asyncio.run(collected([whole])) if chunk.usage]
    assert counts == [0, 2, 2, 3, 4, 4, 4, 4, 4, 4, 4, 30]


def test_an_error_inside_the_stream_is_the_servers_own() -> None:
    error = RequestError("the engine was lost", status=503, kind="server_error", code="engine_dead")
    with pytest.raises(ServerRefusal, match="the engine was lost") as caught:
        asyncio.run(collected([frames(error=error)]))
    assert caught.value.code == "engine_dead"


def test_a_stream_without_an_end_is_no_answer() -> None:
    whole = frames()
    cut = whole[: whole.index(b'"finish_reason":"tool_calls"')]
    with pytest.raises(ServerUnreachable, match="ended before the answer did"):
        asyncio.run(collected([cut]))


def test_something_else_than_chunks_is_told() -> None:
    for strange in (b"data: {]\n\n", b'data: {"choices": [{}]}\n\n', b"data: 5\n\n"):
        with pytest.raises(ServerUnreachable, match="no chunk of a chat completion"):
            asyncio.run(collected([strange]))


def test_leaving_a_stream_hangs_up_and_a_stream_that_was_read_keeps_the_line() -> None:
    async def run() -> tuple[bool, int]:
        left = asyncio.Event()
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            while (request := await read_request(reader)) is not None:
                if "/v1/chat" not in request[0]:
                    writer.write(answer(b"{}"))
                    continue
                writer.write(CHUNKED + chunk(frames()))
                if b"leave" not in request[1]:
                    writer.write(chunk(b""))
            left.set()

        async with raw_server(serve) as url, Connection(Address.parse(url)) as connection:
            for _ in range(2):
                assert [chunk async for chunk in stream_chat(connection, BODY)]
            assert connections == 1
            chunks = stream_chat(connection, {**BODY, "user": "leave"})
            await anext(chunks)
            await chunks.aclose()  # type: ignore[attr-defined]
            async with asyncio.timeout(5):
                await left.wait()
            return left.is_set(), connections

    assert asyncio.run(run()) == (True, 1)
