"""What we answer, sent back as history, is what the model said: the same turns, so the same prompt."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_answers import CONTEXT, Output, anthropic_client, outputs, play

from deepinfer.codec.anthropic import MessagesRequest, to_generation, writer
from deepinfer.codec.fields import parse

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("get_weather", "get_time")]
ASK: dict[str, Any] = {"role": "user", "content": "Hi"}


def ask(*messages: Any, **fields: Any) -> MessagesRequest:
    body = {"model": "flash", "max_tokens": 9, "messages": list(messages), "tools": TOOLS}
    return parse(MessagesRequest, body | fields)


@settings(deadline=None, max_examples=40)
@given(outputs(), st.booleans(), st.integers(1, 6), st.sampled_from(["summarized", "omitted"]))
def test_blocks_that_the_sdk_gives_back_are_the_turn_again(
    output: Output, streams: bool, cut: int, display: str
) -> None:
    body = ask(ASK, stream=streams, thinking={"type": "adaptive", "display": display})
    made = writer(body, to_generation(body), CONTEXT)
    client = anthropic_client(play(made, output.events(cut), output.finish), made.media_type)
    given_messages: Any = {"model": "flash", "max_tokens": 9, "messages": [ASK]}
    if streams:
        with client.messages.stream(**given_messages) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**given_messages)
    content = [block.to_dict() for block in message.content]
    results = [
        {"type": "tool_result", "tool_use_id": f"id_{number}", "content": "ok"} for number in range(len(output.calls))
    ]
    after = {"role": "user", "content": [*results, {"type": "text", "text": "?"}]}
    conversation = to_generation(ask(ASK, {"role": "assistant", "content": content}, after)).conversation
    assert conversation is not None
    turn = conversation.turns[1]
    assert (turn.role, turn.text, turn.reasoning) == ("assistant", output.text, output.reasoning or None)
    assert [(call.id, call.name) for call in turn.tool_calls] == [
        (f"id_{number}", call.name) for number, call in enumerate(output.calls)
    ]
    for call, said in zip(turn.tool_calls, output.calls, strict=True):
        assert json.loads(call.arguments) == json.loads(said.arguments)
        assert list(json.loads(call.arguments)) == list(json.loads(said.arguments))  # in the model's order
    assert [(turn.role, turn.text) for turn in conversation.turns[2:]] == [("tool", "ok")] * len(results) + [
        ("user", "?")
    ]
