"""Items -> turns: what the model made in one go (reasoning, text, calls) is one assistant turn again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepinfer.codec.body import Part, short
from deepinfer.codec.conversation import Image, ToolCall, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import MAX_MESSAGES, image, joined
from deepinfer.codec.responses import items
from deepinfer.codec.responses.tools import APPLY_PATCH, TOOL_SEARCH, model_name
from deepinfer.codec.sealed import unseal

ADVICE = {
    "item_reference": "send the item itself",
    "input_file": "send its text, or its pages as images",
    "input_audio": "send its text",
}


def turns_of(given: Sequence[Part], first: int = 0) -> list[Turn]:
    """The turns of `given`, which are items. first: the place of given[0] in the client's own input: errors name
    places from there; what is before came out of our store. Raises RequestError.

    A call that is marked incomplete and has no output is left out: the answer was cut inside it, and its author goes
    on without it.
    """
    if len(given) > MAX_MESSAGES:
        raise RequestError(f"input: at most {MAX_MESSAGES} items, got {len(given)}", param="input")
    answered = {item.call_id for item in given if isinstance(item, items.CallOutput | items.SearchOutput)}
    turns: list[Turn] = []
    assistant: _Assistant | None = None
    for place, item in enumerate(given):
        param = f"input.{place - first}" if place >= first else "previous_response_id"
        if _is_cut_call(item) and item.call_id not in answered:  # type: ignore[attr-defined]
            continue
        if _is_assistants(item):
            if assistant is None:
                assistant = _Assistant(param)
            assistant.add(item, param)
            continue
        if assistant is not None:
            turns.append(assistant.turn())
            assistant = None
        turns.append(_other_turn(item, param))
    if assistant is not None:
        turns.append(assistant.turn())
    return turns


def _is_cut_call(item: Part) -> bool:
    return isinstance(item, items.FunctionCall | items.CustomCall | items.SearchCall) and item.status == "incomplete"


def _is_assistants(item: Part) -> bool:
    if isinstance(item, items.Message):
        return item.role == "assistant"
    return isinstance(item, items.ReasoningItem | items.FunctionCall | items.CustomCall | items.SearchCall)


class _Assistant:
    """An assistant turn while its items come in."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, item: Any, param: str) -> None:
        if isinstance(item, items.Message):
            text, images = content(item.content, f"{param}.content")
            if images:
                raise RequestError(f"{param}.content: the assistant sends no images", param=f"{param}.content")
            if text:
                self._texts.append(text)
        elif isinstance(item, items.ReasoningItem):
            reasoning = _reasoning(item, param)
            if reasoning is not None:
                self._reasoning.append(reasoning)
        elif isinstance(item, items.FunctionCall):
            self._calls.append(ToolCall(item.call_id, model_name(item.name, item.namespace), item.arguments))
        elif isinstance(item, items.CustomCall):
            if item.name != APPLY_PATCH:
                message = f"{param}.name: of the custom tools only {APPLY_PATCH} is supported, got {short(item.name)}"
                raise RequestError(message, param=f"{param}.name")
            self._calls.append(ToolCall(item.call_id, item.name, to_json({"input": item.input})))
        else:
            arguments = item.arguments
            text = arguments if isinstance(arguments, str) else to_json(arguments)
            self._calls.append(ToolCall(_search_id(item, param), TOOL_SEARCH, text))

    def turn(self) -> Turn:
        return Turn(
            role="assistant",
            text="\n\n".join(self._texts),
            reasoning="\n\n".join(self._reasoning) if self._reasoning else None,
            tool_calls=tuple(self._calls),
            param=self._param,
        )


def _reasoning(item: items.ReasoningItem, param: str) -> str | None:
    """What the model thought: in full, else what our sealed copy holds, else a summary of it."""
    if item.content:
        return "\n\n".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        try:
            text = unseal(item.encrypted_content)
        except ValueError as error:
            where = f"{param}.encrypted_content"
            raise RequestError(f"{where}: {error}", param=where) from None
        if text is not None:
            return text
    return "\n\n".join(part.text for part in item.summary) if item.summary else None


def _other_turn(item: Any, param: str) -> Turn:
    if isinstance(item, items.Message):
        text, images = content(item.content, f"{param}.content")
        role = "user" if item.role == "user" else "system"
        return Turn(role=role, text=text, images=images, param=param)  # type: ignore[arg-type]
    if isinstance(item, items.CallOutput):
        text, images = content(item.output, f"{param}.output")
        return Turn(role="tool", text=text, images=images, tool_call_id=item.call_id, param=param)
    if isinstance(item, items.SearchOutput):
        tools = [tool.model_dump(by_alias=True, exclude_unset=True) for tool in item.tools]
        return Turn(role="tool", text=to_json(tools), tool_call_id=_search_id(item, param), param=param)
    advice = ADVICE.get(item.type, "leave it out")
    message = f"{param}.type: items of type {short(item.type)} are not supported; {advice}"
    raise RequestError(message, param=f"{param}.type")


def _search_id(item: items.SearchCall | items.SearchOutput, param: str) -> str:
    if item.call_id is None or item.execution == "server":
        message = f"{param}: only searches for tools that the client carries out are supported, with a call_id"
        raise RequestError(message, param=param)
    return item.call_id


def content(given: str | Sequence[Any], param: str) -> tuple[str, tuple[Image, ...]]:
    """Turn.text and Turn.images of a message's or an output's content."""
    if isinstance(given, str):
        return given, ()
    return joined([_part(part, f"{param}.{i}") for i, part in enumerate(given)], param)


def _part(part: Any, param: str) -> str | Image:
    if isinstance(part, items.TextPart):
        return part.text
    if isinstance(part, items.RefusalPart):
        return part.refusal
    if isinstance(part, items.ImagePart):
        if part.image_url is None:
            problem = "files are not kept here" if part.file_id is not None else "is required"
            name = "file_id" if part.file_id is not None else "image_url"
            raise RequestError(f"{param}.{name}: {problem}; send image_url", param=f"{param}.{name}")
        return image(part.image_url, part.detail, f"{param}.image_url")
    advice = ADVICE.get(part.type, "send text or images")
    raise RequestError(f"{param}.type: {short(part.type)} is not supported; {advice}", param=f"{param}.type")


def to_json(value: Any) -> str:
    """As the prompt spells JSON (spec/codec.md 1.3, rule 9)."""
    return json.dumps(value, ensure_ascii=False)
