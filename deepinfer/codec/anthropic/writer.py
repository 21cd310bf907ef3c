"""Neutral events -> an Anthropic message: a stream of named events, or one object (shapes: spec/codec.md 4.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deepinfer.codec import sse
from deepinfer.codec.anthropic.errors import error_body
from deepinfer.codec.anthropic.request import MessagesRequest
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart, merged
from deepinfer.codec.generation import Finish, GenerationRequest, TokenLogprob, Usage, WriterContext
from deepinfer.codec.openai_objects import finish_reason
from deepinfer.codec.sealed import SIGNATURE, seal
from deepinfer.codec.sse import json_bytes

PING = sse.json_frame({"type": "ping"}, "ping")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_START = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_DELTA = {
    "thinking": b'"thinking_delta","thinking":',
    "text": b'"text_delta","text":',
    "tool_use": b'"input_json_delta","partial_json":',
}


def writer(body: MessagesRequest, generation: GenerationRequest, context: WriterContext) -> MessagesWriter:
    """generation: of `body`."""
    return MessagesWriter(body, generation, context)


class MessagesWriter:
    def __init__(self, body: MessagesRequest, generation: GenerationRequest, context: WriterContext) -> None:
        self._streaming = generation.stream
        self.media_type = sse.MEDIA_TYPE if self._streaming else "application/json"
        self._context = context
        self._omits_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._frames: list[bytes] = []
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []  # of the open block's text, thoughts or input
        self._delta_head = b""
        self._finish = Finish("stop")

    def start(self, usage: Usage) -> bytes:
        self._emit("message_start", message=self._message(usage))
        return self._sent()

    def events(self, index: int, events: Sequence[Event], logprobs: Mapping[int, TokenLogprob]) -> bytes:
        for event in merged(events) if len(events) > 1 else events:
            if isinstance(event, Content):
                self._text("text", event.text)
            elif isinstance(event, Reasoning):
                self._text("thinking", event.text)
            elif isinstance(event, ToolArguments):
                self._push(event.text)
            elif isinstance(event, ToolStart):
                self._close()
                self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            else:
                self._close(event)
        return self._sent()

    def finish(self, index: int, finish: Finish) -> bytes:
        self._finish = finish
        self._close()
        return self._sent()

    def end(self, usage: Usage) -> bytes:
        reason = finish_reason(self._finish)
        stop = {"stop_reason": STOP_REASONS[reason], "stop_sequence": self._finish.stop_sequence}
        if self._finish.stop_sequence is not None:
            stop["stop_reason"] = "stop_sequence"
        if not self._streaming:
            return json_bytes(self._message(usage) | {"content": self._blocks} | stop)
        self._emit("message_delta", delta=stop, usage=usage_object(usage))
        self._emit("message_stop")
        return self._sent()

    def error(self, error: RequestError) -> bytes:
        body = error_body(error)
        return sse.json_frame(body, "error") if self._streaming else json_bytes(body)

    def heartbeat(self) -> bytes:
        return PING if self._streaming else b""

    def _text(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._open is None or self._open["type"] != kind:
            self._close()
            self._begin(dict(_START[kind]))
        self._push(text)

    def _begin(self, block: dict[str, Any]) -> None:
        self._open = block
        self._pieces = []
        place, kind = len(self._blocks), block["type"]
        self._emit("content_block_start", index=place, content_block=block)
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
        self._delta_head = head % (place, _DELTA[kind])

    def _push(self, piece: str) -> None:
        assert self._open is not None
        self._pieces.append(piece)
        if self._streaming and not (self._omits_thinking and self._open["type"] == "thinking"):
            self._frames += (self._delta_head, json_bytes(piece), b"}}\n\n")

    def _close(self, end: ToolEnd | None = None) -> None:
        """Ends the open block, if there is one. end: of a call; without it the call was cut off, and its input is
        nobody's to guess."""
        block, self._open = self._open, None
        if block is None:
            return
        place, text = len(self._blocks), "".join(self._pieces)
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "thinking":
            block["thinking"] = "" if self._omits_thinking else text
            block["signature"] = seal(text) if self._omits_thinking else SIGNATURE
            delta = {"type": "signature_delta", "signature": block["signature"]}
            self._emit("content_block_delta", index=place, delta=delta)
        elif end is not None and end.complete:
            # The model's own spelling: numbers of any length, and nothing that a reader of JSON could not write again.
            block["input"] = msgspec.Raw(end.arguments.encode())
        self._blocks.append(block)
        self._emit("content_block_stop", index=place)

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self._context.id}",
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage) | {"service_tier": "standard"},
        }

    def _emit(self, name: str, **fields: Any) -> None:
        if self._streaming:
            self._frames.append(sse.json_frame({"type": name, **fields}, name))

    def _sent(self) -> bytes:
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic counts tokens that came out of the cache apart from the rest of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
