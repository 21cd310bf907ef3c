"""Responses in: every field is served, named as ignored, or refused by name; items become the turns that they were."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.conversation import FREE_CHOICE, Format, Image, ToolCall, ToolChoice, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.responses import (
    ResponsesRequest,
    error_body,
    items_of_input,
    make_call_id,
    output_items,
    to_generation,
    with_history,
)
from deepinfer.codec.sealed import seal
from deepinfer.codec.spellings import IMAGE
from deepinfer.codec.template import render

FUNCTION = {"type": "function", "name": "get_weather", "description": "W", "parameters": {"type": "object"}}
TIME = {"type": "function", "name": "get_time"}
CRM = {"type": "namespace", "name": "crm", "description": "Customers", "tools": [FUNCTION, TIME]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "ours", "format": {"type": "text"}}
SEARCH = {"type": "tool_search", "execution": "client", "description": "find", "parameters": {"type": "object"}}
ASK = {"role": "user", "content": "Hi"}


def request(**fields: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, {"model": "flash", "input": "Hello"} | fields)


def generation(**fields: Any) -> GenerationRequest:
    return to_generation(request(**fields))


def turns(*items: Any, **fields: Any) -> tuple[Turn, ...]:
    conversation = generation(input=list(items), **fields).conversation
    assert conversation is not None
    return conversation.turns


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generation(**fields)
    assert caught.value.status == 400
    assert caught.value.param is not None and caught.value.param in caught.value.message
    return caught.value


def call(call_id: str = "c1", name: str = "get_weather", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def result(call_id: str = "c1", output: Any = "sun") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def test_a_text_is_a_users_message_and_instructions_lead_as_system() -> None:
    wanted = generation(instructions="Be terse.", input="Hello")
    conversation = wanted.conversation
    assert conversation is not None
    assert conversation.turns == (Turn(role="system", text="Be terse."), Turn(role="user", text="Hello"))
    assert (conversation.thinking, conversation.effort, conversation.tool_choice) == (True, 75, FREE_CHOICE)
    assert (wanted.stream, wanted.max_tokens, wanted.top_logprobs, wanted.ignored) == (False, None, None, [])
    assert wanted.sampling == {} and not wanted.clip_max_tokens


def test_every_role_and_kind_of_content_finds_its_turn() -> None:
    picture = {"type": "input_image", "image_url": "https://x/a.png", "detail": "low"}
    content = [{"type": "input_text", "text": "What is"}, picture, {"type": "input_text", "text": "this?"}]
    assert turns(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": content},
        {"role": "system", "content": "S"},
        {"role": "user", "content": "again"},
    ) == (
        Turn(role="system", text="D"),
        Turn(
            role="user",
            text=f"What is\n\n{IMAGE}\n\nthis?",
            images=(Image("https://x/a.png", "low", "input.1.content.1.image_url"),),
        ),
        Turn(role="system", text="S"),
        Turn(role="user", text="again"),
    )


def test_a_reasoning_item_is_the_thinking_of_its_turn_and_never_visible_text() -> None:
    # spec/codec.md 11, bug 28
    answer = Turn(
        role="assistant", text="Wait.", reasoning="need it", tool_calls=(ToolCall("c1", "get_weather", '{"a": 1}'),)
    )
    items = [ASK, thought("need it"), said("Wait."), call(arguments='{"a": 1}'), result()]
    assert turns(*items) == (
        Turn(role="user", text="Hi"),
        answer,
        Turn(role="tool", text="sun", tool_call_id="c1"),
    )


def test_what_the_model_made_in_one_go_is_one_turn_and_the_next_go_another() -> None:
    items = [ASK, thought("one"), call("a"), call("b"), result("b"), result("a"), thought("two"), said("Done.")]
    assert [(turn.role, turn.reasoning, len(turn.tool_calls)) for turn in turns(*items)] == [
        ("user", None, 0),
        ("assistant", "one", 2),
        ("tool", None, 0),
        ("tool", None, 0),
        ("assistant", "two", 0),
    ]


def test_an_answer_without_reasoning_is_accepted() -> None:
    # spec/codec.md 11, bug 29
    assert turns(ASK, said("Yo."), ASK)[1] == Turn(role="assistant", text="Yo.", reasoning=None)


def test_reasoning_that_a_client_may_not_see_comes_back_sealed() -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": seal("tief ünd 🙂")}
    assert turns(ASK, hidden, said("x"))[1].reasoning == "tief ünd 🙂"
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    assert turns(ASK, foreign, said("x"))[1].reasoning is None
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert turns(ASK, summary, said("x"))[1].reasoning == "in short"
    damaged = {"type": "reasoning", "summary": [], "encrypted_content": seal("abc") + "!"}
    assert refused(input=[ASK, damaged]).param == "input.1.encrypted_content"


def test_outputs_of_calls_may_be_parts_with_images() -> None:
    output = [{"type": "input_text", "text": "shot"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    tool = turns(ASK, call(), result(output=output))[2]
    assert (tool.text, len(tool.images), tool.tool_call_id) == (f"shot\n\n{IMAGE}", 1, "c1")


def test_a_call_that_the_token_limit_cut_does_not_wedge_the_conversation() -> None:
    cut = call("c9", arguments='{"ci', status="incomplete")
    assert turns(ASK, said("Let me"), cut, ASK) == turns(ASK, said("Let me"), ASK)
    answered = turns(ASK, cut, result("c9"))  # its author answered it all the same
    assert answered[1].tool_calls == (ToolCall("c9", "get_weather", '{"ci'),)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input.1.type"),
        ({"type": "computer_call", "call_id": "c"}, "input.1.type"),
        ({"type": "web_search_call", "id": "c"}, "input.1.type"),
        ({"id": "x"}, "input.1.type"),
        ({"type": 5}, "input.1.type"),
        ("text", "input.1"),
        ({"role": "tool", "content": "x"}, "input.1.role"),
        ({"role": "user"}, "input.1.content"),
        ({"role": "user", "content": 3}, "input.1.content"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input.1.content.0.type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input.1.content.0.type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.1.content.0.text"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input.1.content.0.file_id"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input.1.content.0.image_url"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "ftp://x"}]}, "input.1.content.0.image_url"),
        ({"role": "assistant", "content": [{"type": "input_image", "image_url": "http://x"}]}, "input.1.content"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input.1.call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input.1.arguments"),
        ({"type": "function_call_output", "call_id": "c"}, "input.1.output"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "sql", "input": "x"}, "input.1.name"),
        ({"type": "tool_search_call", "execution": "server", "arguments": {}}, "input.1"),
    ],
)
def test_an_item_that_is_wrong_is_named_by_its_place(item: Any, param: str) -> None:
    assert refused(input=[ASK, item]).param == param


def test_what_does_not_fit_together_is_named_by_its_place_when_it_is_rendered() -> None:
    conversation = generation(instructions="x", input=[ASK, call(), ASK], tools=[FUNCTION]).conversation
    assert conversation is not None
    with pytest.raises(RequestError) as caught:
        render(conversation)
    assert caught.value.param == "input.1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [], "instructions": "x"}, "input"),
        ({"input": 5}, "input"),
        ({"input": "half \ud800"}, "input"),
        ({"model": 5}, "model"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "some"}, "truncation"),
        ({"n": 2}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"max_output_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"seed": -1}, "seed"),
        ({"stop": ""}, "stop"),
        ({"reasoning": {"effort": "loud"}}, "reasoning.effort"),
        ({"reasoning": {"effort": 101}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [TIME, TIME]}, "tools.1.name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools.0.parameters"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "name": "sql"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [PATCH]}]}, "tools.0.tools.0.type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [CRM]}]}, "tools.0.tools.0.type"),
        ({"tools": [{"type": "namespace", "name": "a!", "tools": [TIME]}]}, "tools.0.tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [TIME]}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TIME]}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TIME]}, "tool_choice.tools"),
        (
            {"tools": [TIME], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_a_field_that_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_what_has_no_effect_is_named() -> None:
    wanted = generation(
        reasoning={"effort": "none", "summary": "auto"},
        text={"verbosity": "low"},
        include=["web_search_call.results", "reasoning.encrypted_content"],
        tools=[{"type": "web_search", "secret\r\nheader": "x"}],
        max_tool_calls=3,
        thinking_token_budget=5,
        flavour="sweet",
        n=1,
    )
    assert wanted.conversation is not None and not wanted.conversation.thinking and wanted.thinking_budget is None
    expected = {"reasoning.summary", "text.verbosity", "include", "tools.web_search", "max_tool_calls", "flavour"}
    expected |= {"thinking_token_budget"}
    assert set(wanted.ignored) - {"tools.secret??header"} == expected
    assert not any("\r" in name or "," in name for name in wanted.ignored)


def test_everything_of_ours_is_known_in_history() -> None:
    items = [ASK, thought("x"), said("y"), call(id="fc_1", status="completed"), result()]
    assert generation(input=items).ignored == []


@pytest.mark.parametrize(("effort", "expected"), [("low", 50), ("high", 75), ("max", 100), (33, 33)])
def test_effort_has_names_and_numbers(effort: Any, expected: int) -> None:
    conversation = generation(reasoning={"effort": effort}).conversation
    assert conversation is not None and (conversation.thinking, conversation.effort) == (True, expected)


def test_sampling_stop_and_extensions_reach_the_engine() -> None:
    wanted = generation(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=7,
        presence_penalty=1.0,
        stop=["END"],
        max_output_tokens=40,
        thinking_token_budget=20,
        prompt_cache_key="me",
        service_tier="flex",
        stream=True,
        logit_bias={"3": 1},
    )
    assert wanted.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seq_seed": 7,
        "presence_penalty": 1.0,
        "logit_bias": {3: 1.0},
    }
    assert (wanted.stop, wanted.max_tokens, wanted.thinking_budget) == (("END",), 40, 20)
    assert (wanted.cache_salt, wanted.service_tier, wanted.stream) == ("me", "flex", True)


def test_log_probabilities_come_when_they_are_included() -> None:
    assert generation(include=["message.output_text.logprobs"]).top_logprobs == 0
    assert generation(include=["message.output_text.logprobs"], top_logprobs=3).top_logprobs == 3
    assert generation(top_logprobs=3).top_logprobs == 3
    assert generation(top_logprobs=0).top_logprobs is None


def test_the_form_of_the_text_is_shown_to_the_model_unless_it_is_an_extension() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shown = generation(text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    expected = Format("json_schema", schema, True, "text.format.schema")
    assert shown.conversation is not None and (shown.format, shown.conversation.format) == (expected, expected)
    assert generation(text={"format": {"type": "json_object"}}).format == Format(
        "json_object", None, True, "text.format"
    )
    assert generation(text={"format": {"type": "text"}}).format is None
    hidden = generation(structured_outputs={"regex": "a+"})
    assert hidden.format == Format("regex", "a+", False, "structured_outputs.regex")
    assert hidden.conversation is not None and hidden.conversation.format is None


def test_functions_of_a_namespace_are_told_apart() -> None:
    conversation = generation(tools=[FUNCTION, CRM], parallel_tool_calls=False).conversation
    assert conversation is not None and not conversation.parallel_tool_calls
    assert [tool.name for tool in conversation.tools] == ["get_weather", "crm::get_weather", "crm::get_time"]
    assert [tool.description for tool in conversation.tools] == ["W", "Customers\nW", "Customers\n"]
    assert turns(ASK, call(name="get_time", namespace="crm"), result())[1].tool_calls[0].name == "crm::get_time"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, FREE_CHOICE),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "get_weather"}, ToolChoice("required", ("get_weather",))),
        ({"type": "function", "name": "get_time"}, ToolChoice("required", ("crm::get_time",))),
        ({"type": "function", "name": "crm::get_weather"}, ToolChoice("required", ("crm::get_weather",))),
        (
            {"type": "function", "name": "get_weather", "namespace": "crm"},
            ToolChoice("required", ("crm::get_weather",)),
        ),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", ("apply_patch",))),
        ({"type": "apply_patch"}, ToolChoice("required", ("apply_patch",))),
        ({"type": "tool_search"}, ToolChoice("required", ("tool_search",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
            ToolChoice("auto", ("crm::get_time",)),
        ),
    ],
)
def test_a_choice_names_the_tool_as_the_model_knows_it(choice: Any, expected: ToolChoice) -> None:
    # spec/codec.md 11, bug 26: also in thinking
    conversation = generation(tools=[FUNCTION, CRM, PATCH, SEARCH], tool_choice=choice).conversation
    assert conversation is not None and conversation.thinking and conversation.tool_choice == expected


def test_a_name_that_two_namespaces_have_must_say_which() -> None:
    other = {**CRM, "name": "erp"}
    error = refused(tools=[CRM, other], tool_choice={"type": "function", "name": "get_time"})
    assert error.param == "tool_choice.name" and "several namespaces" in error.message


def test_apply_patch_is_a_function_with_the_vendors_own_description() -> None:
    conversation = generation(tools=[PATCH]).conversation
    assert conversation is not None
    (tool,) = conversation.tools
    assert tool.description is not None and "*** Begin Patch" in tool.description
    assert tool.parameters is not None and list(tool.parameters["properties"]) == ["input"] and tool.strict
    made = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'a "b"\n'}
    done = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    assistant, tool_turn = turns(ASK, made, done)[1:]
    assert json.loads(assistant.tool_calls[0].arguments) == {"input": 'a "b"\n'}
    assert (tool_turn.text, tool_turn.tool_call_id) == ("ok", "c")


def test_tools_that_a_search_found_can_be_called() -> None:
    items = [
        ASK,
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"q": "time"}},
        {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": [TIME, FUNCTION]},
        ASK,
    ]
    conversation = generation(tools=[SEARCH, FUNCTION], input=items).conversation
    assert conversation is not None
    assert [tool.name for tool in conversation.tools] == ["tool_search", "get_weather", "get_time"]
    assert conversation.turns[1].tool_calls == (ToolCall("s", "tool_search", '{"q": "time"}'),)
    assert json.loads(conversation.turns[2].text) == [TIME, FUNCTION]
    assert "get_time" in render(conversation).text


def test_deferred_tools_are_offered_at_once_where_the_server_would_search() -> None:
    deferred = {**TIME, "defer_loading": True}
    wanted = generation(tools=[deferred, {"type": "tool_search"}])
    assert wanted.conversation is not None and [tool.name for tool in wanted.conversation.tools] == ["get_time"]
    assert wanted.ignored == []


REFERENCE: list[dict[str, Any]] = [
    {"input": "Hello", "instructions": "Be terse."},
    {"input": [ASK, said("a"), {"role": "developer", "content": "D"}, ASK], "reasoning": {"effort": "none"}},
    {"input": [ASK, thought("one"), said("Wait."), call("a"), call("b"), result("b", "B"), result("a")]},
    {"input": [ASK, thought("one"), call("a"), result("a"), thought("two"), said("Done."), ASK]},
    {"input": [ASK, call(name="get_time", namespace="crm"), result(), ASK], "reasoning": {"effort": "low"}},
    {
        "input": [
            ASK,
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": '*** Begin\n"x"'},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        ]
    },
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
        ]
    },
    {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
]


@pytest.mark.parametrize("fields", REFERENCE)
def test_prompts_are_those_of_the_vendors_reference(fields: dict[str, Any]) -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "tools": [FUNCTION, CRM, PATCH], **fields}
    reference = deepseek_recipe.ResponsesRequest(body).convert(deepseek_recipe.ConversionOptions())
    expected = deepseek_recipe.DeepseekV41Encoding().render_conversation(reference.conversation).prompt
    conversation = generation(**body).conversation
    assert conversation is not None and render(conversation).text == expected


def test_a_stored_answer_goes_on_as_if_the_client_had_sent_it_all() -> None:
    first = request(input="Hi", instructions="first")
    answer = {"output": [thought("hm"), said("Yo."), call("c"), call("cut", status="incomplete")]}
    stored = json.loads(json.dumps([*items_of_input(first), *output_items(answer)]))
    second = request(input=[result("c")], previous_response_id="resp_1", instructions="second")
    continued = with_history(second, stored)
    conversation = to_generation(continued).conversation
    assert conversation is not None
    assert conversation.turns == (
        Turn(role="system", text="second"),
        *turns(ASK, thought("hm"), said("Yo."), call("c"), result("c")),
    )
    assert continued.previous_response_id == "resp_1" and second.input is not None
    assert items_of_input(continued) == [*stored, result("c")]  # what is stored with the next answer
    with pytest.raises(RequestError):
        to_generation(second)  # the request itself is as it was
    assert to_generation(with_history(request(input=None, previous_response_id="r"), stored[:3])).conversation


def test_errors_about_new_items_name_their_place_in_the_new_input() -> None:
    history = [ASK, said("a"), ASK, said("b")]
    for items, param in [([{"type": "item_reference"}], "input.0.type"), ([ASK, {"type": "x"}], "input.1.type")]:
        body = with_history(request(input=items, previous_response_id="r"), history)
        with pytest.raises(RequestError) as caught:
            to_generation(body)
        assert caught.value.param == param


def test_log_probabilities_and_sealed_copies_are_not_stored() -> None:
    message = said("x")
    message["content"][0]["logprobs"] = [{"token": "x"}]
    (kept, reasoning) = output_items({"output": [message, {**thought("t"), "encrypted_content": seal("t")}]})
    assert kept["content"][0] == {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    assert reasoning == thought("t")
    assert message["content"][0]["logprobs"] == [{"token": "x"}]  # the answer itself keeps them


def test_ids_of_calls_differ_and_errors_have_openais_shape() -> None:
    assert make_call_id() != make_call_id() and make_call_id().startswith("call_")
    error = error_body(refused(background=True))["error"]
    assert error["param"] == "background" and error["type"] == "invalid_request_error"


def test_the_body_can_be_described_to_openapi() -> None:
    schema = ResponsesRequest.model_json_schema()
    assert "input" in schema["properties"] and "Message" in schema["$defs"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "call_id", "name", "input", "tools", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "tool_search_output", "x"]
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(ResponsesRequest.model_fields)), JSON, max_size=4),
    st.lists(st.tuples(KINDS, JSON).map(lambda pair: {**_object(pair[1]), "type": pair[0]}), max_size=3),
)
def test_no_body_however_broken_ends_in_anything_but_an_error_that_names_a_field(
    fields: dict[str, Any], items: list[Any]
) -> None:
    try:
        to_generation(parse(ResponsesRequest, {"model": "flash", "input": items or "Hello", **fields}))
    except RequestError as error:
        assert error.status == 400 and json.dumps(error_body(error)).encode("utf-8")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"content": value}
