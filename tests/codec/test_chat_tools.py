"""Tools, the older functions, and the choice among them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from chat_bodies import TIME, TOOL, WEATHER, generation, refused

from deepinfer.codec.conversation import Tool, ToolChoice


def test_tools_and_the_choice_among_them() -> None:
    conversation = generation(tools=[TOOL, TIME], parallel_tool_calls=False).conversation
    assert conversation is not None
    assert conversation.tools == (
        Tool(name="get_weather", description="Weather", parameters=WEATHER),
        Tool(name="get_time"),
    )
    assert conversation.tool_choice == ToolChoice() and not conversation.parallel_tool_calls
    strict = copy.deepcopy(TOOL)
    strict["function"]["strict"] = True  # type: ignore[index]
    conversation = generation(tools=[strict]).conversation
    assert conversation is not None and conversation.tools[0].strict and conversation.parallel_tool_calls


NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (NAMED, ToolChoice("required", ("get_time",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED, NAMED]}},
            ToolChoice("auto", ("get_time",)),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            ToolChoice("required", ("get_time",)),
        ),
    ],
)
def test_a_forced_call_works_while_thinking(choice: Any, expected: ToolChoice) -> None:
    conversation = generation(tools=[TOOL, TIME], tool_choice=choice).conversation
    assert conversation is not None and conversation.thinking and conversation.tool_choice == expected


def _renamed(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [_renamed("a b")]}, "tools.0.function.name"),
        ({"tools": [_renamed("")]}, "tools.0.function.name"),
        ({"tools": [_renamed('x">')]}, "tools.0.function.name"),
        ({"tools": [_renamed("x\n")]}, "tools.0.function.name"),
        ({"tools": [_renamed("a" * 65)]}, "tools.0.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ({"tools": [_renamed(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools.0.function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice.function.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tools": [TOOL], "functions": [TOOL["function"]]}, "functions"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "other"}}, "function_call.name"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"),
    ],
)
def test_a_bad_tool_or_choice_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_tools_of_a_system_message_are_offered() -> None:
    messages = [{"role": "system", "content": "s", "tools": [TOOL]}, {"role": "user", "content": "q"}]
    conversation = generation(messages=messages, tools=[TIME]).conversation
    assert conversation is not None
    assert [tool.name for tool in conversation.tools] == ["get_time", "get_weather"]
    assert refused(messages=[{"role": "user", "content": "q", "tools": [TOOL]}]).param == "messages.0.tools"


def test_functions_of_the_older_protocol_become_tools() -> None:
    function = TOOL["function"]
    conversation = generation(functions=[function], function_call={"name": "get_weather"}).conversation
    assert conversation is not None
    assert conversation.tools[0].name == "get_weather" and not conversation.parallel_tool_calls
    assert conversation.tool_choice == ToolChoice("required", ("get_weather",))
    conversation = generation(functions=[function], function_call="none").conversation
    assert conversation is not None and conversation.tool_choice == ToolChoice("none")
