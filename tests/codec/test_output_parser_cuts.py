"""However an output is cut into tokens, and however the tokens come in pieces: the same events."""

from __future__ import annotations

import gc
import json
import random
import sys
from collections import deque
from collections.abc import Iterator
from enum import Enum
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import (
    END,
    NANO,
    PARIS,
    TIME,
    WEATHER,
    D,
    E,
    Pieces,
    T,
    block,
    invoke,
    nano_ids,
    parameter,
    run,
    spelled,
    units,
    without_places,
)

from deepinfer.codec.events import Content, Reasoning
from deepinfer.codec.parsing import OutputParser
from deepinfer.codec.parsing.characters import TokenTexts
from deepinfer.engine.stop import OutputText

FEW = settings(max_examples=100, deadline=None)
WORDS = [
    "a",
    "word ",
    "日本語",
    "é",
    "🦊",
    "<",
    "</",
    "/",
    ">",
    "\n",
    "\n\n",
    " ",
    "�",
    "��",
    '"',
    "{",
    "}",
    "\\",
    "\x00",
]
SPELLED = ["｜DSML｜", "</think>", "<｜DSML｜ calls>", " calls>"]
NO_TEXT = ["\udcff", "\udce6\udc97", "\udcf0\udc9f\udca6"]  # bytes that are no UTF-8
TEXT = st.lists(
    st.sampled_from([*WORDS, *SPELLED, *NO_TEXT]) | st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=5),
    max_size=6,
).map("".join)
UNICODE = st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | UNICODE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(UNICODE, inner, max_size=3),
    max_leaves=4,
)
KEY = st.sampled_from(["city", "days", "where", "日", "a b", "a>b", 'a"b', "", "<", "x=y"])
PARAMETERS = st.dictionaries(KEY, TEXT.map(lambda text: (text, True)) | JSON.map(lambda v: (v, False)), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from([WEATHER.name, TIME.name]), PARAMETERS), max_size=3)
RANDOM = st.randoms(use_true_random=False)


def readable(text: str) -> str:
    """Text with bytes that are none, as a reader sees it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def some(chance: random.Random, length: int) -> list[int]:
    """Places of cuts: none, few, many or all."""
    return chance.sample(range(length), chance.choice([0, min(1, length), min(4, length), length // 2, length]))


def same_at_every_cut(source: str, chance: random.Random, **options: Any) -> None:
    pieces = Pieces()
    length = len(units(source))
    expected = None
    for _ in range(4):
        ids = pieces.ids(source, some(chance, length))
        answer = run(ids, tokenizer=pieces, **options)
        for _ in range(3):
            assert run(ids, some(chance, len(ids)), tokenizer=pieces, **options) == answer
        expected = expected or without_places(answer)
        assert without_places(answer) == expected


# -- outputs as they should be ----------------------------------------------------------------------------------------


@FEW
@given(reasoning=TEXT, content=TEXT, calls=CALLS, thinks=st.booleans(), chance=RANDOM)
def test_a_well_formed_output_gives_what_it_says_at_every_cut(
    reasoning: str, content: str, calls: list[Any], thinks: bool, chance: random.Random
) -> None:
    source = reasoning + E + content if thinks else content
    expected = []
    for name, parameters in calls:
        written = {
            key: (value, True) if string else (json.dumps(value, ensure_ascii=False), False)
            for key, (value, string) in parameters.items()
        }
        expected.append(
            (name, {key: readable(value) if string else value for key, (value, string) in parameters.items()})
        )
        calls_text = (parameter(key, *value) for key, value in written.items())
        source += (f"\n\n<{D} calls>\n" if len(expected) == 1 else "") + invoke(name, *calls_text)
    source += (f"</{D} calls>" if calls else "") + END
    pieces = Pieces()
    length = len(units(source))
    for _ in range(4):
        ids = pieces.ids(source, some(chance, length))
        answer = run(ids, some(chance, len(ids)), tokenizer=pieces, starts="thinking" if thinks else "content")
        assert answer.reasoning == (readable(reasoning) if thinks else "")
        assert answer.content == readable(content)
        assert [(call.name, call.value) for call in answer.calls] == expected
        assert answer.finish.reason == ("tool_calls" if calls else "stop")


@FEW
@given(text=TEXT, starts=st.sampled_from(["thinking", "content"]), chance=RANDOM)
def test_the_text_of_every_token_is_where_the_token_is_listed(text: str, starts: Any, chance: random.Random) -> None:
    pieces = Pieces()
    ids = pieces.ids(text, some(chance, len(units(text))))
    answer = run(ids, some(chance, len(ids)), tokenizer=pieces, starts=starts)
    places = [place for event in answer.events for place in event.tokens]  # type: ignore[union-attr]
    assert places == list(range(len(ids)))
    assert "".join(event.text for event in answer.events) == readable(text)  # type: ignore[union-attr]
    assert answer.reasoning_tokens == (len(ids) if starts == "thinking" else 0)


@FEW
@given(text=TEXT.map(readable), starts=st.sampled_from(["thinking", "content"]), chance=RANDOM)
def test_a_token_is_listed_as_soon_as_all_its_text_is_out(text: str, starts: Any, chance: random.Random) -> None:
    pieces = Pieces()
    ids = pieces.ids(text, some(chance, len(units(text))))
    parser = OutputParser(pieces, starts=starts, tools=[WEATHER], make_id=lambda: "id")
    released, listed, number = b"", b"", 0
    for event in [event for i in ids for event in parser.push([i])] + parser.finish("length"):
        assert isinstance(event, Reasoning | Content)
        released += event.text.encode()
        listed += b"".join(pieces.token_bytes(ids[place]) for place in event.tokens)
        number += len(event.tokens)
        assert released.startswith(listed)
        assert len(listed + pieces.token_bytes((*ids, 0)[number])) > len(released)


# -- outputs as they should not be ------------------------------------------------------------------------------------

ATOMS = [
    D, D, T, E, END, "<", "</", "<" + D, "</" + D, f"<{D} calls>", f"<{D} calls>\n", f"</{D} calls>", f"<{D}calls>",
    f"<{D} toolcalls>\n", f"</{D} toolcalls>", f'<{D} invoke name="get_weather">', f'<{D} invoke name="get_time">\n',
    f'<{D} invoke name="rm">', f"</{D} invoke>", f"</{D}invoke>\n", f"<{D} invoke nam", f'<{D} parameter name="city',
    f'<{D} parameter name="city" string="true">', f'<{D} parameter name="days" string="false">',
    f'<{D} parameter name="input">', f'<{D} parameter name="city">', f"</{D} parameter>", f"</{D} parameter>\n",
    '{"a": 1}', '{"city": "', '"}', "\\", "12", " ", "\n", "text", "日", "\udcff", '"', ">", '="', "｜DSML｜", PARIS,
    block(PARIS), f"<{D} calls>\n{PARIS}", f'<{D} invoke name="get_time">{{"a": "', "text\n word",
    invoke("rm"), invoke("get_time"), parameter("days", "7", False),
]  # fmt: skip
SOUP = st.lists(st.sampled_from(ATOMS), max_size=14).map("".join)


SOUPS = given(
    source=SOUP,
    starts=st.sampled_from(["thinking", "content"]),
    stop=st.sampled_from([(), (), ("text",), ("\n\n", "日"), ("<",), ("a<｜",)]),
    reason=st.sampled_from(["stop", "length"]),
    options=st.sampled_from([{}, {}, {"tools": None}, {"drop_calls": True}, {"max_calls": 1}, {"min_tokens": 10**6}]),
    chance=RANDOM,
)


@FEW
@SOUPS
def test_any_soup_of_markup_gives_the_same_at_every_cut(
    source: str, starts: Any, stop: tuple[str, ...], reason: str, options: dict[str, Any], chance: random.Random
) -> None:
    same_at_every_cut(source, chance, starts=starts, stop=stop, reason=reason, promote_unterminated=True, **options)


@pytest.mark.slow
@settings(max_examples=3_000, deadline=None)
@SOUPS
def test_many_soups_of_markup_give_the_same_at_every_cut(
    source: str, starts: Any, stop: tuple[str, ...], reason: str, options: dict[str, Any], chance: random.Random
) -> None:
    same_at_every_cut(source, chance, starts=starts, stop=stop, reason=reason, **options)


@FEW
@given(
    source=SOUP.map(lambda soup: "".join(char for char in soup if char not in (T, E, END))),
    starts=st.sampled_from(["thinking", "content"]),
)
def test_text_is_lost_only_to_calls_and_to_closers_that_close_nothing(source: str, starts: Any) -> None:
    pieces = Pieces()
    answer = run(pieces.ids(source, ()), tokenizer=pieces, starts=starts)
    if answer.calls:
        return
    shown = answer.reasoning + answer.content
    if starts == "thinking" or f"</{D}" not in source:
        assert shown == readable(spelled(source))
    else:
        at = 0
        for char in shown:  # in order, and only markup is missing
            at = readable(spelled(source)).index(char, at) + 1


@FEW
@given(
    content=TEXT,
    stops=st.lists(st.sampled_from(["a", "\n\n", "<", "word 日", "�", "��", "</t"]), max_size=3),
    chance=RANDOM,
)
def test_stop_strings_cut_the_content_where_they_cut_any_text(
    content: str, stops: list[str], chance: random.Random
) -> None:
    expected = OutputText(tuple(stops))
    text, stopped = expected.push(readable(content))
    text += "" if stopped else expected.finish()
    pieces = Pieces()
    ids = pieces.ids(content, some(chance, len(units(content))))
    for tools in (None, [WEATHER]):
        answer = run(ids, some(chance, len(ids)), tokenizer=pieces, starts="content", stop=tuple(stops), tools=tools)
        assert (answer.content, answer.finish.stop_sequence) == (text, stopped)


# -- the work for a token ---------------------------------------------------------------------------------------------

LONG = {
    "content": "some words and\n\n more < than </ that ",
    "thinking": "some words and\n\n more < than </ that ",
    "argument": "some words and\n\n more < than </ that ",
    "json": '"some words", 1, {"a": 2}, ',
    "body": '"some words": 1, ',
    "feeds": "\n",
    "brackets": "<",
    "mentions": f"<{D} calls> and </{D} calls> and {D} or <{D} invoke ",
    "unfinished": "words ",
}
BEGIN = {
    "argument": f'<{D} calls><{D} invoke name="get_weather"><{D} parameter name="city" string="true">',
    "json": f'<{D} calls><{D} invoke name="get_weather"><{D} parameter name="where" string="false">[',
    "body": f'<{D} calls><{D} invoke name="get_weather">{{',
    "unfinished": f'<{D} invoke name="get_weather"><{D} parameter name="city" string="true">',
}


def strings_in(one: object) -> Iterator[str]:
    """Every text that a parser holds, in its own objects and in containers."""
    if isinstance(one, str):
        yield one
    elif isinstance(one, dict):
        yield from strings_in(list(one.items()))
    elif isinstance(one, list | tuple | set | deque):
        for item in one:
            yield from strings_in(item)
    elif type(one).__module__.startswith("deepinfer.codec.parsing") and not isinstance(one, TokenTexts | Enum):
        yield from strings_in(vars(one))


@pytest.mark.parametrize("stop", [(), ("never that",)])
@pytest.mark.parametrize("kind", LONG)
def test_a_token_costs_the_same_however_long_the_output_is(kind: str, stop: tuple[str, ...]) -> None:
    parser = OutputParser(
        pieces := Pieces(),
        starts="thinking" if kind == "thinking" else "content",
        tools=[WEATHER],
        make_id=lambda: "id",
        stop=OutputText(stop) if stop else None,
    )
    parser.push(pieces.ids(BEGIN.get(kind, ""), ()))
    unit = pieces.ids(LONG[kind], range(0, 999, 3))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def cost() -> int:
        nonlocal calls
        calls = 0
        gc.disable()  # others are called by it
        sys.setprofile(count)
        for _ in range(10):
            for token in unit:
                parser.push([token])
        sys.setprofile(None)
        gc.enable()
        return calls

    cost()
    before = cost()
    for _ in range(20_000 // len(unit)):
        parser.push(unit)
    assert cost() == before
    assert max(map(len, strings_in(vars(parser)))) < 200
    assert not parser.done


def test_a_long_tag_that_never_ends_is_given_up() -> None:
    source = f'a<{D} invoke name="' + "x" * 5000
    ids = nano_ids(source)
    parser = OutputParser(NANO, starts="content", tools=[WEATHER], make_id=lambda: "id")
    shown = "".join(event.text for i in ids for event in parser.push([i]) if isinstance(event, Content))
    assert len(shown) > 4900 and spelled(source).startswith(shown)
    for length in (1023, 1024, 1025):  # the limit does not depend on the cut either
        tag = f'<{D} invoke name="{"x" * (length - 16)}">'
        same_at_every_cut("a" + tag + '"1"', random.Random(1), starts="content")
