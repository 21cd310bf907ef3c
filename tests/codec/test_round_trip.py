"""What a model said, sent back as history, is the very tokens that it generated: the cache knows them."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.conversation import Conversation, Tool, ToolCall, Turn
from deepinfer.codec.encoder import encode
from deepinfer.codec.events import Content, Reasoning, ToolEnd, ToolStart
from deepinfer.codec.parsing.output import OutputParser
from deepinfer.codec.spellings import DSML, END_THINK, EOS
from deepinfer.codec.template import Rendered, render
from deepinfer.codec.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "models" / "nano"
TOOLS = (Tool(name="edit", parameters={"type": "object"}), Tool(name="run"))

SPOKEN = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<>/｜\n "), max_size=20)
MARKUP = st.sampled_from(
    ["</｜DSML｜ parameter>", "<think>", "</think>", "<｜User｜>", "\n\n<｜DSML｜ calls>\n", "<", "</"]
)
TEXT = st.lists(SPOKEN | MARKUP, max_size=3).map("".join)
JSON = st.sampled_from(
    [
        "1",
        "2.50",
        "-0",
        "1E+2",
        "12345678901234567890123",
        "true",
        "null",
        "[1,2]",
        "[1, 2]",
        '{"a":{"b" : []}}',
        '["\\u00e9"]',
    ]
)
KEY = st.text(st.sampled_from("abc_ é你"), min_size=1, max_size=6)
CALL = st.tuples(
    st.sampled_from(["edit", "run"]),
    st.dictionaries(KEY, st.tuples(st.just(True), TEXT) | st.tuples(st.just(False), JSON), max_size=3),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(NANO)


def spoken(reasoning: str, content: str, calls: list) -> tuple[str, ...]:
    """An output as the model writes it, in segments."""
    segments = [reasoning, END_THINK, content]
    if calls:
        segments += ["\n\n<", DSML, " calls>\n"]
        for name, values in calls:
            segments += ["<", DSML, f' invoke name="{name}">\n']
            for key, (is_string, value) in values.items():
                opener = f' parameter name="{key}" string="{"true" if is_string else "false"}">'
                segments += ["<", DSML, opener, value, "</", DSML, " parameter>\n"]
            segments += ["" if values else "\n", "</", DSML, " invoke>\n"]
        segments += ["</", DSML, " calls>"]
    return tuple(segment for segment in segments if segment)


def heard(tokenizer: Tokenizer, ids: list[int]) -> Turn:
    """The assistant's turn that a client would keep of an output."""
    number = count()
    parser = OutputParser(tokenizer, starts="thinking", tools=TOOLS, make_id=lambda: f"call_{next(number)}")
    events = [*parser.push(ids), *parser.finish("stop")]
    started = [event for event in events if isinstance(event, ToolStart)]
    ended = {event.call: event.arguments for event in events if isinstance(event, ToolEnd)}
    return Turn(
        role="assistant",
        reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
        text="".join(event.text for event in events if isinstance(event, Content)),
        tool_calls=tuple(ToolCall(event.id, event.name, ended[event.call]) for event in started),
    )


@settings(max_examples=300, deadline=None)
@given(reasoning=TEXT, content=TEXT, calls=st.lists(CALL, max_size=3))
def test_an_answer_comes_back_as_the_tokens_that_it_was(
    tokenizer: Tokenizer, reasoning: str, content: str, calls: list
) -> None:
    question = Conversation(turns=(Turn(role="user", text="Mend it."),), tools=TOOLS)
    prompt = encode(render(question), tokenizer).tolist()
    output = encode(Rendered(spoken(reasoning, content, calls), (), "content"), tokenizer).tolist()
    turn = heard(tokenizer, output)
    assert len(turn.tool_calls) == len(calls)
    for call, (_, values) in zip(turn.tool_calls, calls, strict=True):
        assert list(json.loads(call.arguments)) == list(values)
    results = tuple(Turn(role="tool", text="done", tool_call_id=call.id) for call in turn.tool_calls)
    after = Conversation(turns=(*question.turns, turn, *results, Turn(role="user", text="And?")), tools=TOOLS)
    ids = encode(render(after), tokenizer).tolist()
    assert ids[: len(prompt) + len(output) + 1] == [*prompt, *output, tokenizer.control_id(EOS)]
