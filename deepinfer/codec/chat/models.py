"""The body of a Chat Completions request as pydantic models: types, ranges and what OpenAPI shows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from deepinfer.codec.fields import (
    MAX_MESSAGES,
    MAX_N,
    Body,
    Effort,
    ImageDetail,
    Part,
    SamplingExtensions,
    Temperature,
    ThinkingFields,
    TokenCount,
    TopLogprobs,
    TopP,
)
from deepinfer.codec.openai_models import ResponseFormat, StreamOptions


class ImageUrl(Part):
    url: str
    detail: ImageDetail | None = None


class File(Part):
    file_data: str | None = None
    """A data URL of a picture."""
    file_id: str | None = None


class ContentPart(Part):
    """A piece of a message: `type` says which of the other fields it has."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None
    file: File | None = None
    refusal: str | None = None


class CalledFunction(Part):
    name: str
    arguments: str | dict[str, Any] = ""


class MessageToolCall(Part):
    id: str
    type: str = "function"
    function: CalledFunction | None = None


class FunctionDefinition(Part):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(Part):
    type: str
    function: FunctionDefinition | None = None


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool", "function", "latest_reminder"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    prefix: bool | None = None
    tools: list[ToolParam] | None = None
    audio: Any = None
    refusal: str | None = None


class FunctionName(Part):
    name: str


class NamedFunction(Part):
    type: str = "function"
    function: FunctionName | None = None


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class ToolChoiceObject(Part):
    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class TemplateArguments(Part):
    """Switches of other engines' templates that clients send along."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None


class ChatRequest(Body, SamplingExtensions):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[ToolParam] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: Literal["auto", "none"] | FunctionName | None = None
    response_format: ResponseFormat | None = None
    thinking: ThinkingFields | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
