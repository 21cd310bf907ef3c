"""Outputs as tests write them, cut into tokens in any way, and what a parser makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deepinfer.codec.conversation import Tool
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart, merged
from deepinfer.codec.generation import Finish
from deepinfer.codec.parsing import OutputParser
from deepinfer.codec.parsing.characters import TokenSource
from deepinfer.codec.spellings import DSML, END_THINK, EOS, THINK
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.stop import OutputText

NANO = Tokenizer(Path(__file__).parents[2] / "models" / "nano" / "tokenizer.json")

# In a source these characters are control ids; the spellings of control tokens are only text.
D, T, E, END = "\ue000", "\ue001", "\ue002", "\ue003"
MARKS = {D: str(DSML), T: str(THINK), E: str(END_THINK), END: str(EOS)}

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
)
TIME = Tool(name="get_time", parameters={"type": "object", "properties": {}})


class Pieces:
    """A tokenizer that has a token for whatever bytes a test wants to be one."""

    def __init__(self) -> None:
        self._bytes = [spelling.encode() for spelling in MARKS.values()]
        self._ids: dict[bytes, int] = {}
        self.control_ids = {spelling: place for place, spelling in enumerate(MARKS.values())}

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token(self, text: bytes) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._bytes)
            self._bytes.append(text)
        return self._ids[text]

    def ids(self, source: str, cuts: Iterable[int]) -> list[int]:
        """The source's tokens with ends at these places of `units`."""
        parts = units(source)
        ends = sorted({*cuts, len(parts)})
        ids: list[int] = []
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            text = b""
            for unit in parts[begin:end]:
                if isinstance(unit, str):
                    ids += [self.token(text)] if text else []
                    ids.append(self.control_ids[MARKS[unit]])
                    text = b""
                else:
                    text += unit
            ids += [self.token(text)] if text else []
        return ids


def units(source: str) -> list[bytes | str]:
    """Single bytes, and control marks. Lone surrogates U+DC80 to U+DCFF stand for bytes that are no UTF-8."""
    parts: list[bytes | str] = []
    for char in source:
        if char in MARKS:
            parts.append(char)
        else:
            parts += [bytes([byte]) for byte in char.encode("utf-8", "surrogateescape")]
    return parts


def spelled(source: str) -> str:
    """The text that a source is to a reader who knows no control ids."""
    return "".join(MARKS.get(part, part) for part in source)


def nano_ids(source: str) -> list[int]:
    """The source in nano's own tokens; its text must be Unicode."""
    ids: list[int] = []
    text = ""
    for char in source:
        if char in MARKS:
            ids += [*NANO.encode_text(text), NANO.control_id(MARKS[char])]
            text = ""
        else:
            text += char
    return [*ids, *NANO.encode_text(text)]


class Call(NamedTuple):
    name: str
    arguments: str
    complete: bool = True

    @property
    def value(self) -> Any:
        return json.loads(self.arguments)


class Answer(NamedTuple):
    reasoning: str
    content: str
    calls: list[Call]
    finish: Finish
    done: bool
    events: list[Event]  # merged
    reasoning_tokens: int


def run(
    ids: Sequence[int],
    cuts: Iterable[int] = (),
    *,
    tokenizer: TokenSource = NANO,
    starts: Literal["thinking", "content"] = "thinking",
    tools: Sequence[Tool] | None = (WEATHER, TIME),
    stop: tuple[str, ...] = (),
    reason: str = "stop",
    include_stop: bool = False,
    **options: Any,
) -> Answer:
    """What a parser makes of the ids, pushed in pieces that end at the cuts. Checks what holds for every output."""
    numbers = count()
    parser = OutputParser(
        tokenizer,
        starts=starts,
        tools=tools,
        make_id=lambda: f"id{next(numbers)}",
        stop=OutputText(stop, include_stop) if stop else None,
        **options,
    )
    events: list[Event] = []
    begin = 0
    for end in (*sorted(cuts), len(ids)):
        events += parser.push(ids[begin:end])
        begin = end
    events += parser.finish(reason)
    events = merged(events)
    assert parser.result is not None
    calls = _calls(events)
    assert (parser.result.reason == "tool_calls") <= any(call.complete for call in calls)
    places = [place for event in events if isinstance(event, Reasoning | Content) for place in event.tokens]
    assert places == sorted(set(places)), "a token is listed once"
    return Answer(
        reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
        content="".join(event.text for event in events if isinstance(event, Content)),
        calls=calls,
        finish=parser.result,
        done=parser.done,
        events=events,
        reasoning_tokens=parser.reasoning_tokens,
    )


def _calls(events: list[Event]) -> list[Call]:
    """The calls, and a check that every one begins, goes on and ends."""
    calls: list[Call] = []
    names: dict[int, str] = {}
    pieces: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolStart):
            assert event.call == len(names) and event.id == f"id{event.call}"
            names[event.call] = event.name
            pieces[event.call] = ""
        elif isinstance(event, ToolArguments):
            assert event.text
            pieces[event.call] += event.text
        elif isinstance(event, ToolEnd):
            assert event.arguments == pieces[event.call]
            if event.complete:
                assert isinstance(json.loads(event.arguments), dict)
            calls.append(Call(names[event.call], event.arguments, event.complete))
        elif isinstance(event, Reasoning | Content):
            assert event.text
    assert len(calls) == len(names)
    return calls


def without_places(answer: Answer) -> Answer:
    """What does not depend on where tokens end."""
    events = [event._replace(tokens=()) if isinstance(event, Reasoning | Content) else event for event in answer.events]
    return answer._replace(events=events, reasoning_tokens=0)


def parse(source: str, **options: Any) -> Answer:
    """What an output gives. It is also pushed token by token, in two pieces at every place and in bursts like those of
    drafting, with nano's tokens; and cut into other tokens, every character one and any two pieces: all alike."""
    ids = nano_ids(source)
    answer = run(ids, **options)
    cuttings: list[Iterable[int]] = [range(len(ids)), range(0, len(ids), 3), range(0, len(ids), 6)]
    for cuts in (*cuttings, *([place] for place in range(len(ids)))):
        assert run(ids, cuts, **options) == answer
    tokenizer = Pieces()
    length = len(units(source))
    for cuts in (range(length), *([place] for place in range(0, length, 1 + length // 200))):
        ids = tokenizer.ids(source, cuts)
        again = run(ids, range(len(ids)), tokenizer=tokenizer, **options)
        assert without_places(again) == without_places(answer)
    return answer


def parameter(key: str, value: str, string: bool = True) -> str:
    return f'<{D} parameter name="{key}" string="{str(string).lower()}">{value}</{D} parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<{D} invoke name="{name}">\n{"".join(parameters) or chr(10)}</{D} invoke>\n'


def block(*invokes: str) -> str:
    """The separator and a block, as the model should write it (spec/codec.md 3)."""
    return f"\n\n<{D} calls>\n{''.join(invokes)}</{D} calls>"


PARIS = invoke("get_weather", parameter("city", "Paris"))
PARIS_CALL = Call("get_weather", '{"city": "Paris"}')
