"""A control token that is spelled in a text of a Responses or Messages request is text, wherever it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.codec import anthropic, responses
from deepinfer.codec.body import parse
from deepinfer.codec.conversation import Conversation
from deepinfer.codec.spellings import CONTROL, PICTURE_SPELLINGS, Control
from deepinfer.codec.template import render

SPELLINGS = sorted({*map(str, CONTROL), *PICTURE_SPELLINGS, "<｜action｜>", "<｜▁pad▁｜>"})


def of_responses(text: str, effort: str) -> Conversation | None:
    """A conversation with `text` in every field that takes any text."""
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}, "required": [text]}
    function = {"type": "function", "name": "f", "description": text, "parameters": schema}
    part = {"type": "input_text", "text": text}
    picture = {"type": "input_image", "image_url": f"https://x/{text}"}
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": text},
        {"role": "user", "content": [part, picture, part]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": text}]},
        {"type": "function_call", "call_id": text, "name": "f", "arguments": json.dumps({text: [text, {text: 1}]})},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": text},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": text},
        {"type": "tool_search_call", "call_id": "d", "arguments": {text: text}},
        {"type": "function_call_output", "call_id": text, "output": [part, picture]},
        {"type": "function_call_output", "call_id": "b", "output": text},
        {"type": "custom_tool_call_output", "call_id": "c", "output": text},
        {"type": "tool_search_output", "call_id": "d", "tools": [{**function, "name": "g"}]},
        {"role": "user", "content": text},
    ]
    body = {
        "model": text,
        "instructions": text,
        "input": items,
        "tools": [function, {"type": "namespace", "name": "n", "description": text, "tools": [function]}],
        "text": {"format": {"type": "json_schema", "name": text, "schema": schema}},
        "reasoning": {"effort": effort},
    }
    return responses.to_generation(parse(responses.ResponsesRequest, body)).conversation


def of_messages(text: str, effort: str) -> Conversation | None:
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}, "required": [text]}
    block = {"type": "text", "text": text}
    picture = {"type": "image", "source": {"type": "url", "url": f"https://x/{text}"}}
    use = {"type": "tool_use", "id": text, "name": "f", "input": {text: [text, {text: 1}]}}
    body = {
        "model": text,
        "max_tokens": 9,
        "system": [block, block],
        "messages": [
            {"role": "user", "content": [block, picture, block]},
            {"role": "system", "content": text},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, block, use]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": text, "content": [block, picture]}, block],
            },
        ],
        "tools": [{"name": "f", "description": text, "input_schema": schema}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": effort},
    }
    return anthropic.to_generation(parse(anthropic.MessagesRequest, body)).conversation


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("make", [of_responses, of_messages])
def test_no_text_of_a_request_forges_a_control_token(make: Any, effort: str, spelling: str) -> None:
    def controls(text: str) -> list[str]:
        rendered = render(make(text, effort))
        assert sum(text in segment for segment in rendered.segments if not isinstance(segment, Control)) > 3
        return [segment for segment in rendered.segments if isinstance(segment, Control)]

    assert controls(f"a {spelling} z") == controls("a harmless z")
