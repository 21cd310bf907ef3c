"""Items, of which the input and the output of a response consist: their shapes as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from deepinfer.codec.fields import ImageDetail, Part
from deepinfer.codec.responses.tools import ToolFields, kind_of

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Part):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str


class ImagePart(Part):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: ImageDetail | None = None
    prompt_cache_breakpoint: Any = None


class OtherPart(Part):
    """Refused by its type's name."""

    type: str


def _part_tag(part: Any) -> str:
    kind = kind_of(part)
    if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        return "a text"
    return {"refusal": "a refusal", "input_image": "an image"}.get(kind or "", "another part")


ContentPart = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[ImagePart, Tag("an image")]
    | Annotated[OtherPart, Tag("another part")],
    Discriminator(_part_tag),
]


class Message(Part):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class ReasoningItem(Part):
    type: Literal["reasoning"]
    content: list[TextPart] | None = None
    summary: list[TextPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None


class FunctionCall(Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: Status | None = None
    caller: Any = None


class CallOutput(Part):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class CustomCall(Part):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: Status | None = None
    caller: Any = None


class SearchCall(Part):
    type: Literal["tool_search_call"]
    call_id: str | None = None
    arguments: Any = None
    execution: Literal["server", "client"] | None = None
    id: str | None = None
    status: Status | None = None


class SearchOutput(Part):
    type: Literal["tool_search_output"]
    tools: list[ToolFields]
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    id: str | None = None
    status: Status | None = None


class OtherItem(Part):
    """Refused by its type's name."""

    type: str = Field(description="Items of other types are refused.")


_TAGS = {
    "message": "a message",
    "reasoning": "reasoning",
    "function_call": "a call",
    "function_call_output": "a call's output",
    "custom_tool_call": "a custom call",
    "custom_tool_call_output": "a call's output",
    "tool_search_call": "a search",
    "tool_search_output": "a search's output",
}


def _item_tag(item: Any) -> str:
    kind = kind_of(item)
    if kind is None and (isinstance(item, Message) or (isinstance(item, dict) and "role" in item)):
        return "a message"
    return _TAGS.get(kind or "", "another item")


Item = Annotated[
    Annotated[Message, Tag("a message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("a call")]
    | Annotated[CallOutput, Tag("a call's output")]
    | Annotated[CustomCall, Tag("a custom call")]
    | Annotated[SearchCall, Tag("a search")]
    | Annotated[SearchOutput, Tag("a search's output")]
    | Annotated[OtherItem, Tag("another item")],
    Discriminator(_item_tag),
]
