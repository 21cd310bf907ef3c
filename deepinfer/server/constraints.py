"""What a request asks of the form of its answer -> grammar.Structure, which the engine enforces (spec/codec.md 8)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deepinfer.codec.conversation import Conversation, Format, Tool, ToolChoice
from deepinfer.codec.generation import GenerationRequest
from deepinfer.grammar.limits import THINKING_BUDGET
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar


def structure_of(
    generation: GenerationRequest, *, thinking: bool, continued: str = "", tool_grammar: bool = True
) -> Structure | None:
    """None if nothing is enforced. thinking: the output begins inside <think>. continued: content that the prompt holds
    already. tool_grammar: calls are held to their form even where a request leaves the choice to the model."""
    conversation = generation.conversation
    tools, mode = ((), "none") if conversation is None else _tools(conversation, generation.format, tool_grammar)
    structure = Structure(
        content=None if generation.format is None else _grammar(generation.format),
        tools=tuple(tools),
        tool_mode=mode,  # type: ignore[arg-type]
        parallel_calls=conversation is None or conversation.parallel_tool_calls,
        thinking=thinking,
        thinking_budget=_budget(generation) if thinking else None,
        prefix=continued if generation.format is not None else "",
    )
    return None if structure.is_empty else structure


def _budget(generation: GenerationRequest) -> int | None:
    """Above the grammar's limit no context is longer."""
    return None if generation.thinking_budget is None else min(generation.thinking_budget, THINKING_BUDGET)


def callable_tools(conversation: Conversation) -> list[Tool]:
    """The tools that the choice leaves."""
    choice: ToolChoice = conversation.tool_choice
    if choice.mode == "none":
        return []
    return [tool for tool in conversation.tools if choice.names is None or tool.name in choice.names]


def _tools(conversation: Conversation, content: Format | None, tool_grammar: bool) -> tuple[Iterable[ToolGrammar], str]:
    tools = callable_tools(conversation)
    choice = conversation.tool_choice
    if not tools:
        return (), "none"
    asked = (
        choice.mode == "required"
        or choice.names is not None
        or content is not None
        or not conversation.parallel_tool_calls
        or any(tool.strict for tool in tools)
    )
    if not asked and not tool_grammar:
        return (), "none"
    return [_tool_grammar(tool) for tool in tools], "required" if choice.mode == "required" else "auto"


def _tool_grammar(tool: Tool) -> ToolGrammar:
    """What is not enforced is left out, so that requests which differ in it alone share what is compiled."""
    if not tool.strict or tool.parameters is None:
        return ToolGrammar(tool.name, strict=tool.strict)
    return ToolGrammar(tool.name, _json(tool.parameters), True)


def _grammar(content: Format) -> Grammar:
    if content.kind == "json_object":
        return Grammar("json_object")
    if content.kind in ("json_schema", "choice"):
        return Grammar(content.kind, _json(content.value))
    return Grammar(content.kind, content.value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
