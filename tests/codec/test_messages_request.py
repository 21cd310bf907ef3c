"""Messages in: every field is served, named as ignored, or refused by name; blocks become the turns that they were."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    conversation_of,
    count_body,
    error_body,
    error_status,
    make_call_id,
    to_generation,
)
from deepinfer.codec.conversation import FREE_CHOICE, Format, Image, ToolCall, ToolChoice, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.sealed import SIGNATURE, seal
from deepinfer.codec.spellings import IMAGE
from deepinfer.codec.template import render

TOOL = {"name": "get_weather", "description": "W", "input_schema": {"type": "object", "properties": {}}}
TIME = {"name": "get_time", "input_schema": {"type": "object"}}
ASK = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "u1", "name": "get_weather", "input": {"city": "Zürich", "days": 2}}
RESULT = {"type": "tool_result", "tool_use_id": "u1", "content": "sun"}


def generation(**fields: Any) -> GenerationRequest:
    body = {"model": "flash", "max_tokens": 64, "messages": [ASK]} | fields
    return to_generation(parse(MessagesRequest, {key: value for key, value in body.items() if value is not ...}))


def turns(*messages: Any, **fields: Any) -> tuple[Turn, ...]:
    conversation = generation(messages=list(messages), **fields).conversation
    assert conversation is not None
    return conversation.turns


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generation(**fields)
    assert caught.value.status == 400
    assert caught.value.param is not None and caught.value.param in caught.value.message
    return caught.value


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_a_bare_request_thinks_and_its_budget_is_lowered_rather_than_refused() -> None:
    wanted = generation()
    conversation = wanted.conversation
    assert conversation is not None and conversation.turns == (Turn(role="user", text="Hi"),)
    assert (conversation.thinking, conversation.effort, conversation.tool_choice) == (True, 75, FREE_CHOICE)
    assert (wanted.max_tokens, wanted.clip_max_tokens, wanted.n) == (64, True, 1)
    assert wanted.sampling == {} and wanted.ignored == [] and wanted.thinking_budget is None


def test_system_is_a_text_or_blocks_and_may_come_later_too() -> None:
    blocks = [{**text("one"), "cache_control": {"type": "ephemeral"}}, text("two")]
    assert turns(ASK, system="S")[0] == Turn(role="system", text="S")
    assert turns(ASK, system=blocks)[0] == Turn(role="system", text="one\n\ntwo")
    assert turns(ASK, {"role": "system", "content": "now French"}, ASK)[1] == Turn(role="system", text="now French")
    assert turns(ASK, {"role": "system", "content": blocks}, ASK)[1].text == "one\n\ntwo"
    assert turns(ASK, system="") == turns(ASK)


def test_pictures_keep_their_places() -> None:
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    (turn,) = turns(user(text("a"), inline, text("b"), linked))
    assert turn.text == f"a\n\n{IMAGE}\n\nb\n\n{IMAGE}"
    assert turn.images == (
        Image("data:image/png;base64,AAAA", "auto", "messages.0.content.1.source.data"),
        Image("https://x/y.png", "auto", "messages.0.content.3.source.url"),
    )


def test_results_come_before_what_the_user_says_beside_them() -> None:
    picture = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    results = [RESULT, {"type": "tool_result", "tool_use_id": "u2", "content": [text("shot"), picture]}]
    calls = assistant({"type": "thinking", "thinking": "both", "signature": SIGNATURE}, USE, {**USE, "id": "u2"})
    _, said, first, second, more = turns(ASK, calls, user(*results, text("and?")), tools=[TOOL])
    assert (said.reasoning, said.text, said.prefix) == ("both", "", False)
    assert said.tool_calls[0] == ToolCall("u1", "get_weather", '{"city": "Zürich", "days": 2}')
    assert first == Turn(role="tool", text="sun", tool_call_id="u1")
    assert (second.text, len(second.images), second.tool_call_id) == (f"shot\n\n{IMAGE}", 1, "u2")
    assert more == Turn(role="user", text="and?")
    assert refused(messages=[ASK, assistant(USE), user(text("x"), RESULT)]).param == "messages.2.content.1"


def test_a_result_may_be_empty_and_an_error_is_what_its_text_says() -> None:
    empty = {"type": "tool_result", "tool_use_id": "u1"}
    assert turns(ASK, assistant(USE), user(empty))[2] == Turn(role="tool", text="", tool_call_id="u1")
    wanted = generation(messages=[ASK, assistant(USE), user({**RESULT, "is_error": True})])
    assert wanted.ignored == ["messages.content.is_error"]
    assert generation(messages=[ASK, assistant(USE), user({**RESULT, "is_error": False})]).ignored == []


def test_thoughts_come_back_shown_sealed_or_not_at_all() -> None:
    def thoughts(block: dict[str, Any]) -> str | None:
        return turns(ASK, assistant(block, text("x")), ASK)[1].reasoning

    assert thoughts({"type": "thinking", "thinking": "hm", "signature": SIGNATURE}) == "hm"
    assert thoughts({"type": "thinking", "thinking": "", "signature": seal("tief ünd")}) == "tief ünd"
    assert thoughts({"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM"}) == ""  # another server's
    assert thoughts({"type": "thinking", "thinking": "hm"}) == "hm"
    assert thoughts({"type": "redacted_thinking", "data": "EmwKAhgB"}) is None
    broken = assistant({"type": "thinking", "thinking": "", "signature": seal("x") + "?"})
    assert refused(messages=[ASK, broken, ASK]).param == "messages.1.content.0.signature"


def test_an_assistant_message_at_the_end_is_the_beginning_of_the_answer() -> None:
    assert turns(ASK, {"role": "assistant", "content": "{"})[-1] == Turn(role="assistant", text="{", prefix=True)
    thinking = {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}
    assert turns(ASK, assistant(thinking, text("So")))[-1].prefix
    wanted = generation(messages=[ASK, {"role": "assistant", "content": "So"}], thinking={"type": "disabled"})
    assert wanted.conversation is not None
    assert render(wanted.conversation).text.endswith("Hi<｜Assistant｜></think>So")


def test_an_empty_beginning_is_none_and_an_empty_answer_of_ours_is_no_error() -> None:
    assert turns(ASK, {"role": "assistant", "content": ""}) == turns(ASK)
    assert turns(ASK, assistant()) == turns(ASK)
    assert turns(ASK, assistant(), ASK)[1] == Turn(role="assistant")


def test_assistant_messages_that_follow_each_other_are_one() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}
    both = [assistant(thinking, text("a")), assistant(text("b"), USE)]
    assert turns(ASK, *both, user(RESULT))[1] == Turn(
        role="assistant",
        text="a\n\nb",
        reasoning="hm",
        tool_calls=(ToolCall("u1", "get_weather", '{"city": "Zürich", "days": 2}'),),
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.1.role"),
        ({"role": "user"}, "messages.1.content"),
        ({"role": "user", "content": ""}, "messages.1.content"),
        ({"role": "user", "content": []}, "messages.1.content"),
        (user(text("")), "messages.1.content"),
        (user("x"), "messages.1.content.0"),
        (user({"text": "x"}), "messages.1.content.0.type"),
        (user({"type": "text"}), "messages.1.content.0.text"),
        (user({"type": "document", "source": {}}), "messages.1.content.0.type"),
        (user({"type": "search_result"}), "messages.1.content.0.type"),
        (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "messages.1.content.0.source.type"),
        (user({"type": "image", "source": {"type": "base64", "data": "A"}}), "messages.1.content.0.source.media_type"),
        (user({"type": "image", "source": {"type": "url"}}), "messages.1.content.0.source.url"),
        (user({"type": "image", "source": {"type": "url", "url": "file:/x"}}), "messages.1.content.0.source.url"),
        (user({"type": "tool_result"}), "messages.1.content.0.tool_use_id"),
        (user({**RESULT, "content": [{"type": "document"}]}), "messages.1.content.0.content.0.type"),
        (user({**RESULT, "content": 5}), "messages.1.content.0.content"),
        (user({"type": "thinking", "thinking": "x"}), "messages.1.content.0.type"),
        (assistant({"type": "tool_use", "id": "u", "name": "f", "input": "x"}), "messages.1.content.0.input"),
        (assistant({"type": "server_tool_use", "id": "u"}), "messages.1.content.0.type"),
        (assistant({"type": "image", "source": {"type": "url", "url": "http://x"}}), "messages.1.content.0.type"),
        ({"role": "system", "content": [{"type": "image", "source": {"type": "url"}}]}, "messages.1.content.0.type"),
    ],
)
def test_a_message_that_is_wrong_is_named_by_its_place(message: Any, param: str) -> None:
    assert refused(messages=[ASK, message]).param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([ASK, assistant(USE), ASK], "messages.1"),
        ([ASK, assistant(USE)], "messages.1"),
        ([user(RESULT)], "messages.0.content.0"),
        ([ASK, assistant(USE), user(RESULT, RESULT)], "messages.2.content.1"),
    ],
)
def test_calls_and_results_that_do_not_fit_are_named_when_they_are_rendered(messages: list[Any], param: str) -> None:
    conversation = generation(messages=messages, tools=[TOOL]).conversation
    assert conversation is not None
    with pytest.raises(RequestError) as caught:
        render(conversation)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": ...}, "messages"),
        ({"model": ...}, "model"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image", "source": {"type": "url"}}]}, "system.0.type"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"stream": 1}, "stream"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "loud"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"compaction": {"type": "summary"}}, "compaction"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [TIME, TIME]}, "tools.1.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TIME]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TIME]}, "tool_choice.name"),
        ({"tool_choice": "any", "tools": [TIME]}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "half \udc00"}]}, "messages.0.content"),
        (
            {"tools": [TIME], "tool_choice": {"type": "any"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_a_field_that_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_what_has_no_effect_is_named() -> None:
    wanted = generation(
        metadata={"user_id": "x"},
        service_tier="auto",
        container="c",
        context_management={"edits": []},
        betas=["b"],
        mcp_servers=[],
        flavour=1,
        tools=[{**TIME, "type": "custom", "defer_loading": False, "cache_control": {"type": "ephemeral"}}],
    )
    names = {"metadata", "service_tier", "container", "context_management", "betas", "flavour"}
    assert set(wanted.ignored) == names and wanted.service_tier is None


@pytest.mark.parametrize(
    ("fields", "thinking", "effort", "budget"),
    [
        ({}, True, 75, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, 75, 1024),
        ({"thinking": {"type": "enabled"}}, True, 75, None),
        ({"thinking": {"type": "adaptive"}}, True, 75, None),
        ({"thinking": {"type": "disabled"}}, False, 75, None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, False, 75, None),
        ({"output_config": {"effort": "low"}}, True, 50, None),
        ({"output_config": {"effort": "max"}}, True, 100, None),
        ({"output_config": {"effort": 42}}, True, 42, None),
        ({"output_config": {"effort": "none"}, "thinking": {"type": "adaptive", "budget_tokens": 9}}, False, 75, None),
    ],
)
def test_thinking_follows_the_table(fields: dict[str, Any], thinking: bool, effort: int, budget: int | None) -> None:
    wanted = generation(**fields)
    assert wanted.conversation is not None
    assert (wanted.conversation.thinking, wanted.conversation.effort) == (thinking, effort)
    assert wanted.thinking_budget == budget


def test_sampling_and_stop_sequences_reach_the_engine() -> None:
    wanted = generation(temperature=1, top_p=0.5, top_k=3, seed=4, stop_sequences=["\n\nHuman:"], stream=True)
    assert wanted.sampling == {"temperature": 1, "top_p": 0.5, "top_k": 3, "seq_seed": 4}
    assert (wanted.stop, wanted.stream) == (("\n\nHuman:",), True)


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, FREE_CHOICE, True),
        ({"type": "auto"}, FREE_CHOICE, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, FREE_CHOICE, False),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "any"}, ToolChoice("required"), True),
        (
            {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True},
            ToolChoice("required", ("get_time",)),
            False,
        ),
    ],
)
def test_any_means_a_call_and_one_call_is_one_call(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    # spec/codec.md 5, row 9
    conversation = generation(tools=[{**TOOL, "strict": True}, TIME], tool_choice=choice).conversation
    assert conversation is not None
    assert (conversation.tool_choice, conversation.parallel_tool_calls) == (expected, parallel)
    weather, time = conversation.tools
    assert (weather.name, weather.description, weather.parameters) == ("get_weather", "W", TOOL["input_schema"])
    assert weather.strict and not time.strict


def test_a_form_is_shown_to_the_model_and_enforced() -> None:
    schema = {"type": "object"}
    wanted = generation(output_config={"format": {"type": "json_schema", "schema": schema}})
    expected = Format("json_schema", schema, True, "output_config.format.schema")
    assert wanted.conversation is not None and (wanted.format, wanted.conversation.format) == (expected, expected)
    assert generation(structured_outputs={"choice": ["a"]}).format is not None


THOUGHTS = {"type": "thinking", "thinking": "need it", "signature": SIGNATURE}
REFERENCE: list[dict[str, Any]] = [
    {"messages": [ASK], "system": [text("one"), text("two")]},
    {"messages": [ASK, assistant(text("c"), text("d")), ASK], "thinking": {"type": "disabled"}, "tools": None},
    {"messages": [ASK, assistant(THOUGHTS, text("c"), USE), user(RESULT, text("and?"))]},
    {"messages": [ASK, assistant(THOUGHTS, USE, {**USE, "id": "u2"}), user({**RESULT, "tool_use_id": "u2"}, RESULT)]},
    {"messages": [ASK, assistant(THOUGHTS, text("c")), ASK], "tools": None},
    {"messages": [ASK, assistant(THOUGHTS, text("c")), ASK], "output_config": {"effort": "max"}},
    {"messages": [ASK, {"role": "system", "content": "now French"}, ASK]},
]


@pytest.mark.parametrize("fields", REFERENCE)
def test_prompts_are_those_of_the_vendors_reference(fields: dict[str, Any]) -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "max_tokens": 9, "tools": [TOOL], **fields}
    body = {key: value for key, value in body.items() if value is not None}
    reference = deepseek_recipe.MessagesRequest(body).convert(deepseek_recipe.ConversionOptions())
    expected = deepseek_recipe.DeepseekV41Encoding().render_conversation(reference.conversation).prompt
    conversation = generation(**body).conversation
    assert conversation is not None and render(conversation).text == expected


def test_counting_tokens_renders_the_same_prompt() -> None:
    fields: dict[str, Any] = {
        "model": "flash",
        "messages": [ASK, assistant(USE), user(RESULT)],
        "system": "S",
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    counted = conversation_of(parse(CountTokensRequest, fields))
    assert counted == generation(**fields).conversation
    assert count_body(17) == {"input_tokens": 17}
    with pytest.raises(RequestError) as caught:
        conversation_of(parse(CountTokensRequest, {**fields, "mcp_servers": [1]}))
    assert caught.value.param == "mcp_servers"


@pytest.mark.parametrize(
    ("status", "code", "kind", "answered"),
    [
        (400, None, "invalid_request_error", 400),
        (401, None, "authentication_error", 401),
        (403, None, "permission_error", 403),
        (404, "model_not_found", "not_found_error", 404),
        (405, None, "invalid_request_error", 405),
        (413, None, "request_too_large", 413),
        (429, None, "rate_limit_error", 429),
        (500, None, "api_error", 500),
        (503, "overloaded", "overloaded_error", 529),
        (503, "unavailable", "overloaded_error", 503),
        (504, None, "timeout_error", 504),
    ],
)
def test_errors_have_anthropics_shape(status: int, code: str | None, kind: str, answered: int) -> None:
    # spec/codec.md 5, row 10
    error = RequestError("is bad \ud800", param="messages.0.content", status=status, code=code)
    body = error_body(error)
    assert body["type"] == "error" and body["error"]["type"] == kind
    assert body["error"].keys() - {"type", "message"} == (set() if code is None else {"details"})
    assert code is None or body["error"]["details"] == {"error_code": code}
    assert body["error"]["message"].startswith("messages.0.content: is bad") and json.dumps(body).encode()
    assert error_status(error) == answered
    named = error_body(RequestError("max_tokens: is required", param="max_tokens"))
    assert named["error"]["message"] == "max_tokens: is required"


def test_ids_of_calls_differ_and_the_bodies_can_be_described_to_openapi() -> None:
    assert make_call_id() != make_call_id() and make_call_id().startswith("toolu_")
    for model in (MessagesRequest, CountTokensRequest):
        assert "messages" in model.model_json_schema()["properties"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "source", "name", "input", "tool_use_id", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result", "x"])
BLOCKS = st.lists(st.tuples(KINDS, st.dictionaries(st.sampled_from(["text", "id", "source"]), JSON)), max_size=3)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(MessagesRequest.model_fields)), JSON, max_size=4),
    st.sampled_from(["user", "assistant", "system"]),
    BLOCKS,
)
def test_no_body_however_broken_ends_in_anything_but_an_error_that_names_a_field(
    fields: dict[str, Any], role: str, blocks: list[Any]
) -> None:
    content = [{"type": kind, "tool_use_id": "u", "thinking": "x", **more} for kind, more in blocks]
    messages = [ASK, {"role": role, "content": content}]
    try:
        to_generation(parse(MessagesRequest, {"model": "flash", "max_tokens": 5, "messages": messages, **fields}))
    except RequestError as error:
        assert error.status == 400 and json.dumps(error_body(error)).encode("utf-8")
