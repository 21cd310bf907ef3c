"""The body of POST /v1/responses, and what it asks for (spec/codec.md 7.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, TypeAdapter

from deepinfer.codec.body import Body, Part, ignored_fields
from deepinfer.codec.conversation import Conversation, Format, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import (
    Effort,
    SamplingExtensions,
    Temperature,
    TokenCount,
    TopLogprobs,
    TopP,
    check_stream_options,
    common,
    json_schema_format,
    one_format,
    refuse,
    structured_formats,
    thinking_and_effort,
)
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.responses.history import turns_of
from deepinfer.codec.responses.items import Item, SearchOutput
from deepinfer.codec.responses.tools import ChoiceFields, DeclaredTools, Offered, read_choice, read_tools

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])


class ReasoningFields(Part):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class PlainFormat(Part):
    type: Literal["text", "json_object"]


class SchemaFormat(Part):
    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Any = Field(alias="schema")
    strict: bool | None = None


class TextFields(Part):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class StreamOptions(Part):
    include_obfuscation: bool | None = None


class ResponsesRequest(Body, SamplingExtensions):
    """POST /v1/responses."""

    model: str
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    reasoning: ReasoningFields | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    text: TextFields | None = None
    tools: DeclaredTools = None
    tool_choice: ChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    _from_store: int | None = PrivateAttr(default=None)
    """How many of the input's items came out of the store; None = `previous_response_id` has not been looked up."""


def to_generation(body: ResponsesRequest) -> GenerationRequest:
    """Raises RequestError. A `previous_response_id` must have been looked up: see `with_history`."""
    _refuse_unsupported(body)
    check_stream_options(body)
    offered = offered_tools(body)
    choice = read_choice(body.tool_choice, offered)
    thinking, effort = thinking_and_effort(body.reasoning.effort if body.reasoning else None)
    wanted = one_format([*_text_format(body), *structured_formats(body)])
    if wanted is not None and not wanted.shown and choice.mode == "required":
        message = f"{wanted.param}: a call is required, so there is no content to give a form to"
        raise RequestError(message, param=wanted.param)
    conversation = Conversation(
        turns=_turns(body),
        tools=offered.tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=thinking,
        effort=effort,
        format=wanted if wanted is not None and wanted.shown else None,
    )
    return GenerationRequest(
        conversation=conversation,
        top_logprobs=_top_logprobs(body),
        format=wanted,
        thinking_budget=body.thinking_token_budget if thinking else None,
        ignored=_ignored(body, offered, thinking),
        **common(body, body.max_output_tokens),
    )


def _refuse_unsupported(body: ResponsesRequest) -> None:
    refuse(body, "background", "answers are made while the client waits; use stream")
    refuse(body, "conversation", "conversations are not kept here; use previous_response_id, or send the items")
    refuse(body, "prompt", "prompt templates are not kept here; send instructions and input")
    refuse(body, "n", "one answer per request; /v1/chat/completions draws several", harmless=(None, 1))
    refuse(body, "truncation", "nothing is left out of a prompt; shorten the input", harmless=(None, "disabled"))
    if body.previous_response_id is not None and body._from_store is None:
        message = "previous_response_id: answers are not kept here; send their items as input"
        raise RequestError(message, param="previous_response_id")


def _turns(body: ResponsesRequest) -> tuple[Turn, ...]:
    turns = []
    if body.instructions:
        turns.append(Turn(role="system", text=body.instructions, param="instructions"))
    if not body.input and body.input != "" and not body._from_store:
        raise RequestError("input: needs at least one item, or a text", param="input")
    if isinstance(body.input, str):
        turns.append(Turn(role="user", text=body.input, param="input"))
    else:
        turns.extend(turns_of(body.input or (), body._from_store or 0))
    return tuple(turns)


def offered_tools(body: ResponsesRequest) -> Offered:
    """The tools that the request declares, and those that searches in its input have found. Raises RequestError."""
    found = []
    if isinstance(body.input, list):
        first = body._from_store or 0
        found = [
            (f"input.{place - first}.tools" if place >= first else "previous_response_id", item.tools)
            for place, item in enumerate(body.input)
            if isinstance(item, SearchOutput)
        ]
    return read_tools([("tools", body.tools or ()), *found])


def _text_format(body: ResponsesRequest) -> list[Format]:
    given = body.text.format if body.text else None
    if isinstance(given, SchemaFormat):
        return [json_schema_format(given.json_schema, "text.format.schema")]
    if given is not None and given.type == "json_object":
        return [Format("json_object", None, True, "text.format")]
    return []


def _top_logprobs(body: ResponsesRequest) -> int | None:
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        return body.top_logprobs or 0
    return None


def _ignored(body: ResponsesRequest, offered: Offered, thinking: bool) -> list[str]:
    ignored = ignored_fields(body, ("max_tool_calls",), honoured=("n",))
    if body.thinking_token_budget is not None and not thinking:
        ignored.append("thinking_token_budget")
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        ignored.append("reasoning.summary")
    if body.text is not None and body.text.verbosity is not None:
        ignored.append("text.verbosity")
    if any(name not in (LOGPROBS, ENCRYPTED) for name in body.include or ()):
        ignored.append("include")
    return [*ignored, *offered.ignored]


def items_of_input(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as items, ready for JSON: what a store keeps, with `output_items` of the answer behind it, so that a
    later request can go on from there. Of a body that `with_history` made: the history and the new input."""
    if body.input is None:
        return []
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    return [item.model_dump(by_alias=True, exclude_unset=True) for item in body.input]


def output_items(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What of an answer (the whole response object) the next prompt needs. Calls that the answer's end cut off are not
    part of it: nobody can answer them."""
    return [
        _without_logprobs(item)
        for item in answer["output"]
        if not ("call_id" in item and item.get("status") == "incomplete")
    ]


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    item = {key: value for key, value in item.items() if key != "encrypted_content"}
    if item["type"] == "message":
        item["content"] = [{**part, "logprobs": []} for part in item["content"]]
    return item


def with_history(body: ResponsesRequest, items: Sequence[dict[str, Any]]) -> ResponsesRequest:
    """The request with `items` (what the store has for its previous_response_id) in front of its input. The earlier
    instructions are not part of them: OpenAI does not carry them over either."""
    read = _ITEMS.validate_python([*items, *items_of_input(body)])
    result = body.model_copy(update={"input": read})
    result._from_store = len(items)
    return result
