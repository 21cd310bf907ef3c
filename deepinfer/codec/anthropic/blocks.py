"""Content blocks of Anthropic messages: their shapes as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from deepinfer.codec.body import Part


class TextBlock(Part):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


class ImageSource(Part):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(Part):
    type: Literal["image"]
    source: ImageSource
    cache_control: Any = None


class ThinkingBlock(Part):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Part):
    """Another server's thoughts, which nobody here can read."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class OtherBlock(Part):
    """Refused by its type's name."""

    type: str


_TAGS = {  # no names of fields: errors tell these from the client's keys by their spelling
    "text": "a text",
    "image": "an image",
    "thinking": "thoughts",
    "redacted_thinking": "redacted thoughts",
    "tool_use": "a call",
    "tool_result": "a result",
}


def _tag(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return _TAGS.get(kind, "another block") if isinstance(kind, str) else "another block"


Block = Annotated[
    Annotated[TextBlock, Tag("a text")]
    | Annotated[ImageBlock, Tag("an image")]
    | Annotated[ThinkingBlock, Tag("thoughts")]
    | Annotated[RedactedThinkingBlock, Tag("redacted thoughts")]
    | Annotated[ToolUseBlock, Tag("a call")]
    | Annotated[ToolResultBlock, Tag("a result")]
    | Annotated[OtherBlock, Tag("another block")],
    Discriminator(_tag),
]
ToolResultBlock.model_rebuild()


class Message(Part):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
