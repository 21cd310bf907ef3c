"""What we answer, sent back as history, is what the model said: the same turns, so the same prompt."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_answers import CONTEXT, Output, openai_client, outputs, play

from deepinfer.codec.conversation import ToolCall, Turn
from deepinfer.codec.fields import parse
from deepinfer.codec.responses import (
    ResponsesRequest,
    items_of_input,
    output_items,
    to_generation,
    with_history,
    writer,
)

TOOLS = [
    {"type": "function", "name": "get_weather"},
    {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "get_time"}]},
    {"type": "custom", "name": "apply_patch"},
    {"type": "tool_search", "execution": "client"},
]
NAMES = ("get_weather", "crm::get_time", "apply_patch", "tool_search")


def turn_of(output: Output) -> Turn:
    """What the model said. A call of apply_patch has its text alone."""
    calls = tuple(ToolCall(f"id_{i}", call.name, call.arguments) for i, call in enumerate(output.calls))
    return Turn(role="assistant", text=output.text, reasoning=output.reasoning or None, tool_calls=calls)


def same(turn: Turn, output: Output) -> None:
    expected = turn_of(output)
    assert (turn.role, turn.text, turn.reasoning) == (expected.role, expected.text, expected.reasoning)
    assert [call[:2] for call in turn.tool_calls] == [call[:2] for call in expected.tool_calls]
    for call, said in zip(turn.tool_calls, expected.tool_calls, strict=True):
        if call.name == "apply_patch":
            value = json.loads(said.arguments).get("input")
            assert json.loads(call.arguments) == {"input": value if isinstance(value, str) else said.arguments}
        elif call.name == "tool_search":
            assert json.loads(call.arguments) == json.loads(said.arguments)
        else:
            assert call.arguments == said.arguments  # to the letter


def results(output: Output) -> list[dict[str, Any]]:
    kinds = {"apply_patch": "custom_tool_call_output", "tool_search": "tool_search_output"}
    items: list[dict[str, Any]] = []
    for number, call in enumerate(output.calls):
        kind = kinds.get(call.name, "function_call_output")
        items.append({"type": kind, "call_id": f"id_{number}", "output": "ok"})
        if call.name == "tool_search":
            items[-1] |= {"tools": []}
    return items


def ask(**fields: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, {"model": "flash", "tools": TOOLS} | fields)


@settings(deadline=None, max_examples=40)
@given(outputs(NAMES), st.booleans(), st.integers(1, 6))
def test_items_that_the_sdk_gives_back_are_the_turn_again(output: Output, streams: bool, cut: int) -> None:
    body = ask(input="Hi", stream=streams)
    made = writer(body, to_generation(body), CONTEXT)
    client = openai_client(play(made, output.events(cut), output.finish), made.media_type)
    if streams:
        with client.responses.stream(model="flash", input="Hi") as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(model="flash", input="Hi")  # type: ignore[assignment]
    items = [item.to_dict() for item in response.output]
    again = ask(input=[{"role": "user", "content": "Hi"}, *items, *results(output), {"role": "user", "content": "?"}])
    wanted = to_generation(again)
    conversation = wanted.conversation
    assert conversation is not None and conversation.turns[0].text == "Hi"
    if output != Output():
        same(conversation.turns[1], output)
    assert len(conversation.turns) == 2 + (output != Output()) + len(output.calls)


@settings(deadline=None, max_examples=40)
@given(outputs(NAMES), outputs(NAMES))
def test_a_chain_of_stored_answers_is_the_conversation(first: Output, second: Output) -> None:
    stored: list[dict[str, Any]] = []
    body = ask(input="Hi")
    for number, output in enumerate((first, second)):
        made = writer(body, to_generation(body), CONTEXT)
        play(made, output.events(), output.finish)
        assert made.answer is not None
        stored = json.loads(json.dumps([*items_of_input(body), *output_items(made.answer)]))
        new = [*results(output), {"role": "user", "content": f"go on {number}"}]
        body = with_history(ask(input=new, previous_response_id=made.answer["id"]), stored)
    conversation = to_generation(body).conversation
    assert conversation is not None
    said = [turn for turn in conversation.turns if turn.role == "assistant"]
    for turn, output in zip(said, [one for one in (first, second) if one != Output()], strict=True):
        same(turn, output)
    users = [turn.text for turn in conversation.turns if turn.role == "user"]
    assert users == ["Hi", "go on 0", "go on 1"]
