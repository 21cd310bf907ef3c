"""Messages become turns: roles, parts, reasoning, calls, results and prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from chat_bodies import TOOL, generation, refused

from deepinfer.codec.conversation import Image, ToolCall, Turn
from deepinfer.codec.spellings import CONTROL, IMAGE

USER = {"role": "user", "content": "q"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


def turns(*messages: dict[str, Any], **fields: Any) -> tuple[Turn, ...]:
    conversation = generation(messages=list(messages), **fields).conversation
    assert conversation is not None
    return conversation.turns


def test_every_role_has_its_turn() -> None:
    result = turns(
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        USER,
        {"role": "assistant", "content": "a"},
        {"role": "latest_reminder", "content": "r"},
    )
    assert [(turn.role, turn.text) for turn in result] == [
        ("system", "s"),
        ("system", "d"),
        ("user", "q"),
        ("assistant", "a"),
        ("latest_reminder", "r"),
    ]
    assert [turn.param for turn in result] == [f"messages.{i}" for i in range(5)]


def test_parts_are_joined_by_a_blank_line_with_images_in_their_places() -> None:
    url = {"url": "https://example.org/a.png", "detail": "low"}
    data = "data:image/png;base64,AAAA"
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": "this?"},
        {"type": "file", "file": {"file_data": data}},
    ]
    (turn,) = turns({"role": "user", "content": parts})
    assert turn.text == f"What is\n\n{IMAGE}\n\nthis?\n\n{IMAGE}"
    assert turn.images == (
        Image("https://example.org/a.png", "low", "messages.0.content.1.image_url.url"),
        Image(data, "auto", "messages.0.content.3.file.file_data"),
    )


@pytest.mark.parametrize("spelling", [*CONTROL, "<｜deepseek_image｜>"])
def test_a_text_that_spells_a_control_token_is_never_refused(spelling: str) -> None:
    """A conversation in which somebody once wrote one could not go on otherwise."""
    assert turns({"role": "user", "content": f"a {spelling} b"})[0].text == f"a {spelling} b"
    parts = [{"type": "text", "text": spelling}, {"type": "image_url", "image_url": {"url": "http://x/y"}}]
    (turn,) = turns({"role": "user", "content": parts})
    assert turn.text == f"{spelling}\n\n{IMAGE}" and len(turn.images) == 1


def test_a_text_cannot_take_the_place_of_an_image() -> None:
    parts = [{"type": "text", "text": IMAGE}, {"type": "image_url", "image_url": {"url": "http://x/y"}}]
    assert refused(messages=[{"role": "user", "content": parts}]).param == "messages.0.content"
    assert turns({"role": "user", "content": IMAGE})[0].images == ()


def test_history_without_reasoning_is_accepted() -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "sun"})
    result = turns(*messages, tools=[TOOL])
    assert result[1].reasoning is None
    assert result[1].tool_calls == (ToolCall("c1", "get_weather", '{"city": "Paris"}'),)
    assert (result[2].role, result[2].text, result[2].tool_call_id) == ("tool", "sun", "c1")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_in_either_spelling(name: str) -> None:
    assert turns(USER, {"role": "assistant", "content": "a", name: "t"}, USER)[1].reasoning == "t"


def test_arguments_that_come_as_an_object_are_written_as_json() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"städte": ["A", 1, None]}}}
    result = turns(
        USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": ""}
    )
    assert result[1].tool_calls[0].arguments == '{"städte": ["A", 1, null]}'


def test_an_answer_goes_on_behind_a_prefix() -> None:
    prefix = {"role": "assistant", "content": "Autumn", "reasoning_content": "plan", "prefix": True}
    assert turns(USER, prefix)[1] == Turn(role="assistant", text="Autumn", reasoning="plan", prefix=True)
    plain = {"role": "assistant", "content": "Autumn"}
    assert turns(USER, plain, continue_final_message=True)[1].prefix
    assert turns(USER, plain, continue_final_message=True, add_generation_prompt=False)[1].prefix
    assert not turns(USER, plain)[1].prefix
    assert not turns(USER, plain, add_generation_prompt=True)[1].prefix


def test_functions_of_the_older_protocol_in_the_history() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": "{}"}}
    result = turns(USER, call, {"role": "function", "name": "get_weather", "content": "sun"}, USER, call,
                   {"role": "function", "name": "get_weather", "content": "rain"})  # fmt: skip
    calls = [turn.tool_calls[0].id for turn in result if turn.tool_calls]
    assert [turn.tool_call_id for turn in result if turn.role == "tool"] == calls
    assert len(set(calls)) == 2


def test_a_refusal_in_the_history_is_what_the_assistant_said() -> None:
    assert turns(USER, {"role": "assistant", "content": None, "refusal": "No."}, USER)[1].text == "No."
    parts = [{"type": "refusal", "refusal": "No."}]
    assert turns(USER, {"role": "assistant", "content": parts}, USER)[1].text == "No."


def _user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "owner", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages.0.content"),
        ([USER, "x"], "messages.1"),
        (_user({"text": "x"}), "messages.0.content.0.type"),
        (_user({"type": "text"}), "messages.0.content.0.text"),
        (_user({"type": "text", "text": 1}), "messages.0.content.0.text"),
        (_user({"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}), "messages.0.content.1.type"),
        (_user({"type": "video_url", "video_url": {"url": "x"}}), "messages.0.content.0.type"),
        (_user({"type": "image_url"}), "messages.0.content.0.image_url"),
        (_user({"type": "image_url", "image_url": {}}), "messages.0.content.0.image_url.url"),
        (_user({"type": "image_url", "image_url": {"url": "file:///etc/x"}}), "messages.0.content.0.image_url.url"),
        (
            _user({"type": "image_url", "image_url": {"url": "http://x", "detail": "best"}}),
            "messages.0.content.0.image_url.detail",
        ),
        (_user({"type": "file", "file": {"file_id": "f"}}), "messages.0.content.0.file.file_id"),
        (_user({"type": "file", "file": {}}), "messages.0.content.0.file.file_data"),
        (_user({"type": "file", "file": {"file_data": "data:application/pdf;base64,A"}}),
         "messages.0.content.0.file.file_data"),
        (_user({"type": "refusal", "refusal": "no"}), "messages.0.content.0.type"),
        ([USER, {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
         "messages.1.content"),
        ([USER, {"role": "assistant", "audio": {"id": "a"}}], "messages.1.audio"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]}],
         "messages.1.tool_calls.0"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "messages.1.tool_calls.0.id"),
        ([USER, {"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "f"}}],
         "messages.1.function_call"),
        ([USER, {"role": "tool", "content": "x"}], "messages.1.tool_call_id"),
        ([USER, {"role": "function", "name": "f", "content": "x"}], "messages.1"),
        ([{"role": "user", "content": "x", "prefix": True}], "messages.0.prefix"),
        ([{"role": "user", "content": "x", "reasoning_content": "t"}], "messages.0.reasoning_content"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages.0.tool_calls"),
        ([{"role": "latest_reminder", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
         "messages.0.content"),
    ],
)  # fmt: skip
def test_a_bad_message_is_refused_with_its_place(messages: list[Any], param: str) -> None:
    assert refused(messages=messages).param == param


def test_going_on_and_a_new_answer_exclude_each_other() -> None:
    answer = {"role": "assistant", "content": "a"}
    assert refused(continue_final_message=True).param == "continue_final_message"
    assert refused(add_generation_prompt=False).param == "add_generation_prompt"
    both = refused(messages=[USER, answer], continue_final_message=True, add_generation_prompt=True)
    assert both.param == "add_generation_prompt"
