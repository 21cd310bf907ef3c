"""Every field of a Chat Completions request does what docs promise, is named as ignored, or is refused by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from chat_bodies import TOOL, generation, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.chat.request import ChatRequest, to_generation
from deepinfer.codec.conversation import Format, ToolChoice
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.openai_errors import error_body


def test_a_bare_request_thinks_and_leaves_sampling_to_the_engine() -> None:
    result = generation()
    assert result.conversation is not None
    assert (result.conversation.thinking, result.conversation.effort) == (True, 75)
    assert result.sampling == {} and result.ignored == [] and result.stop == ()
    assert (result.n, result.stream, result.max_tokens, result.top_logprobs) == (1, False, None, None)
    assert not result.clip_max_tokens  # too many tokens are refused, not lowered


@pytest.mark.parametrize(
    ("field", "value", "name", "expected"),
    [
        ("temperature", 0.5, "temperature", 0.5),
        ("temperature", 2, "temperature", 2),  # a whole number is a number
        ("top_p", 0.9, "top_p", 0.9),
        ("top_k", 20, "top_k", 20),
        ("min_p", 0.1, "min_p", 0.1),
        ("presence_penalty", -2, "presence_penalty", -2),
        ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("seed", 2**63 - 1, "seq_seed", 2**63 - 1),
        ("min_tokens", 3, "min_tokens", 3),
        ("stop_token_ids", [5, 6], "stop_token_ids", [5, 6]),
        ("ignore_eos", True, "ignore_eos", True),
        ("logit_bias", {"17": -100, "0": 5.5}, "logit_bias", {17: -100.0, 0: 5.5}),
    ],
)
def test_sampling_fields_reach_the_sampler(field: str, value: Any, name: str, expected: Any) -> None:
    assert generation(**{field: value}).sampling == {name: expected}
    assert generation(**{field: None}).sampling == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10, "max_completion_tokens": 11}, "max_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [5]}, "stop.0"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": None}, "model"),
        ({"model": "a\udfff"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": 0}, "reasoning_effort"),
        ({"reasoning_effort": 101}, "reasoning_effort"),
        ({"reasoning_effort": 50.0}, "reasoning_effort"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"request_id": "x" * 201}, "request_id"),
        ({"request_id": "é"}, "request_id"),  # an id that no URL could ask for again
        ({"request_id": "a/b"}, "request_id"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}]})
    assert caught.value.param == "model" and "required" in caught.value.message


@pytest.mark.parametrize("data", [None, [], "text", 5, True])
def test_a_body_that_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(RequestError, match="the body: must be an object"):
        parse(ChatRequest, data)


def test_harmless_values_of_refused_fields_pass() -> None:
    result = generation(
        best_of=1, use_beam_search=False, suffix=None, echo=False, modalities=["text"], audio=None, prompt_logprobs=None
    )
    assert result.ignored == []


def test_fields_without_effect_are_named_and_unknown_ones_too() -> None:
    result = generation(
        user="u", metadata={"a": "b"}, store=True, safety_identifier="s", prediction={}, verbosity="low", made_up=1
    )
    assert set(result.ignored) == {
        "user", "metadata", "store", "safety_identifier", "prediction", "verbosity", "made_up"
    }  # fmt: skip
    nested = generation(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}], "name": "x"}]
    )
    assert set(nested.ignored) == {"messages.content.cache", "messages.name"}


def test_names_of_ignored_fields_fit_in_a_header_whatever_they_are() -> None:
    hostile = {f"field{i}": 1 for i in range(500)} | {"a\r\nSet-Cookie: x": 1, "ключ": 1, "a,b": 1, "z" * 999: 1}
    names = generation(**dict(reversed(hostile.items()))).ignored
    assert len(names) == 32
    assert all(name.isascii() and name.isprintable() and "," not in name and len(name) <= 64 for name in names)


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({"reasoning_effort": "minimal"}, True, 50),
        ({"reasoning_effort": "low"}, True, 50),
        ({"reasoning_effort": "medium"}, True, 75),
        ({"reasoning_effort": "high"}, True, 75),
        ({"reasoning_effort": "xhigh"}, True, 75),
        ({"reasoning_effort": "max"}, True, 100),
        ({"reasoning_effort": "ultra"}, True, 100),
        ({"reasoning_effort": "none"}, False, 75),
        ({"reasoning_effort": 1}, True, 1),
        ({"reasoning_effort": 63}, True, 63),
        ({"thinking": {"type": "enabled"}}, True, 75),
        ({"thinking": {"type": "adaptive"}}, True, 75),
        ({"thinking": {"type": "disabled"}}, False, 75),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, False, 75),
        ({"chat_template_kwargs": {"thinking": False}}, False, 75),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, 75),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, True, 100),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}, "reasoning_effort": "low"}, True, 50),
        ({"chat_template_kwargs": {"thinking": False}, "thinking": {"type": "enabled"}}, True, 75),
    ],
)
def test_effort_and_thinking_in_all_spellings(fields: dict[str, Any], thinking: bool, effort: int) -> None:
    conversation = generation(**fields).conversation
    assert conversation is not None
    assert (conversation.thinking, conversation.effort if conversation.thinking else 75) == (thinking, effort)


def test_a_budget_for_thinking_without_thinking_is_named_as_ignored() -> None:
    assert generation(thinking_token_budget=100).thinking_budget == 100
    assert generation(thinking_token_budget=0).thinking_budget == 0
    off = generation(thinking_token_budget=100, reasoning_effort="none")
    assert off.thinking_budget is None and off.ignored == ["thinking_token_budget"]


def test_fields_of_the_answer_and_the_queue() -> None:
    result = generation(
        n=3, stream=True, max_completion_tokens=7, logprobs=True, top_logprobs=5, stop="x", include_reasoning=False,
        include_stop_str_in_output=True, allowed_token_ids=[1, 2], bad_words=["no"], service_tier="flex", priority=-3,
        request_id="mine", cache_salt="s", prompt_cache_key="k", stream_options={"include_usage": True},
    )  # fmt: skip
    assert (result.n, result.stream, result.max_tokens, result.top_logprobs) == (3, True, 7, 5)
    assert (result.stop, result.include_stop, result.include_reasoning) == (("x",), True, False)
    assert (result.allowed_token_ids, result.bad_words) == ([1, 2], ("no",))
    assert (result.service_tier, result.priority, result.request_id, result.cache_salt) == ("flex", -3, "mine", "s")
    assert generation(prompt_cache_key="k").cache_salt == "k"
    assert generation(logprobs=True).top_logprobs == 0
    assert generation(max_tokens=9, max_completion_tokens=9).max_tokens == 9


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Format("json_object", None, True, "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Format("json_schema", SCHEMA, True, "response_format.json_schema.schema"),
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, Format("regex", "a+", False, "response_format.regex")),
        ({"structured_outputs": {"json": SCHEMA}}, Format("json_schema", SCHEMA, False, "structured_outputs.json")),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            Format("json_schema", SCHEMA, False, "structured_outputs.json"),
        ),
        ({"structured_outputs": {"regex": "a"}}, Format("regex", "a", False, "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, Format("choice", ["a"], False, "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "g"}}, Format("ebnf", "g", False, "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json_object": True}},
            Format("json_object", None, False, "structured_outputs.json_object"),
        ),
        ({"guided_json": SCHEMA}, Format("json_schema", SCHEMA, False, "guided_json")),
        ({"guided_json": True}, Format("json_schema", True, False, "guided_json")),
        ({"guided_regex": "a"}, Format("regex", "a", False, "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Format("choice", ["a", "b"], False, "guided_choice")),
        ({"guided_grammar": "root ::= x"}, Format("ebnf", "root ::= x", False, "guided_grammar")),
    ],
)
def test_forms_of_the_content_in_all_spellings(fields: dict[str, Any], expected: Format | None) -> None:
    result = generation(**fields)
    assert result.format == expected
    assert result.conversation is not None
    shown = expected is not None and expected.shown
    assert result.conversation.format is (result.format if shown else None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_choice": [1]}, "guided_choice.0"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": "json_object"}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_a_form_that_is_wrong_or_contends_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_required_call_goes_before_the_response_format() -> None:
    result = generation(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert result.format is not None and result.conversation is not None
    assert result.conversation.tool_choice == ToolChoice("required")


SCALARS = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8)
SURROGATES = st.text(st.characters(codec=None, categories=("Cs", "Lu", "Zs")), max_size=4)
JSON = st.recursive(
    SCALARS | SURROGATES,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=6), children, max_size=3),
    max_leaves=8,
)
WHOLE: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://x"}}],
        },
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "reasoning_effort": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["a"],
    "logit_bias": {"5": 1},
    "thinking": {"type": "enabled"},
    "chat_template_kwargs": {"thinking": True},
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in _places(item, (*path, key)))]


@settings(max_examples=400, deadline=None)
@given(place=st.sampled_from(_places(WHOLE)[1:]), junk=JSON, extra=st.booleans())
def test_no_broken_body_gets_further_than_an_error_that_can_be_sent(place: Any, junk: Any, extra: bool) -> None:
    body = copy.deepcopy(WHOLE)
    parent = body
    for step in place[:-1]:
        parent = parent[step]
    if extra and isinstance(parent, dict):
        parent[f"x{place[-1]}"] = junk
    else:
        parent[place[-1]] = junk
    try:
        result = to_generation(parse(ChatRequest, body))
    except RequestError as error:
        assert error.status == 400
        assert json.dumps(error_body(error), ensure_ascii=False).encode()
    else:
        assert isinstance(result, GenerationRequest)


def test_openapi_shows_fields_with_their_ranges() -> None:
    schema = ChatRequest.model_json_schema()
    text = json.dumps(schema["properties"]["temperature"])
    assert '"minimum": 0' in text and '"maximum": 2' in text
    assert schema["required"] == ["model", "messages"]
