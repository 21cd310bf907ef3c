"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and what they ask for (spec/codec.md 7.3)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from deepinfer.codec.anthropic.blocks import Block, Message, ToolResultBlock
from deepinfer.codec.anthropic.history import turns_of
from deepinfer.codec.body import Body, Part, ignored_fields, short
from deepinfer.codec.conversation import FREE_CHOICE, Conversation, Format, Tool, ToolChoice
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import (
    MAX_MESSAGES,
    Effort,
    SamplingExtensions,
    TokenCount,
    TopP,
    check_choice,
    check_tools,
    common,
    json_schema_format,
    one_format,
    refuse,
    stop_strings,
    structured_formats,
    thinking_and_effort,
)
from deepinfer.codec.generation import GenerationRequest

IGNORED = ("metadata", "service_tier", "container", "context_management", "betas")
Temperature = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class ThinkingParam(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenCount | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Part):
    type: Literal["json_schema"]
    json_schema: Any = Field(alias="schema")


class OutputConfig(Part):
    effort: Effort | None = None
    format: JsonFormat | None = None


class ToolParam(Part):
    """A tool of the client; tools of Anthropic's own, which have other types, are refused by name."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Any = None
    input_examples: Any = None
    eager_input_streaming: bool | None = None
    allowed_callers: Any = None


class ToolChoiceParam(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptFields(Body):
    """What the prompt is made of."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    mcp_servers: list[Any] | None = None
    cache_control: Any = None


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SamplingExtensions):
    """POST /v1/messages."""

    max_tokens: TokenCount
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def to_generation(body: MessagesRequest) -> GenerationRequest:
    """Raises RequestError naming the field in the client's spelling."""
    refuse(body, "stop", "is called stop_sequences in this protocol")
    refuse(body, "compaction", "is not supported; ask for a summary in a message")
    refuse(body, "n", "one answer per request; /v1/chat/completions draws several", harmless=(None, 1))
    conversation = conversation_of(body)
    wanted = one_format([*([conversation.format] if conversation.format else []), *structured_formats(body)])
    if wanted is not None and not wanted.shown and conversation.tool_choice.mode == "required":
        message = f"{wanted.param}: a call is required, so there is no content to give a form to"
        raise RequestError(message, param=wanted.param)
    budget = body.thinking.budget_tokens if body.thinking is not None else None
    fields = common(body, body.max_tokens) | {
        "stop": stop_strings("stop_sequences", body.stop_sequences),
        "service_tier": None,
    }
    return GenerationRequest(
        conversation=conversation,
        clip_max_tokens=True,
        format=wanted,
        thinking_budget=budget if conversation.thinking else None,
        ignored=_ignored(body),
        **fields,
    )


def conversation_of(body: PromptFields) -> Conversation:
    """What the prompt is rendered from; for counting its tokens, too. Raises RequestError."""
    refuse(body, "mcp_servers", "this server connects to none; offer their tools as tools")
    refuse(body, "thread", "none are kept here; send the whole conversation", code="thread_unsupported_request")
    tools = _tools(body)
    choice = _choice(body, tools)
    config, thinking = body.output_config, body.thinking
    thinks, effort = thinking_and_effort(config.effort if config else None, thinking.type if thinking else None)
    return Conversation(
        turns=turns_of(body.system, body.messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
        thinking=thinks,
        effort=effort,
        format=_format(config),
    )


def _tools(body: PromptFields) -> tuple[Tool, ...]:
    tools, params = [], []
    for i, tool in enumerate(body.tools or ()):
        param = f"tools.{i}"
        if tool.type not in (None, "custom"):
            message = f"{param}.type: tools of type {short(tool.type)} are not supported; describe it with input_schema"
            raise RequestError(message, param=f"{param}.type")
        if tool.name is None:
            raise RequestError(f"{param}.name: is required", param=f"{param}.name")
        if tool.input_schema is None:
            raise RequestError(f"{param}.input_schema: is required", param=f"{param}.input_schema")
        if tool.input_schema.get("type", "object") != "object":
            message = f"{param}.input_schema: must be the schema of an object"
            raise RequestError(message, param=f"{param}.input_schema")
        params.append(f"{param}.name")
        tools.append(
            Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=bool(tool.strict),
            )
        )
    return check_tools(tools, params)


def _choice(body: PromptFields, tools: tuple[Tool, ...]) -> ToolChoice:
    given = body.tool_choice
    if given is None or given.type == "auto":
        return FREE_CHOICE
    if given.type == "none":
        return ToolChoice("none")
    if given.type == "any":
        return check_choice(ToolChoice("required"), tools, "tool_choice")
    if given.name is None:
        raise RequestError("tool_choice.name: is required", param="tool_choice.name")
    return check_choice(ToolChoice("required", (given.name,)), tools, "tool_choice.name")


def _format(config: OutputConfig | None) -> Format | None:
    if config is None or config.format is None:
        return None
    return json_schema_format(config.format.json_schema, "output_config.format.schema")


def _ignored(body: MessagesRequest) -> list[str]:
    names = ignored_fields(body, IGNORED, honoured=("n",))
    if any(
        isinstance(block, ToolResultBlock) and block.is_error
        for message in body.messages
        if isinstance(message.content, list)
        for block in message.content
    ):
        names.append("messages.content.is_error")
    return names
