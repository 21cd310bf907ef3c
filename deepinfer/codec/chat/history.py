"""Chat messages -> turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepinfer.codec.chat.models import ChatRequest, ContentPart, Message, MessageToolCall
from deepinfer.codec.conversation import Image, Role, ToolCall, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import image, joined, refuse, short

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "latest_reminder": "latest_reminder",
}
_ASSISTANT_FIELDS = ("reasoning_content", "reasoning", "tool_calls", "function_call", "prefix")


def turns_of(body: ChatRequest) -> tuple[Turn, ...]:
    """The messages as turns. Raises RequestError; whether calls and results fit together is the template's to say."""
    last = len(body.messages) - 1
    go_on = _continues(body)
    turns: list[Turn] = []
    for i, message in enumerate(body.messages):
        param = f"messages.{i}"
        for name in _ASSISTANT_FIELDS if message.role != "assistant" else ():
            refuse(message, name, "belongs to assistant messages", path=f"{param}.")
        if message.role == "assistant":
            turns.append(_assistant(message, param, len(turns), go_on and i == last))
        else:
            turns.append(_other(message, param, turns))
    return tuple(turns)


def _continues(body: ChatRequest) -> bool:
    """Does the answer go on behind the last message, as vLLM's clients ask for it?"""
    last = body.messages[-1]
    if body.continue_final_message and last.role != "assistant":
        message = f"continue_final_message: the last message must be an assistant's, but it is a {last.role} message"
        raise RequestError(message, param="continue_final_message")
    if body.add_generation_prompt and body.continue_final_message:
        message = "add_generation_prompt: a new answer and continue_final_message exclude each other"
        raise RequestError(message, param="add_generation_prompt")
    if body.add_generation_prompt is False and not (body.continue_final_message or last.prefix):
        message = "add_generation_prompt: false needs an assistant message at the end, and continue_final_message"
        raise RequestError(message, param="add_generation_prompt")
    return bool(body.continue_final_message)


def _other(message: Message, param: str, before: Sequence[Turn]) -> Turn:
    text, images = joined(_parts(message, param), f"{param}.content")
    call_id = message.tool_call_id
    if message.role == "tool" and call_id is None:
        raise RequestError(f"{param}.tool_call_id: is required", param=f"{param}.tool_call_id")
    if message.role == "function":
        call_id = _function_call_id(message, param, before)
    role = ROLES[message.role]
    if role == "latest_reminder" and images:
        raise RequestError(f"{param}.content: a reminder holds text alone", param=f"{param}.content")
    return Turn(role=role, text=text, images=images, tool_call_id=call_id if role == "tool" else None, param=param)


def _function_call_id(message: Message, param: str, before: Sequence[Turn]) -> str:
    """The call that the result of a function answers: functions had no ids, a result followed its call."""
    calls = before[-1].tool_calls if before else ()
    if not calls or calls[0].name != message.name:
        text = f"{param}: must follow an assistant message with a function_call of {short(message.name)}"
        raise RequestError(text, param=param)
    return calls[0].id


def _assistant(message: Message, param: str, place: int, continued: bool) -> Turn:
    refuse(message, "audio", "audio is not supported", path=f"{param}.")
    calls = tuple(_tool_call(call, f"{param}.tool_calls.{i}") for i, call in enumerate(message.tool_calls or ()))
    if message.function_call is not None:
        if calls:
            text = f"{param}.function_call: give tool_calls or function_call, not both"
            raise RequestError(text, param=f"{param}.function_call")
        function = message.function_call
        calls = (ToolCall(f"function_{place}", function.name, _arguments(function.arguments)),)
    text, images = joined(_parts(message, param), f"{param}.content")
    if images:
        raise RequestError(f"{param}.content: images in assistant messages are not supported", param=f"{param}.content")
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    prefix = bool(message.prefix) or continued
    return Turn(role="assistant", text=text, reasoning=reasoning, tool_calls=calls, prefix=prefix, param=param)


def _tool_call(call: MessageToolCall, param: str) -> ToolCall:
    if call.type != "function" or call.function is None:
        raise RequestError(f"{param}: only calls of functions are supported, got {short(call.type)}", param=param)
    return ToolCall(call.id, call.function.name, _arguments(call.function.arguments))


def _arguments(value: str | dict[str, Any]) -> str:
    """The arguments' JSON; some clients send the object itself."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parts(message: Message, param: str) -> list[str | Image]:
    """The content's pieces. Only an assistant may have none: its thoughts and calls say enough."""
    content = message.content
    param = f"{param}.content"
    if content is None:
        if message.role != "assistant":
            raise RequestError(f"{param}: is required", param=param)
        return [message.refusal] if message.refusal else []
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{param}.{i}", message.role) for i, part in enumerate(content)]


def _part(part: ContentPart, param: str, role: str) -> str | Image:
    if part.type == "text":
        return _present(part.text, f"{param}.text")
    if part.type == "refusal" and role == "assistant":
        return _present(part.refusal, f"{param}.refusal")
    if part.type == "image_url":
        source = _present(part.image_url, f"{param}.image_url")
        return image(source.url, source.detail, f"{param}.image_url.url")
    if part.type == "file":
        file = _present(part.file, f"{param}.file")
        if file.file_id is not None:
            text = f"{param}.file.file_id: no files are stored here; send the picture as a data URL in file_data"
            raise RequestError(text, param=f"{param}.file.file_id")
        data = _present(file.file_data, f"{param}.file.file_data")
        if not data[:11].lower().startswith("data:image/"):
            text = f"{param}.file.file_data: must be a data URL of an image, got {short(data)}"
            raise RequestError(text, param=f"{param}.file.file_data")
        return image(data, None, f"{param}.file.file_data")
    text = f"{param}.type: must be text, image_url or file, got {short(part.type)}"
    raise RequestError(text, param=f"{param}.type")


def _present(value: Any, param: str) -> Any:
    if value is None:
        raise RequestError(f"{param}: is required", param=param)
    return value
