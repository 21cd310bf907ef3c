"""A conversation as all protocols mean it: what the prompt is rendered from, whoever asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]


class Image(NamedTuple):
    """A picture's place in a text: `Turn.text` holds one `spellings.IMAGE` per picture, in order."""

    url: str  # http(s) or data URL
    detail: Literal["low", "high", "original", "auto"] = "auto"
    param: str = ""  # the field it came in, for errors


class ToolCall(NamedTuple):
    """A call in the history."""

    id: str
    name: str
    arguments: str  # as the client sent it: JSON, usually an object


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; None = none declared."""
    strict: bool = False
    """Arguments must match the schema: enforced while they are generated."""


class ToolChoice(NamedTuple):
    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None  # of the tools that may be called; None = all


FREE_CHOICE = ToolChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. Of the fields behind `text` each role has its own."""

    role: Role
    text: str = ""
    images: tuple[Image, ...] = ()
    """System, user and tool."""
    reasoning: str | None = None
    """Assistant: what it thought before `text`; None = not given."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Assistant."""
    tool_call_id: str | None = None
    """Tool: the call that it answers."""
    prefix: bool = False
    """Assistant, last turn only: the answer goes on behind it."""
    param: str = field(default="", compare=False)
    """The field it came in ("messages.3", "input.0"), for errors."""


class Format(NamedTuple):
    """What the content of the answer must be."""

    kind: Literal["json_object", "json_schema", "regex", "ebnf", "choice"]
    value: Any = None  # schema (dict or bool), pattern, grammar, list of texts
    shown: bool = False  # the prompt tells the model (response_format does, structured_outputs does not)
    param: str = ""  # the field it came in, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = FREE_CHOICE
    parallel_tool_calls: bool = True
    thinking: bool = True
    effort: int = 75
    """1 to 100, with thinking only."""
    format: Format | None = None
