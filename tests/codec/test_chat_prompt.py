"""Whole requests render as the prompt format's reference renders them, where spec/codec.md follows it."""

from __future__ import annotations

from typing import Any

import deepseek_recipe
import pytest
from chat_bodies import TIME, TOOL

from deepinfer.codec.chat.request import ChatRequest, to_generation
from deepinfer.codec.fields import parse
from deepinfer.codec.template import render


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


USER = {"role": "user", "content": "Compare Paris and Rome"}
PARIS = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
ROME = {"id": "c2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome", "n": 2}'}}
LOOP = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "", "reasoning_content": "need both", "tool_calls": [PARIS, ROME]},
    {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "hot"}],
    },
]
ANSWER = {"role": "assistant", "content": "A"}
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "p", "prefix": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OFF = {"thinking": {"type": "disabled"}}
PICTURE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}

BODIES: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "user_off": {"messages": [USER], **OFF},
    "two_users": {"messages": [USER, {"role": "user", "content": "b"}]},
    "parts": {"messages": [{"role": "user", "content": [_text("a"), PICTURE, _text("")]}]},
    "history": {"messages": [USER, {"role": "assistant", "content": "A", "reasoning_content": "t"}, USER]},
    "system_in_the_middle": {"messages": [USER, ANSWER, {"role": "system", "content": "s"}, USER]},
    "reminder": {"messages": [USER, {"role": "latest_reminder", "content": "Monday"}]},
    "tools": {"messages": [USER], "tools": [TOOL, TIME]},
    "tools_none": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "loop": {"messages": LOOP, "tools": [TOOL]},
    "loop_off": {"messages": LOOP, "tools": [TOOL], **OFF},
    "loop_ended": {"messages": [*LOOP, {"role": "assistant", "content": "Done."}, USER], "tools": [TOOL]},
    "prefix": {"messages": [USER, {"role": "assistant", "content": "Au", "reasoning_content": "p", "prefix": True}]},
    "prefix_of_a_thought": {"messages": [USER, THOUGHT]},
    "json_object": {"messages": [{"role": "user", "content": "json"}], "response_format": {"type": "json_object"}},
    "json_schema": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "effort_low": {"messages": [USER], "reasoning_effort": "low"},
    "effort_max": {"messages": [USER], "reasoning_effort": "max"},
    "effort_none": {"messages": [USER], "reasoning_effort": "none"},
}  # fmt: skip


def reference(body: dict[str, Any]) -> str:
    options = deepseek_recipe.ConversionOptions().with_model_alias("m", deepseek_recipe.ModelVersion.DeepseekV41Flash)
    conversation = deepseek_recipe.ChatCompletionRequest(body).convert(options).conversation
    return deepseek_recipe.DeepseekV41Encoding().render_conversation(conversation).prompt


def ours(body: dict[str, Any]) -> str:
    conversation = to_generation(parse(ChatRequest, body)).conversation
    assert conversation is not None
    return render(conversation).text


@pytest.mark.parametrize("name", BODIES)
def test_a_request_renders_as_the_reference_renders_it(name: str) -> None:
    body = {"model": "m"} | BODIES[name]
    assert ours(body) == reference(body)


def test_other_spellings_render_like_those_of_the_reference() -> None:
    """What the reference refuses or overlooks (spec/codec.md 5) and clients send."""
    body: dict[str, Any] = {"model": "m", "messages": LOOP, "tools": [TOOL]}
    plain = ours(body)
    messages = [dict(message) for message in LOOP]
    messages[0]["role"] = "developer"
    messages[2]["reasoning"] = messages[2].pop("reasoning_content")
    messages[2]["content"] = None
    assert ours(body | {"messages": messages}) == plain
    prefix = [USER, {"role": "assistant", "content": "Au", "prefix": True}]
    assert ours({"model": "m", "messages": prefix}) == ours(
        {"model": "m", "messages": [USER, {"role": "assistant", "content": "Au"}], "continue_final_message": True}
    )
    assert ours(body | {"chat_template_kwargs": {"thinking": False}}) == ours(body | OFF)
    functions: dict[str, Any] = {"model": "m", "messages": LOOP, "functions": [TOOL["function"]]}
    assert ours(functions) == plain


def test_a_forced_call_leaves_the_prompt_as_it_is() -> None:
    """The grammar forces the block, so the prompt of a loop stays the same and its cached prefix with it."""
    body: dict[str, Any] = {"model": "m", "messages": [USER], "tools": [TOOL, TIME]}
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice in ("auto", "required", named):
        assert ours(body | {"tool_choice": choice}) == ours(body)
