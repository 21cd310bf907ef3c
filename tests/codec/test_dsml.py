"""Calls as the format writes them, and as models write them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import (
    END,
    NANO,
    PARIS,
    PARIS_CALL,
    TIME,
    WEATHER,
    Call,
    D,
    E,
    block,
    invoke,
    nano_ids,
    parameter,
    parse,
    run,
    spelled,
)

from deepinfer.codec.conversation import Conversation, Tool, ToolCall, Turn
from deepinfer.codec.encoder import encode
from deepinfer.codec.parsing.body import Body
from deepinfer.codec.spellings import ASSISTANT, EOS
from deepinfer.codec.template import render

TEXT = st.text(st.characters(exclude_categories=["Cs", "Co", "Cn"]), max_size=20)
SAID = TEXT | st.sampled_from(
    ["a\n", "\n\n", "<", "</", "｜DSML｜", "</think>", "<｜User｜>", "日本語 🦊", "a  b", "<tool_result>"]
)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KEY = st.text(
    st.characters(exclude_categories=["Cs", "Co", "Cn"], exclude_characters='"'), max_size=8
) | st.sampled_from(['a"b', 'a">', 'say "x"', "a>b", "city", "days"]).filter(lambda key: '">' not in key)
ARGUMENTS = st.dictionaries(KEY, SAID | JSON, max_size=4).filter(
    lambda value: not {"arguments", "input"} & value.keys()
)
MADE = st.lists(st.tuples(st.sampled_from([WEATHER.name, TIME.name]), ARGUMENTS), max_size=3)


def turn_ids(reasoning: str, content: str, calls: list[Call]) -> tuple[str, list[int]]:
    """The assistant's turn of this history: its prompt's text, its ids up to the end token."""
    made = tuple(ToolCall(f"id{number}", call.name, call.arguments) for number, call in enumerate(calls))
    results = tuple(Turn(role="tool", text="r", tool_call_id=call.id) for call in made)
    last = () if made else (Turn(role="user", text="and?"),)
    said = Turn(role="assistant", text=content, reasoning=reasoning, tool_calls=made)
    turns = (Turn(role="user", text="q"), said, *results, *last)
    prompt = render(Conversation(turns=turns, tools=(WEATHER, TIME)))
    ids = encode(prompt, NANO).tolist()
    begin = ids.index(NANO.control_id(ASSISTANT)) + 2  # and <think>
    return prompt.text, ids[begin : ids.index(NANO.control_id(EOS)) + 1]


# -- there and back ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(reasoning=SAID, content=SAID, calls=MADE)
def test_an_answer_that_comes_back_as_history_has_the_very_tokens_that_were_generated(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    made = [Call(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    _, generated = turn_ids(reasoning, content, made)
    answer = run(generated, range(0, len(generated), 3))
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert [(call.name, call.value) for call in answer.calls] == [
        (name, json.loads(json.dumps(arguments))) for name, arguments in calls
    ]
    _, again = turn_ids(answer.reasoning, answer.content, answer.calls)
    assert again == generated


@pytest.mark.parametrize(
    "value", ["1.0", "1e5", "[1,2]", '{"b":1,  "a":[ ]}', "12345678901234567890123", "-0", '["\\u00e9"]']
)
def test_the_models_own_spelling_of_a_value_comes_back(value: str) -> None:
    source = "why" + E + "so" + block(invoke("get_weather", parameter("where", value, False), parameter("city", "x")))
    answer = parse(source + END)
    assert answer.calls == [Call("get_weather", f'{{"where": {value}, "city": "x"}}')]
    assert turn_ids(answer.reasoning, answer.content, answer.calls)[1] == nano_ids(source + END)


def test_the_vendors_parser_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rome = invoke(
        "get_weather", parameter("city", "Rome"), parameter("days", "3", False), parameter("where", "{}", False)
    )
    for source in (
        "why" + E + "so" + block(PARIS, rome),
        "why" + E + "2 < 3",
        "why" + E + block(PARIS),
        "need" + block(rome),
    ):
        theirs = _vendor(nano_ids(source))
        answer = parse(source + END)
        assert (theirs.get("reasoning_content") or "", theirs["content"] or "") == (answer.reasoning, answer.content)
        calls = [Call(c["function"]["name"], c["function"]["arguments"]) for c in theirs.get("tool_calls") or []]
        assert calls == answer.calls


def _vendor(ids: list[int]) -> dict[str, Any]:
    """The message that deepseek_recipe's stream parser makes."""
    recipe: Any = deepseek_recipe
    tools = [{"type": "function", "function": {"name": t.name, "parameters": t.parameters}} for t in (WEATHER, TIME)]
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "q"}],
        "tools": tools,
        "stream": True,
    }
    special = recipe.SpecialTokens(image="<｜deepseek_image｜>")
    asked = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions().with_special_tokens(special))
    stream = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(asked, "id", "m"),
        asked.parsing_options,
        tokenizer=recipe.Tokenizer.from_file(str(NANO.path)),
    )
    usage = recipe.PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)
    chunks = stream.push(recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint="f"))
    chunks += stream.push(recipe.InferenceChunk.tokens(ids))
    chunks += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    answer = recipe.ChatCompletionResponse("id", "m", 0, 1, 0)
    for chunk in chunks:
        answer.accumulate(chunk)
    return json.loads(answer.to_json())["choices"][0]["message"]


# -- tags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag",
    [
        f'<{D} parameter name="city" string="true">',
        f'<{D}parameter name="city" string="true">',
        f'<{D}  parameter  name="city"  string="true" >',
        f'<{D}\nparameter\nname="city"\nstring="true"\n>',
        f'<{D} parameter name="city" string="true" type="text">',
        f'<{D} parameter name="city" type="text" string="true">',
        f'<{D} parameter name="city" string="TRUE">',  # unreadable: the schema decides
    ],
)
def test_spaces_and_further_attributes_do_not_matter(tag: str) -> None:
    answer = parse(block(invoke("get_weather", f"{tag}12</{D} parameter>\n")), starts="content")
    assert answer.calls == [Call("get_weather", '{"city": "12"}')]


@pytest.mark.parametrize(
    "tag",
    [
        f'<{D} parameter string="true" name="city">',
        f"<{D} parameter name='city' string='true'>",
        f"<{D} parameter>",
        f'<{D} parameter="city">',
        f'<{D} param name="city" string="true">',
        f'<{D} parameter name="city" string="true"/>',
    ],
)
def test_what_is_no_parameter_makes_no_call_without_it(tag: str) -> None:
    source = block(invoke("get_weather", f"{tag}12</{D} parameter>\n"))
    answer = parse(source + END, starts="content")
    assert not answer.calls and "12" in answer.content


@pytest.mark.parametrize("key", ["", " ", "a b", "日本", 'a"b', "a>b", 'x" y', "a\nb", "string=", "\\", "�"])
def test_any_key_is_a_key(key: str) -> None:
    (call,) = parse(block(invoke("get_weather", parameter(key, "v"), parameter("days", "1", False)))).calls
    assert call.value == {key: "v", "days": 1}


def test_a_long_key_is_a_key_but_for_a_page_of_it() -> None:
    for length, made in ((900, 1), (2000, 0)):
        answer = run(nano_ids(block(invoke("get_weather", parameter("k" * length, "v")))), starts="content")
        assert len(answer.calls) == made


def test_names_with_a_namespace_are_names() -> None:
    tool = Tool(name="files::read-all_2")
    assert parse(block(invoke(tool.name)), tools=[tool]).calls == [Call(tool.name, "{}")]


# -- values -----------------------------------------------------------------------------------------------------------


def test_markup_inside_a_value_is_data_until_its_own_closer() -> None:
    value = block(invoke("get_time")) + f' {E} <{D} parameter name="x" string="true">'
    (call,) = parse(block(invoke("get_weather", parameter("city", value))) + END, starts="content").calls
    assert call.value == {"city": value.replace(D, "｜DSML｜").replace(E, "</think>")}


def test_a_control_token_of_thinking_in_an_object_is_data_too() -> None:
    body = f'{{"city": "{E}<{D} x>"}}'
    (call,) = parse(block(f'<{D} invoke name="get_weather">{body}</{D} invoke>\n') + END, starts="content").calls
    assert call.value == {"city": "</think><｜DSML｜ x>"}


@pytest.mark.parametrize("written", [" 2", "2\n", "\n2\n", "\t2 "])
def test_white_space_around_json_is_no_part_of_it(written: str) -> None:
    answer = parse(block(invoke("get_weather", parameter("days", written, False))), starts="content")
    assert answer.calls == [Call("get_weather", '{"days": 2}')]


def test_characters_that_json_escapes_are_escaped() -> None:
    value = "".join(map(chr, range(128))).replace("<", "") + "\u2028é🦊"
    (call,) = parse(block(invoke("get_weather", parameter("city", value))), starts="content").calls
    assert call.value == {"city": value} and "é🦊" in call.arguments


def test_white_space_and_closers_of_nothing_between_parameters_do_not_matter() -> None:
    spare = f" \n</{D} parameter>\n\n"
    whole = block(invoke("get_weather", parameter("city", "Paris") + spare, parameter("days", "1", False)), PARIS)
    answer = parse(whole + END, starts="content")
    assert answer.calls == [Call("get_weather", '{"city": "Paris", "days": 1}'), PARIS_CALL] and not answer.content


@pytest.mark.parametrize(
    "lost",
    [" and Rome", f"<{D} parameter string='true' name='days'>2</{D} parameter>\n", f"<{D} param>2", f"<{D} calls>"],
)
def test_a_call_that_lost_a_part_of_its_arguments_is_not_one_that_can_be_made(lost: str) -> None:
    """Arguments that are valid JSON and not what the model meant would be run."""
    spoiled = invoke("get_weather", parameter("city", "Paris") + lost, parameter("days", "1", False))
    answer = parse(block(spoiled, PARIS) + END, starts="content")
    assert answer.calls == [Call("get_weather", '{"city": "Paris"', complete=False), PARIS_CALL]
    assert answer.content.startswith(spelled(lost).lstrip()) and answer.content.endswith("</｜DSML｜ invoke>")
    assert parse(block(spoiled) + END, starts="content").finish.reason == "stop"


def test_what_stands_between_calls_is_dropped() -> None:
    answer = parse(block(PARIS + " and\n", PARIS) + END, starts="content")
    assert answer.calls == [PARIS_CALL, PARIS_CALL] and not answer.content


def test_a_call_whose_closer_is_missing_ends_with_the_next_or_with_the_block() -> None:
    opened = PARIS.removesuffix(f"</{D} invoke>\n")
    answer = parse(block(opened, opened) + END, starts="content")
    assert answer.calls == [PARIS_CALL, PARIS_CALL] and answer.done and answer.finish.reason == "tool_calls"


def test_a_block_that_is_never_closed_has_its_calls() -> None:
    answer = parse(block(PARIS, PARIS).removesuffix(f"</{D} calls>") + END, starts="content")
    assert answer.calls == [PARIS_CALL, PARIS_CALL] and answer.finish.reason == "tool_calls"


def test_a_block_without_calls_is_text() -> None:
    answer = parse(block() + "hi" + END, starts="content")
    assert answer.content == "\n\n<｜DSML｜ calls>\n</｜DSML｜ calls>hi" and answer.finish.reason == "stop"


def test_the_separator_is_two_line_feeds_and_no_more() -> None:
    for text, content in (("hi", "hi"), ("hi\n", "hi\n"), ("hi \n ", "hi \n "), ("\n\n\n", "\n\n\n"), ("", "")):
        assert parse(text + block(PARIS), starts="content").content == content
    for text, content in (("hi\n", "hi"), ("hi", "hi"), ("\n", ""), ("hi\n \n", "hi\n ")):  # fewer than two
        assert parse(text + block(PARIS).lstrip(), starts="content").content == content


# -- a body that is an object -----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    value=st.dictionaries(TEXT, JSON, max_size=4), indent=st.sampled_from([None, 2]), cuts=st.lists(st.integers(0, 99))
)
def test_an_object_is_in_no_string_at_its_end_however_it_is_cut(
    value: Any, indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    body = Body()
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for begin, end in pairwise(places):
        body.push(text[begin:end])
    assert not body.in_string and body.broken_at is None and body.is_object and json.loads(body.text) == value
    inside = Body()
    for char in '{"a\\"\\\\':
        inside.push(char)
    assert inside.in_string
