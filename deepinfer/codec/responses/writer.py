"""Neutral events -> a response: a stream of named events, or one object (shapes: spec/codec.md 4.6)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.codec import sse
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart, merged
from deepinfer.codec.generation import Finish, GenerationRequest, TokenLogprob, Usage, WriterContext
from deepinfer.codec.openai_errors import error_body
from deepinfer.codec.openai_objects import finish_reason, logprob_object
from deepinfer.codec.responses.output import CALLS, CallOutput, Events, MessageOutput, ReasoningOutput, TextItem
from deepinfer.codec.responses.request import ENCRYPTED, ResponsesRequest, offered_tools
from deepinfer.codec.responses.response import response_object, usage_object
from deepinfer.codec.responses.tools import ClientName
from deepinfer.codec.sse import json_bytes


def writer(body: ResponsesRequest, generation: GenerationRequest, context: WriterContext) -> ResponsesWriter:
    """generation: of `body`; its sampling and service tier are what the answer reports."""
    return ResponsesWriter(body, generation, context)


class ResponsesWriter:
    """`answer` is the whole response object once `end` or `error` was called: what a store keeps."""

    def __init__(self, body: ResponsesRequest, generation: GenerationRequest, context: WriterContext) -> None:
        self._streaming = generation.stream
        self.media_type = sse.MEDIA_TYPE if self._streaming else "application/json"
        self.answer: dict[str, Any] | None = None
        self._context = context
        self._base = response_object(body, generation, context)
        self._names = offered_tools(body).names
        self._sealed = ENCRYPTED in (body.include or ())
        self._top = generation.top_logprobs
        self._frames: list[bytes] = []
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: TextItem | CallOutput | None = None
        self._delta_head = b""
        self._finish = Finish("stop")

    def start(self, usage: Usage) -> bytes:
        for name in ("response.created", "response.in_progress"):
            self._emit([(name, {"response": self._base})])
        return self._sent()

    def events(self, index: int, events: Sequence[Event], logprobs: Mapping[int, TokenLogprob]) -> bytes:
        for event in merged(events) if len(events) > 1 else events:
            if isinstance(event, Content):
                self._content(event, logprobs)
            elif isinstance(event, Reasoning):
                self._reasoning(event)
            elif isinstance(event, ToolArguments):
                self._arguments(event.text)
            elif isinstance(event, ToolStart):
                self._call(event)
            else:
                self._close(end=event)
        return self._sent()

    def finish(self, index: int, finish: Finish) -> bytes:
        self._finish = finish
        self._close(status="completed" if finish.reason in ("stop", "tool_calls") else "incomplete")
        return self._sent()

    def end(self, usage: Usage) -> bytes:
        status, more = _ending(self._finish)
        self.answer = self._whole(status) | more | {"usage": usage_object(usage)}
        if not self._streaming:
            return json_bytes(self.answer)
        self._emit([(f"response.{status}", {"response": self.answer})])
        return self._sent()

    def error(self, error: RequestError) -> bytes:
        self._close(status="incomplete")
        self.answer = self._whole("failed") | {"error": _error(error)}
        if not self._streaming:
            return json_bytes(self.answer)
        self._emit([("response.failed", {"response": self.answer})])
        return self._sent()

    def heartbeat(self) -> bytes:
        return sse.COMMENT if self._streaming else b""

    def _reasoning(self, event: Reasoning) -> None:
        if not event.text:
            return
        if not isinstance(self._open, ReasoningOutput):
            self._close()
            self._begin(ReasoningOutput(*self._next("rs")))
        self._push(event.text, b"")

    def _content(self, event: Content, logprobs: Mapping[int, TokenLogprob]) -> None:
        entries: list[dict[str, Any]] = []
        if self._top is not None:
            entries = [logprob_object(logprobs[place], self._top, self._context.token_bytes) for place in event.tokens]
        if not event.text and not entries:
            return
        if not isinstance(self._open, MessageOutput):
            self._close()
            self._begin(MessageOutput(*self._next("msg")))
        if entries:
            self._open.logprobs += entries  # type: ignore[union-attr]
            self._push(event.text, b',"logprobs":%b' % json_bytes(entries))
        else:
            self._push(event.text, b',"logprobs":[]')

    def _push(self, text: str, tail: bytes) -> None:
        """A piece of the open text item."""
        self._open.push(text)  # type: ignore[union-attr]
        self._delta(text, tail)

    def _arguments(self, piece: str) -> None:
        assert isinstance(self._open, CallOutput)
        if text := self._open.delta(piece):
            self._delta(text, b"")

    def _delta(self, text: str, tail: bytes) -> None:
        if not self._streaming:
            return
        number = b"%d" % self._sequence
        self._sequence += 1
        self._frames += (self._delta_head, json_bytes(text), tail, b',"sequence_number":', number, b"}\n\n")

    def _call(self, start: ToolStart) -> None:
        name = self._names.get(start.name) or ClientName("function", start.name)
        kind = CALLS[name.kind]
        self._close(phase="commentary")
        self._begin(kind(*self._next(kind.id_prefix), start, name))

    def _next(self, prefix: str) -> tuple[str, int]:
        """Id and place of the next item."""
        return f"{prefix}_{self._context.id}_{len(self._items)}", len(self._items)

    def _begin(self, item: TextItem | CallOutput) -> None:
        self._open = item
        self._emit(item.added())
        name = item.delta_name.encode()
        self._delta_head = b'event: %b\ndata: {"type":"%b",%b' % (name, name, item.delta_head)

    def _close(self, status: str = "completed", phase: str = "final_answer", end: ToolEnd | None = None) -> None:
        """Ends the open item, if there is one. end: of a call; without it the call was cut off."""
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, CallOutput):
            whole = item.item(end)
        elif isinstance(item, MessageOutput):
            whole = item.item(status, phase)
        else:
            assert isinstance(item, ReasoningOutput)
            whole = item.item(status, self._sealed)
        self._items.append(whole)
        self._emit(item.closed(whole))

    def _whole(self, status: str) -> dict[str, Any]:
        finished = {"completed_at": int(time.time())} if status == "completed" else {}
        return self._base | {"status": status, "output": self._items} | finished

    def _emit(self, events: Events) -> None:
        if self._streaming:
            for name, fields in events:
                numbered = {"type": name, **fields, "sequence_number": self._sequence}
                self._frames.append(sse.json_frame(numbered, name))
                self._sequence += 1

    def _sent(self) -> bytes:
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames


def _ending(finish: Finish) -> tuple[str, dict[str, Any]]:
    """The response's status, and the fields that explain it."""
    reason = finish_reason(finish)
    if reason == "length":
        return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
    if reason == "error":
        return "failed", {"error": {"code": "server_error", "message": "the model's numbers broke in this answer"}}
    return "completed", {}


def _error(error: RequestError) -> dict[str, Any]:
    """In the words that a response may use."""
    code = "server_error" if error.status >= 500 else "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
    return {"code": code, "message": error_body(error)["error"]["message"]}
