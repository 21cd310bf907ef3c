"""The protocols that generate: one row each, of the codec's functions and the protocol's own habits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.codec import anthropic
from deepinfer.codec.body import Body
from deepinfer.codec.chat.request import ChatRequest
from deepinfer.codec.chat.request import to_generation as chat_generation
from deepinfer.codec.chat.writer import make_call_id as chat_call_id
from deepinfer.codec.chat.writer import writer as chat_writer
from deepinfer.codec.completions.request import CompletionRequest
from deepinfer.codec.completions.request import to_generation as completion_generation
from deepinfer.codec.completions.writer import writer as completion_writer
from deepinfer.codec.generation import AnswerWriter, GenerationRequest
from deepinfer.codec.responses import make_call_id as responses_call_id
from deepinfer.codec.responses.request import ResponsesRequest
from deepinfer.codec.responses.request import to_generation as responses_generation
from deepinfer.codec.responses.writer import writer as responses_writer
from deepinfer.server.errors import OPENAI_ERRORS, STATUSES, ErrorShape

ANTHROPIC_ERRORS = ErrorShape(
    anthropic.error_body,
    anthropic.error_status,
    anthropic.ERROR_SCHEMA,
    {**STATUSES, anthropic.OVERLOADED: "Overloaded.", 503: "Not now: loading or draining."},
)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    name: str
    """In traces and metrics, and `kind` at the gate."""
    path: str
    summary: str
    body: type[Body]
    to_generation: Callable[[Any], GenerationRequest]
    writer: Callable[..., AnswerWriter]
    errors: ErrorShape
    make_call_id: Callable[[], str]
    names: Mapping[str, str]
    """The engine's name of a parameter -> the field that it comes from, where that has another name; the prompt's is
    `prompt_token_ids`."""
    heartbeat: float = 15.0
    """Longest silence of a stream in seconds."""
    is_plain: bool = False
    """Outputs are text alone: no reasoning, no calls."""


CHAT = Protocol(
    name="chat",
    path="/v1/chat/completions",
    summary="OpenAI's Chat Completions.",
    body=ChatRequest,
    to_generation=chat_generation,
    writer=chat_writer,
    errors=OPENAI_ERRORS,
    make_call_id=chat_call_id,
    names={"prompt_token_ids": "messages"},
)
COMPLETIONS = Protocol(
    name="completions",
    path="/v1/completions",
    summary="OpenAI's older Completions: texts to go on with.",
    body=CompletionRequest,
    to_generation=completion_generation,
    writer=completion_writer,
    errors=OPENAI_ERRORS,
    make_call_id=chat_call_id,
    names={"prompt_token_ids": "prompt", "logprobs": "logprobs"},
    is_plain=True,
)
RESPONSES = Protocol(
    name="responses",
    path="/v1/responses",
    summary="OpenAI's Responses.",
    body=ResponsesRequest,
    to_generation=responses_generation,
    writer=responses_writer,
    errors=OPENAI_ERRORS,
    make_call_id=responses_call_id,
    names={"prompt_token_ids": "input", "max_tokens": "max_output_tokens"},
)
MESSAGES = Protocol(
    name="messages",
    path="/v1/messages",
    summary="Anthropic's Messages.",
    body=anthropic.MessagesRequest,
    to_generation=anthropic.to_generation,
    writer=anthropic.writer,
    errors=ANTHROPIC_ERRORS,
    make_call_id=anthropic.make_call_id,
    names={"prompt_token_ids": "messages", "stop": "stop_sequences"},
    heartbeat=10.0,
)
PROTOCOLS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def errors_of(path: str) -> ErrorShape:
    """How errors look at a path."""
    for protocol in PROTOCOLS:
        if path == protocol.path or path.startswith(f"{protocol.path}/"):
            return protocol.errors
    return OPENAI_ERRORS
