"""A call whose body is a JSON object instead of parameters (spec/codec.md 11, number 21)."""

from __future__ import annotations

import re

from deepinfer.codec.parsing import json_text

_MARKS = re.compile(r'["\\\n]')


class Body:
    """The text of an object. What looks like a tag inside one of its strings is data."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._escaped = False  # the last character was a backslash that escapes the next
        self.in_string = False
        self.broken_at: int | None = None
        """Place in the last text of a bare line feed in a string: not JSON, and the quotes cannot be counted on."""

    def push(self, text: str) -> None:
        self._pieces.append(text)
        at = 1 if self._escaped else 0  # place from which characters mean what they are
        self._escaped = self._escaped and not text
        for mark in _MARKS.finditer(text):
            if mark.start() < at:
                continue
            if mark[0] == '"':
                self.in_string = not self.in_string
            elif not self.in_string:
                continue
            elif mark[0] == "\n":
                self.broken_at = mark.start()
                break
            else:
                at = mark.start() + 2
        self._escaped = self._escaped or at > len(text)

    @property
    def text(self) -> str:
        return "".join(self._pieces).strip()

    @property
    def is_object(self) -> bool:
        is_json, value = json_text.value(self.text)
        return is_json and isinstance(value, dict)
