"""The text of one string inside JSON while the JSON is still coming in."""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_BEGINNING = 64  # characters after which what does not match the head never will
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)
"""Characters and escapes as long as they are whole; the two halves of a surrogate pair are one."""


class StringValue:
    """Feeds on pieces of `{"input": "..."}` and gives the pieces of the text, however the JSON is cut.

    An escape that is not whole is held back (\\, \\u12, the first half of a surrogate pair). JSON of another form gives
    nothing: its reader takes the value from the whole.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._over = False

    def push(self, piece: str) -> str:
        if self._over:
            return ""
        self._held += piece
        if not self._inside:
            head = _HEAD.match(self._held)
            if head is None:
                self._over = len(self._held) > _HEAD_BEGINNING
                return ""
            self._inside = True
            self._held = self._held[head.end() :]
        whole = _WHOLE.match(self._held)
        assert whole is not None  # the pattern matches an empty text
        self._held = self._held[whole.end() :]
        self._over = self._held.startswith('"')
        return writable(json.loads(f'"{whole.group()}"'))


def writable(text: str) -> str:
    """The text with U+FFFD for every lone half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
