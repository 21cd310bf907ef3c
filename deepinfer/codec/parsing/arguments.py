"""The arguments of one call as JSON, piece by piece, and the repairs that spec/codec.md 11 asks for."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from deepinfer.codec.conversation import Tool
from deepinfer.codec.parsing import json_text

WRAPPERS = ("arguments", "input")  # keys in which models put a whole object of arguments


class _Value(Enum):
    """What is done with the value that is being read."""

    STRING = auto()  # goes out as it comes
    ANY = auto()  # goes out whole: JSON if it is JSON, else a string
    WRAPPER = auto()  # waits for the next parameter or the end of the call
    REPEATED = auto()  # the key was given before: the first value stands


class Arguments:
    """All pieces together are one JSON object: `{"city": "Paris", "days": 2}`. A value that is JSON keeps the model's
    own spelling, without white space around it."""

    def __init__(self, tool: Tool | None) -> None:
        """tool: what was declared; None if nothing is known of it."""
        parameters: Any = tool.parameters if tool is not None else None
        properties = parameters.get("properties", {}) if isinstance(parameters, dict) else {}
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._keys: set[str] = set()
        self._is_first = True  # nothing of the object has gone out
        self._key = ""  # of the parameter that is being read, as the next two
        self._string: bool | None = None
        self._value = _Value.ANY
        self._raw: list[str] = []  # of a value that goes out whole
        self._wrapper: tuple[str, str, bool | None] | None = None  # key, text, string

    def open(self, key: str, string: bool | None) -> str:
        """A parameter begins. string: its attribute; None = missing, then the schema decides."""
        piece = self._unwrapped_wrapper()
        self._raw = []
        self._key, self._string = key, string
        if key in self._keys:
            self._value = _Value.REPEATED
        elif not self._keys and key in WRAPPERS and key not in self._properties:
            self._value = _Value.WRAPPER
        elif string or (string is None and self._is_declared_string(key)):
            self._value = _Value.STRING
            piece += self._lead(key) + '"'
        else:
            self._value = _Value.ANY
        self._keys.add(key)
        return piece

    @property
    def streams(self) -> bool:
        """The value that is being read goes out as it comes."""
        return self._value is _Value.STRING

    def push(self, text: str) -> str:
        """A piece of the parameter's value."""
        if self._value is _Value.STRING:
            return json_text.inside_string(text)
        if self._value is not _Value.REPEATED:
            self._raw.append(text)
        return ""

    def close(self) -> str:
        """The parameter ends."""
        if self._value is _Value.STRING:
            return '"'
        if self._value is _Value.ANY:
            return self._lead(self._key) + _spelled("".join(self._raw), self._string)
        if self._value is _Value.WRAPPER:
            self._wrapper = (self._key, "".join(self._raw), self._string)
        return ""

    def end(self) -> str:
        """The call ends."""
        if self._wrapper is not None and (whole := self._unwrapped(self._wrapper[1])) is not None:
            return whole
        piece = self._unwrapped_wrapper()
        return piece + ("}" if self._keys else "{}")

    def _unwrapped(self, text: str) -> str | None:
        """The object in a wrapper, if the tool declares all its keys."""
        is_json, value = json_text.value(text)
        return text.strip() if is_json and isinstance(value, dict) and value.keys() <= self._properties.keys() else None

    def _unwrapped_wrapper(self) -> str:
        """A wrapper that turned out to be a parameter like others."""
        if self._wrapper is None:
            return ""
        (key, text, string), self._wrapper = self._wrapper, None
        return self._lead(key) + _spelled(text, string)

    def _is_declared_string(self, key: str) -> bool:
        declared = self._properties.get(key)
        return isinstance(declared, dict) and declared.get("type") == "string"

    def _lead(self, key: str) -> str:
        first = self._is_first
        self._is_first = False
        return ("{" if first else ", ") + json_text.string(key) + ": "


def _spelled(text: str, string: bool | None) -> str:
    """A value as JSON."""
    return text.strip() if not string and json_text.value(text)[0] else json_text.string(text)
