"""Chat Completions answers: `chat.completion.chunk` streams and complete `chat.completion` objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from deepinfer.codec import sse
from deepinfer.codec.chat.models import ChatRequest
from deepinfer.codec.chat.tools import uses_functions
from deepinfer.codec.chunks import Chunks, header
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.generation import AnswerWriter, Finish, GenerationRequest, TokenLogprob, Usage, WriterContext
from deepinfer.codec.openai_errors import error_body
from deepinfer.codec.openai_objects import finish_reason, logprob_object, usage_object

_text = sse.json_bytes


def make_call_id() -> str:
    """An id for a tool call."""
    return f"call_{uuid4().hex}"


def writer(body: ChatRequest, generation: GenerationRequest, context: WriterContext) -> AnswerWriter:
    """Renders the answer to `body`: a stream, or one object at its end."""
    if generation.stream:
        return ChatStream(body, generation, context)
    return ChatAnswer(body, generation, context)


class ChatStream:
    """A delta for every piece of reasoning, content and arguments; the first of each choice names the role."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, body: ChatRequest, generation: GenerationRequest, context: WriterContext) -> None:
        answer_id = f"chatcmpl-{context.id}"
        self._chunks = Chunks("chat.completion.chunk", answer_id, generation.n, context, body.stream_options)
        self._num_choices = generation.n
        self._show_reasoning = generation.include_reasoning
        self._thinks = generation.conversation is not None and generation.conversation.thinking
        self._top = generation.top_logprobs
        self._token_bytes = context.token_bytes
        self._functions = uses_functions(body)

    def start(self, usage: Usage) -> bytes:
        self._chunks.start(usage)
        delta = b'"delta":{"role":"assistant","content":null'
        delta += b',"reasoning_content":""}' if self._thinks and self._show_reasoning else b"}"
        return b"".join(self._chunks.piece(index, delta) for index in range(self._num_choices))

    def events(self, index: int, events: Sequence[Event], logprobs: Mapping[int, TokenLogprob]) -> bytes:
        return b"".join([self._frame(index, event, logprobs) for event in events])

    def _frame(self, index: int, event: Event, logprobs: Mapping[int, TokenLogprob]) -> bytes:
        if isinstance(event, Content):
            self._chunks.add(len(event.tokens))
            payload = b'"delta":{"content":' + _text(event.text) + b"}"
            if self._top is None:
                return self._chunks.piece(index, payload) if event.text else b""
            return self._chunks.choice(index, payload, _text(_logprobs(event, logprobs, self._top, self._token_bytes)))
        if isinstance(event, Reasoning):
            self._chunks.add(len(event.tokens), len(event.tokens))
            if not self._show_reasoning or not event.text:
                return b""
            return self._chunks.piece(index, b'"delta":{"reasoning_content":' + _text(event.text) + b"}")
        if isinstance(event, ToolEnd):
            return b""  # its arguments have been sent
        return self._chunks.piece(index, b'"delta":' + self._call(event))

    def _call(self, event: ToolStart | ToolArguments) -> bytes:
        if isinstance(event, ToolArguments):
            if self._functions:
                return b'{"function_call":{"arguments":%b}}' % _text(event.text)
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (event.call, _text(event.text))
        function = b'{"name":%b,"arguments":""}' % _text(event.name)
        if self._functions:
            return b'{"function_call":%b}' % function
        return b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":%b}]}' % (
            event.call,
            _text(event.id),
            function,
        )

    def finish(self, index: int, finish: Finish) -> bytes:
        return self._chunks.choice(index, b'"delta":{}', reason=_text(_reason(finish, self._functions)))

    def end(self, usage: Usage) -> bytes:
        return self._chunks.end(usage)

    def error(self, error: RequestError) -> bytes:
        return self._chunks.error(error)

    def heartbeat(self) -> bytes:
        return sse.COMMENT


class ChatAnswer:
    """Collects the events of every choice; the object is written at the end."""

    media_type = "application/json"

    def __init__(self, body: ChatRequest, generation: GenerationRequest, context: WriterContext) -> None:
        self._generation = generation
        self._context = context
        self._functions = uses_functions(body)
        self._choices = [_Choice() for _ in range(generation.n)]

    def start(self, usage: Usage) -> bytes:
        return b""

    def events(self, index: int, events: Sequence[Event], logprobs: Mapping[int, TokenLogprob]) -> bytes:
        choice, top = self._choices[index], self._generation.top_logprobs
        for event in events:
            if isinstance(event, Content):
                choice.content.append(event.text)
                if top is not None:
                    choice.logprobs += _logprobs(event, logprobs, top, self._context.token_bytes)["content"]
            elif isinstance(event, Reasoning):
                choice.reasoning.append(event.text)
            elif isinstance(event, ToolStart):
                choice.calls[event.call] = {
                    "id": event.id,
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            elif isinstance(event, ToolEnd):
                choice.calls[event.call]["function"]["arguments"] = event.arguments
        return b""

    def finish(self, index: int, finish: Finish) -> bytes:
        self._choices[index].reason = _reason(finish, self._functions)
        return b""

    def end(self, usage: Usage) -> bytes:
        answer = header("chat.completion", f"chatcmpl-{self._context.id}", self._context)
        answer["choices"] = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        answer["usage"] = usage_object(usage)
        return sse.json_bytes(answer)

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        conversation = self._generation.conversation
        text = "".join(choice.content)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if choice.calls else "")}
        message["refusal"] = None
        if self._generation.include_reasoning and (choice.reasoning or (conversation and conversation.thinking)):
            message["reasoning_content"] = "".join(choice.reasoning)
        calls = list(choice.calls.values())
        if calls and self._functions:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        wanted = self._generation.top_logprobs is not None
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if wanted else None,
            "finish_reason": choice.reason,
        }

    def error(self, error: RequestError) -> bytes:
        return sse.json_bytes(error_body(error))

    def heartbeat(self) -> bytes:
        return b""


class _Choice:
    """What one completion has said so far."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[dict[str, Any]] = []
        self.reason: str | None = None


def _logprobs(event: Content, entries: Mapping[int, TokenLogprob], top: int, token_bytes: Any) -> dict[str, Any]:
    """`choices[].logprobs` of a piece of content: its own tokens alone."""
    content = [logprob_object(entries[place], top, token_bytes) for place in event.tokens]
    return {"content": content, "refusal": None}


def _reason(finish: Finish, functions: bool) -> str:
    reason = finish_reason(finish)
    return "function_call" if functions and reason == "tool_calls" else reason
