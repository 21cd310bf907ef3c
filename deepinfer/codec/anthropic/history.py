"""Anthropic messages -> turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepinfer.codec.anthropic import blocks
from deepinfer.codec.body import short
from deepinfer.codec.conversation import Image, ToolCall, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import image, joined
from deepinfer.codec.sealed import unseal

ADVICE = {
    "document": "send its text in a text block, or its pages as images",
    "search_result": "send its text in a text block",
}


def turns_of(system: str | Sequence[Any] | None, messages: Sequence[blocks.Message]) -> tuple[Turn, ...]:
    """Raises RequestError; whether calls and results fit together is the template's to say.

    An assistant message at the end is the beginning of the answer. Assistant messages that follow each other are one
    turn, as Anthropic has it.
    """
    turns: list[Turn] = []
    if system:
        text = system if isinstance(system, str) else _only_text(system, "system")
        turns.append(Turn(role="system", text=text, param="system"))
    for i, message in enumerate(messages):
        param = f"messages.{i}"
        if message.role == "system":
            turns.append(Turn(role="system", text=_system_text(message, param), param=param))
        elif message.role == "user":
            turns.extend(_user(message, param))
        elif turns and turns[-1].role == "assistant":
            turns[-1] = _together(turns[-1], _assistant(message, param))
        else:
            turns.append(_assistant(message, param))
    last = turns[-1] if turns else None
    if last is not None and last.role == "assistant" and not last.tool_calls:
        if last.text or last.reasoning:
            turns[-1] = replace(last, prefix=True)
        else:
            turns.pop()  # an empty beginning is none
    return tuple(turns)


def _system_text(message: blocks.Message, param: str) -> str:
    content = message.content
    return content if isinstance(content, str) else _only_text(content, f"{param}.content")


def _only_text(given: Sequence[Any], param: str) -> str:
    for i, block in enumerate(given):
        if not isinstance(block, blocks.TextBlock):
            raise _unsupported(block, f"{param}.{i}", "here only text is possible")
    return joined([block.text for block in given if block.text], param)[0]


def _user(message: blocks.Message, param: str) -> list[Turn]:
    """Results of tools, each a turn of its own, and what the user says beside them."""
    param_of_content = f"{param}.content"
    if isinstance(message.content, str):
        if not message.content:
            raise RequestError(f"{param_of_content}: is empty", param=param_of_content)
        return [Turn(role="user", text=message.content, param=param)]
    turns: list[Turn] = []
    parts: list[str | Image] = []
    for i, block in enumerate(message.content):
        where = f"{param_of_content}.{i}"
        if not isinstance(block, blocks.ToolResultBlock):
            parts += _part(block, where)
        elif parts:
            raise RequestError(f"{where}: results of tools come first in a message", param=where)
        else:
            turns.append(_result(block, where))
    if parts:
        text, images = joined(parts, param_of_content)
        turns.append(Turn(role="user", text=text, images=images, param=param))
    if not turns:
        raise RequestError(f"{param_of_content}: is empty", param=param_of_content)
    return turns


def _result(block: blocks.ToolResultBlock, param: str) -> Turn:
    """`is_error` has no place in the prompt: the model reads in the text what went wrong."""
    content = block.content or ""
    parts: list[str | Image] = [content] if isinstance(content, str) else []
    if not isinstance(content, str):
        for i, inner in enumerate(content):
            parts += _part(inner, f"{param}.content.{i}")
    text, images = joined(parts, f"{param}.content")
    return Turn(role="tool", text=text, images=images, tool_call_id=block.tool_use_id, param=param)


def _part(block: Any, param: str) -> list[str | Image]:
    """A block of what a user or a tool says; none for an empty text."""
    if isinstance(block, blocks.TextBlock):
        return [block.text] if block.text else []
    if isinstance(block, blocks.ImageBlock):
        return [_image(block.source, f"{param}.source")]
    raise _unsupported(block, param, "send text or images")


def _image(source: blocks.ImageSource, param: str) -> Image:
    if source.type == "url":
        if source.url is None:
            raise RequestError(f"{param}.url: is required", param=f"{param}.url")
        return image(source.url, None, f"{param}.url")
    if source.type == "base64":
        for name in ("media_type", "data"):
            if getattr(source, name) is None:
                raise RequestError(f"{param}.{name}: is required", param=f"{param}.{name}")
        return image(f"data:{source.media_type};base64,{source.data}", None, f"{param}.data")
    problem = "no files are kept here; send base64" if source.type == "file" else "must be base64 or url"
    raise RequestError(f"{param}.type: {problem}, got {short(source.type)}", param=f"{param}.type")


def _assistant(message: blocks.Message, param: str) -> Turn:
    if isinstance(message.content, str):
        return Turn(role="assistant", text=message.content, param=param)
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(message.content):
        where = f"{param}.content.{i}"
        if isinstance(block, blocks.TextBlock):
            texts += [block.text] if block.text else []
        elif isinstance(block, blocks.ThinkingBlock):
            reasoning.append(_thoughts(block, where))
        elif isinstance(block, blocks.ToolUseBlock):
            calls.append(ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
        elif not isinstance(block, blocks.RedactedThinkingBlock):
            raise _unsupported(block, where, "the assistant sends text, thinking and tool_use")
    return Turn(
        role="assistant",
        text="\n\n".join(texts),
        reasoning="\n\n".join(thoughts for thoughts in reasoning if thoughts) if reasoning else None,
        tool_calls=tuple(calls),
        param=param,
    )


def _thoughts(block: blocks.ThinkingBlock, param: str) -> str:
    """What is shown, or what the signature of a block holds that shows nothing (thinking.display: omitted)."""
    if block.thinking or block.signature is None:
        return block.thinking
    try:
        return unseal(block.signature) or ""
    except ValueError as error:
        where = f"{param}.signature"
        raise RequestError(f"{where}: {error}", param=where) from None


def _together(first: Turn, second: Turn) -> Turn:
    reasoning = [turn.reasoning for turn in (first, second) if turn.reasoning is not None]
    return replace(
        first,
        text="\n\n".join(turn.text for turn in (first, second) if turn.text),
        reasoning="\n\n".join(reasoning) if reasoning else None,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _unsupported(block: Any, param: str, advice: str) -> RequestError:
    advice = ADVICE.get(block.type, advice)
    message = f"{param}.type: {short(block.type)} is not supported; {advice}"
    return RequestError(message, param=f"{param}.type")
