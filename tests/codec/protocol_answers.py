"""Outputs of a model as neutral events, and the official SDKs as readers of what our writers make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import anthropic
import httpx2  # the HTTP library that both SDKs bring along
import openai
from hypothesis import strategies as st

from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.generation import AnswerWriter, Finish, TokenLogprob, Usage, WriterContext

CONTEXT = WriterContext(
    id="0a1b", created=1700000000, model="flash", token_bytes=lambda i: bytes([i]), fingerprint="fp"
)
USAGE = Usage(prompt_tokens=20, cached_tokens=5, completion_tokens=9, reasoning_tokens=4)
BEFORE = USAGE._replace(completion_tokens=0, reasoning_tokens=0)
STOP = Finish("stop")


class Call(NamedTuple):
    name: str
    arguments: str  # JSON of an object


class Output(NamedTuple):
    reasoning: str = ""
    text: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def finish(self) -> Finish:
        return Finish("tool_calls") if self.calls else STOP

    def events(self, cut: int = 3, cut_last: bool = False) -> list[Event]:
        """Every text in pieces of `cut` characters. cut_last: the last call ends inside its arguments."""
        events: list[Event] = [Reasoning(piece) for piece in pieces(self.reasoning, cut)]
        events += [Content(piece) for piece in pieces(self.text, cut)]
        for number, call in enumerate(self.calls):
            whole = not (cut_last and number == len(self.calls) - 1)
            arguments = call.arguments if whole else call.arguments[:-1]
            events.append(ToolStart(number, f"id_{number}", call.name))
            events += [ToolArguments(number, piece) for piece in pieces(arguments, cut)]
            events.append(ToolEnd(number, arguments, whole))
        return events


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def play(
    writer: AnswerWriter,
    events: Sequence[Event],
    finish: Finish = STOP,
    *,
    at_once: int = 1,
    logprobs: Mapping[int, TokenLogprob] = {},
    usage: Usage = USAGE,
) -> bytes:
    """The body of the answer. at_once: events that come together."""
    body = [writer.start(BEFORE)]
    body += [writer.events(0, events[at : at + at_once], logprobs) for at in range(0, len(events), at_once)]
    body.append(writer.finish(0, finish))
    body.append(writer.end(usage))
    return b"".join(body)


def frames(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of every event of a stream; the name stands in the data, too."""
    found = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith(":"):
            continue
        name, data = lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))
        assert len(lines) == 2 and data["type"] == name
        found.append((name, data))
    return found


def openai_client(body: bytes, media_type: str, status: int = 200) -> openai.OpenAI:
    transport = _replying(body, media_type, status)
    http = openai.DefaultHttpxClient(transport=transport)
    return openai.OpenAI(api_key="-", base_url="http://server/v1", http_client=http, max_retries=0)


def anthropic_client(body: bytes, media_type: str, status: int = 200) -> anthropic.Anthropic:
    transport = _replying(body, media_type, status)
    http = anthropic.DefaultHttpxClient(transport=transport)
    return anthropic.Anthropic(api_key="-", base_url="http://server", http_client=http, max_retries=0)


def _replying(body: bytes, media_type: str, status: int) -> httpx2.MockTransport:
    reply = httpx2.Response(status, content=body, headers={"content-type": media_type})
    return httpx2.MockTransport(lambda request: reply)


def json_values() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
    )


def calls(names: Sequence[str]) -> st.SearchStrategy[Call]:
    arguments = st.dictionaries(st.text(max_size=6), json_values(), max_size=3)
    spelled = st.tuples(arguments, st.booleans()).map(lambda pair: json.dumps(pair[0], ensure_ascii=pair[1]))
    return st.builds(Call, st.sampled_from(list(names)), spelled)


def outputs(names: Sequence[str] = ("get_weather", "get_time")) -> st.SearchStrategy[Output]:
    return st.builds(Output, st.text(max_size=12), st.text(max_size=12), st.lists(calls(names), max_size=3).map(tuple))
