"""Arguments of past calls: rendered as the format's reference does, and exactly where the reference loses something."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.arguments import Parameter, parameters
from deepinfer.codec.conversation import Conversation, ToolCall, Turn
from deepinfer.codec.template import render

QUICK = settings(max_examples=300, deadline=None)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WHOLE = st.integers(-(2**63), 2**64 - 1)  # what the reference holds exactly
NUMBER = WHOLE | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=4)


def rendered(arguments: str) -> str:
    turns = (
        Turn(role="assistant", tool_calls=(ToolCall("1", "f", arguments),)),
        Turn(role="tool", text="r", tool_call_id="1"),
    )
    return render(Conversation(turns=turns, thinking=False)).text


def reference(arguments: str) -> str:
    messages = [
        deepseek_recipe.AssistantMessage("", None, [deepseek_recipe.ToolCall("1", "f", arguments)]),
        deepseek_recipe.ToolMessage("r", "1"),
    ]
    conversation = deepseek_recipe.Conversation(messages, thinking_mode=False)
    return deepseek_recipe.DeepseekV41Encoding().render_conversation(conversation).prompt


@QUICK
@given(
    value=OBJECT,
    style=st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}]),
    ascii_only=st.booleans(),
)
def test_whatever_the_clients_json_looks_like_the_model_sees_its_own(
    value: dict[str, Any], style: dict[str, Any], ascii_only: bool
) -> None:
    """Compact JSON of a JavaScript client, spaced JSON of a Python client, indented JSON: one prompt."""
    ours = rendered(json.dumps(value, ensure_ascii=False))
    assert ours == reference(json.dumps(value, ensure_ascii=False))
    if style or not ascii_only:
        # Python's own spaced JSON with escapes counts as the model's own spelling (below).
        assert rendered(json.dumps(value, ensure_ascii=ascii_only, **style)) == ours


@pytest.mark.parametrize(
    "arguments",
    [
        "", " ", "[1]", "null", '"x"', "12", "{", '{"a"', '{"a":', '{"a":1', '{"a":1}x', '{"a": 1}, ', "{'a': 1}",
        '{"a": NaN}', '{"a": [Infinity]}', '{"a":-Infinity}', '{"a":1e400}', '{"a": "\\ud800"}', '{"\\udfff": 1}',
        '"{\\"a\\": 1}"', '{"a": 1, }', '{"a": 1,, "b": 2}', '{a: 1}', "｜DSML｜",
    ],
)  # fmt: skip
def test_what_is_no_json_object_becomes_one_text(arguments: str) -> None:
    """Also JSON inside of a JSON string: unwrapping it would be a guess."""
    assert parameters(arguments) == [Parameter("arguments", arguments, True)]
    assert rendered(arguments) == reference(arguments)


@pytest.mark.parametrize("number", ["12345678901234567890123", "-9223372036854775809", "18446744073709551616"])
@pytest.mark.parametrize("form", ['{"id": %s}', '{"id":%s}', '{"ids":[%s]}'])
def test_long_numbers_are_not_rounded(form: str, number: str) -> None:
    (parameter,) = parameters(form % number)
    assert parameter.text.strip("[]") == number
    assert number in rendered(form % number)
    assert number not in reference(form % number)


@pytest.mark.parametrize(
    "value", ["2.50", "1E+2", "1e400", "-0", "[1,2]", '{"a":1}', '["\\u00e9\\/"]', "[ ]", "9" * 5000]
)
def test_the_models_own_spelling_of_a_value_comes_back(value: str) -> None:
    """As answers put arguments together: ", " and ": " on the outermost level, values as the model wrote them."""
    own = f'{{"first": {value}, "text": "a\\n\\"b\\"", "last": {value}}}'
    assert parameters(own) == [
        Parameter("first", value, False),
        Parameter("text", 'a\n"b"', True),
        Parameter("last", value, False),
    ]
    assert f'name="first" string="false">{value}</' in rendered(own)


def test_nesting_without_end_is_only_a_text() -> None:
    for opening in ('{"a": ', '{"a":'):
        bottomless = opening + "[" * 100_000
        assert parameters(bottomless) == [Parameter("arguments", bottomless, True)]
        closed = bottomless + "]" * 100_000 + "}"
        assert parameters(closed) == [Parameter("arguments", closed, True)]


def test_no_arguments_leave_an_empty_line() -> None:
    assert parameters("{}") == parameters(" { } ") == []
    assert '<｜DSML｜ invoke name="f">\n\n</｜DSML｜ invoke>' in rendered("{}")


def test_a_key_that_comes_twice_has_its_last_value() -> None:
    assert parameters('{"a":1,"b":2,"a":3}') == [Parameter("a", "3", False), Parameter("b", "2", False)]


@QUICK
@given(text=st.text(st.sampled_from('{}[]":, \\ud8001e+-.az\n'), max_size=24))
def test_broken_json_never_breaks_the_prompt(text: str) -> None:
    for arguments in (text, f'{{"a": {text}}}', f'{{"{text}": 1, "b":{text}}}'):
        found = parameters(arguments)
        for parameter in found:
            parameter.key.encode()
            parameter.text.encode()
            if not parameter.is_string:
                json.loads(parameter.text)
        assert rendered(arguments).endswith("<｜Assistant｜></think>")
