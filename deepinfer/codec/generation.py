"""A request of any protocol, taken apart: what to render, how to sample, what to send back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from deepinfer.codec.conversation import Conversation, Format
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Event


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    model: str
    conversation: Conversation | None = None
    prompts: list[str | list[int]] | None = None
    """/v1/completions: texts (untrusted: no control tokens but BOS in front) or ids, instead of a conversation."""
    n: int = 1
    stream: bool = False
    max_tokens: int | None = None
    """None = the default budget of spec/codec.md 2."""
    clip_max_tokens: bool = False
    """A max_tokens beyond the context is lowered instead of refused (Anthropic)."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """What the client gave of these fields of SamplingParams: temperature, top_p, top_k, min_p, presence_penalty,
    frequency_penalty, repetition_penalty, seq_seed, min_tokens, stop_token_ids, ignore_eos, logit_bias."""
    allowed_token_ids: list[int] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    """Matched on the content alone, by the parser."""
    include_stop: bool = False
    top_logprobs: int | None = None
    """Alternatives per content token; None = no log-probabilities are wanted."""
    format: Format | None = None
    """What the content must be (the same object as conversation.format where that shows it)."""
    thinking_budget: int | None = None
    """Most tokens of reasoning before `</think>` is forced."""
    include_reasoning: bool = True
    service_tier: str | None = None
    priority: int | None = None
    cache_salt: str = ""
    """Divides the tenant's own share of the prefix cache."""
    request_id: str | None = None
    ignored: list[str] = field(default_factory=list)
    """Fields that were given and have no effect: named in the log and in the header x-ignored-fields."""


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float  # natural log, of the raw distribution
    top: Mapping[int, float] | None = None  # the most likely ids


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0  # of all completions, stop tokens included
    reasoning_tokens: int = 0


class Finish(NamedTuple):
    """How one completion ended."""

    reason: str  # "stop", "length", "tool_calls", "abort", "deadline" or "error"
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterContext:
    """What a writer needs besides the request."""

    id: str  # of the answer, without the protocol's prefix
    created: int  # Unix seconds
    model: str  # as the client named it
    token_bytes: Callable[[int], bytes]
    fingerprint: str = ""  # of the model and the engine's settings


class AnswerWriter(Protocol):
    """Renders one answer, all its completions, as the bytes of the response body; streams and complete answers alike.
    Calls come in this order: start, then events and finish of every completion as they happen, then end or error.

    A stream's methods return the frames to send now (b"" for none); a complete answer's return b"" until `end`, which
    returns the whole body.
    """

    media_type: str

    def start(self, usage: Usage) -> bytes: ...
    def events(self, index: int, events: Sequence[Event], logprobs: Mapping[int, TokenLogprob]) -> bytes:
        """logprobs: by place, at least those that the events list; empty where none are wanted."""

    def finish(self, index: int, finish: Finish) -> bytes: ...
    def end(self, usage: Usage) -> bytes: ...
    def error(self, error: RequestError) -> bytes:
        """After the first byte of a stream: the protocol's own error, and the stream's end."""

    def heartbeat(self) -> bytes:
        """Keeps a stream open that has nothing to say; b"" for complete answers."""
