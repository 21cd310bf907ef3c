"""A streamed chat completion, read back into the events that the server's parser made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from deepinfer.client.http import Answer, Connection, ServerUnreachable
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.generation import Usage

PATH = "/v1/chat/completions"


class ServerRefusal(RuntimeError):
    """The server answered, and the answer is an error. status: of HTTP; that of the stream for one inside a stream."""

    def __init__(self, message: str, *, status: int, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.retry_after = retry_after


class Chunk(NamedTuple):
    """One event of the stream. Chunks that came in the same piece have the same `at`."""

    at: float  # time.perf_counter()
    events: tuple[Event, ...]
    finish: str | None  # finish_reason, in the protocol's words
    usage: Usage | None  # with stream_options: so far, and in the last chunk of all


async def stream_chat(connection: Connection, body: Mapping[str, Any]) -> AsyncIterator[Chunk]:
    """body: a request of Chat Completions with one completion; `stream` is added. Leaving the loop cancels the request.

    Raises ServerRefusal, and ServerUnreachable for a stream that breaks off.
    """
    message = msgspec.json.encode({**body, "stream": True})
    async with connection.request("POST", PATH, message) as answer:
        if answer.status != 200:
            raise await refusal(answer)
        calls = _Calls()
        lines = _data_lines(answer)
        async with aclosing(lines):  # type: ignore[type-var]
            async for at, data in lines:
                if data == b"[DONE]":
                    # what follows is the end of the body: read, so that the connection may be used again
                    continue
                yield _chunk(at, data, calls, answer.status)
        if not calls.is_done:
            raise ServerUnreachable(f"{connection.address}: the stream ended before the answer did")


async def refusal(answer: Answer) -> ServerRefusal:
    """The error that an answer tells of."""
    raw = await answer.body()
    try:
        error = json.loads(raw)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message, code = f"status {answer.status}: {raw[:200].decode('utf-8', 'replace')}", None
    try:
        retry_after = float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        retry_after = None
    return ServerRefusal(message, status=answer.status, code=code, retry_after=retry_after)


async def _data_lines(answer: Answer) -> AsyncIterator[tuple[float, bytes]]:
    rest = b""
    async for at, piece in answer.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield at, line[6:].rstrip(b"\r")


class _Calls:
    """The calls of an answer, whose ends the protocol does not tell."""

    def __init__(self) -> None:
        self.arguments: dict[int, list[str]] = {}
        self.is_done = False

    def end(self) -> list[Event]:
        self.is_done = True
        ends: list[Event] = []
        for call, pieces in self.arguments.items():
            text = "".join(pieces)
            ends.append(ToolEnd(call, text, _is_json(text)))
        return ends


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _chunk(at: float, data: bytes, calls: _Calls, status: int) -> Chunk:
    try:
        value = msgspec.json.decode(data)
        if "error" in value:
            error = value["error"]
            raise ServerRefusal(str(error["message"]), status=status, code=error.get("code"))
        usage, choices = value.get("usage"), value["choices"]
        events: list[Event] = []
        finish = None
        for choice in choices:
            events += _events(choice["delta"], calls)
            finish = choice.get("finish_reason")
        if finish is not None:
            events += calls.end()
        return Chunk(at, tuple(events), finish, None if usage is None else _usage(usage))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerUnreachable(
            f"the server sent something that is no chunk of a chat completion ({error!r})"
        ) from None


def _events(delta: Mapping[str, Any], calls: _Calls) -> list[Event]:
    events: list[Event] = []
    if delta.get("reasoning_content"):
        events.append(Reasoning(delta["reasoning_content"]))
    if delta.get("content"):
        events.append(Content(delta["content"]))
    for call in delta.get("tool_calls") or ():
        number, function = call["index"], call["function"]
        if number not in calls.arguments:
            calls.arguments[number] = []
            events.append(ToolStart(number, call["id"], function["name"]))
        if function.get("arguments"):
            calls.arguments[number].append(function["arguments"])
            events.append(ToolArguments(number, function["arguments"]))
    return events


def _usage(value: Mapping[str, Any]) -> Usage:
    return Usage(
        value["prompt_tokens"],
        (value.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        value["completion_tokens"],
        (value.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )
