"""The items of an answer while they are made: each knows its events and what it is when it is done."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from deepinfer.codec.events import ToolEnd, ToolStart
from deepinfer.codec.responses.string_value import StringValue, writable
from deepinfer.codec.responses.tools import ClientName
from deepinfer.codec.sealed import seal
from deepinfer.codec.sse import json_bytes

Events = list[tuple[str, dict[str, Any]]]
"""Names of events with their fields, all but `type` and `sequence_number`."""


class TextItem:
    """Text that comes in pieces: what reasoning and messages have in common.

    place: `output_index`. delta_name: of the event for a piece.
    """

    delta_name: ClassVar[str]
    _done_name: ClassVar[str]

    def __init__(self, item_id: str, place: int) -> None:
        self.id = item_id
        self.place = place
        self._pieces: list[str] = []
        self.delta_head = b'"item_id":%b,"output_index":%d,"content_index":0,"delta":' % (json_bytes(item_id), place)
        """The beginning of a delta's fields; the piece comes next, and then `delta_tail`."""

    def push(self, text: str) -> None:
        self._pieces.append(text)

    def added(self) -> Events:
        where = {"item_id": self.id, "output_index": self.place, "content_index": 0}
        return [
            ("response.output_item.added", {"output_index": self.place, "item": self.empty()}),
            ("response.content_part.added", {**where, "part": self.part("")}),
        ]

    def closed(self, item: dict[str, Any]) -> Events:
        """The events that end the item. item: what it has become."""
        where = {"item_id": self.id, "output_index": self.place, "content_index": 0}
        part = item["content"][0]
        return [
            (self._done_name, {**where, **{key: part[key] for key in ("text", "logprobs") if key in part}}),
            ("response.content_part.done", {**where, "part": part}),
            ("response.output_item.done", {"output_index": self.place, "item": item}),
        ]

    def text(self) -> str:
        return "".join(self._pieces)

    def empty(self) -> dict[str, Any]:
        raise NotImplementedError

    def part(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ReasoningOutput(TextItem):
    delta_name = "response.reasoning_text.delta"
    _done_name = "response.reasoning_text.done"

    def empty(self) -> dict[str, Any]:
        return {"type": "reasoning", "id": self.id, "status": "in_progress", "summary": [], "content": []}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str, sealed: bool) -> dict[str, Any]:
        """sealed: the client wants `encrypted_content`."""
        text = self.text()
        item = self.empty() | {"status": status, "content": [self.part(text)]}
        return item | {"encrypted_content": seal(text)} if sealed else item


class MessageOutput(TextItem):
    delta_name = "response.output_text.delta"
    _done_name = "response.output_text.done"

    def __init__(self, item_id: str, place: int) -> None:
        super().__init__(item_id, place)
        self.logprobs: list[dict[str, Any]] = []

    def empty(self) -> dict[str, Any]:
        return {"type": "message", "id": self.id, "status": "in_progress", "role": "assistant", "content": []}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def item(self, status: str, phase: str) -> dict[str, Any]:
        """phase: "commentary" in front of calls, else "final_answer"."""
        return self.empty() | {"status": status, "phase": phase, "content": [self.part(self.text())]}


class CallOutput:
    """A call of a function."""

    delta_name: ClassVar[str] = "response.function_call_arguments.delta"
    id_prefix: ClassVar[str] = "fc"

    def __init__(self, item_id: str, place: int, start: ToolStart, name: ClientName) -> None:
        self.id = item_id
        self.place = place
        self._call_id = start.id
        self._name = name
        self._sent: list[str] = []
        self.delta_head = b'"item_id":%b,"output_index":%d,"delta":' % (json_bytes(item_id), place)

    def delta(self, piece: str) -> str:
        """What of a piece of the arguments is sent."""
        self._sent.append(piece)
        return piece

    def added(self) -> Events:
        item = self._item("", "in_progress")
        return [("response.output_item.added", {"output_index": self.place, "item": item})]

    def item(self, end: ToolEnd | None) -> dict[str, Any]:
        """end: None = there is none, the call was cut off."""
        if end is None or not end.complete:
            return self._item("".join(self._sent), "incomplete")
        return self._item(end.arguments, "completed")

    def closed(self, item: dict[str, Any]) -> Events:
        where = {"item_id": self.id, "output_index": self.place}
        return [
            ("response.function_call_arguments.done", {**where, "arguments": item["arguments"]}),
            ("response.output_item.done", {"output_index": self.place, "item": item}),
        ]

    def _item(self, arguments: str, status: str) -> dict[str, Any]:
        item = {"type": "function_call", "id": self.id, "call_id": self._call_id, "name": self._name.name}
        if self._name.namespace is not None:
            item["namespace"] = self._name.namespace
        return item | {"arguments": arguments, "status": status}


class CustomCallOutput(CallOutput):
    """A call of apply_patch: the value of the argument `input` is its free text."""

    delta_name = "response.custom_tool_call_input.delta"
    id_prefix = "ctc"

    def __init__(self, item_id: str, place: int, start: ToolStart, name: ClientName) -> None:
        super().__init__(item_id, place, start, name)
        self._value = StringValue()

    def delta(self, piece: str) -> str:
        return super().delta(self._value.push(piece))

    def item(self, end: ToolEnd | None) -> dict[str, Any]:
        if end is None or not end.complete:
            return super().item(end)
        try:
            value = json.loads(end.arguments).get("input")
        except ValueError:  # a number of more digits than Python reads
            value = None
        return self._item(writable(value) if isinstance(value, str) else end.arguments, "completed")

    def closed(self, item: dict[str, Any]) -> Events:
        where = {"item_id": self.id, "output_index": self.place}
        sent = "".join(self._sent)
        rest = item["input"].removeprefix(sent) if item["input"].startswith(sent) else ""
        last: Events = [(self.delta_name, {**where, "delta": rest})] if rest else []
        return [
            *last,
            ("response.custom_tool_call_input.done", {**where, "input": item["input"]}),
            ("response.output_item.done", {"output_index": self.place, "item": item}),
        ]

    def _item(self, arguments: str, status: str) -> dict[str, Any]:
        item = {"type": "custom_tool_call", "id": self.id, "call_id": self._call_id, "name": self._name.name}
        return item | {"input": arguments, "status": status}


class SearchOutput(CallOutput):
    """A search for tools, which the client carries out. Its arguments are an object and come whole."""

    id_prefix = "tsc"

    def delta(self, piece: str) -> str:
        return ""

    def closed(self, item: dict[str, Any]) -> Events:
        return [("response.output_item.done", {"output_index": self.place, "item": item})]

    def _item(self, arguments: str, status: str) -> dict[str, Any]:
        item = {"type": "tool_search_call", "id": self.id, "call_id": self._call_id, "execution": "client"}
        return item | {"arguments": _object(arguments) if arguments else {}, "status": status}


def _object(arguments: str) -> Any:
    """The arguments as an object, or as they are where our JSON cannot hold what the model's does (a number of
    thousands of digits, half of a surrogate pair)."""
    try:
        value = json.loads(arguments)
        json_bytes(value)
    except ValueError:
        return arguments
    return value


CALLS = {"function": CallOutput, "custom": CustomCallOutput, "search": SearchOutput}
