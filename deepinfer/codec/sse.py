"""Server-sent events (WHATWG HTML 9.2), as far as a stream of JSON needs them."""

from __future__ import annotations

from typing import Any

import msgspec

MEDIA_TYPE = "text/event-stream; charset=utf-8"
COMMENT = b": alive\n\n"  # clients drop lines that begin with a colon; proxies see traffic
DONE = b"data: [DONE]\n\n"  # how OpenAI's Chat and Completions streams end

_encode = msgspec.json.Encoder().encode
_BREAKS = {"\x85": b"\\u0085", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}
"""What Unicode calls a line break, and with it many a client's line reader, beside those that JSON escapes anyway."""


def json_bytes(value: Any) -> bytes:
    """A value as compact JSON in UTF-8, on one line for every reader of lines."""
    data = _encode(value)
    if not data.isascii() and (b"\xe2\x80" in data or b"\xc2\x85" in data):  # beginnings of the breaks' own bytes
        for character, escape in _BREAKS.items():
            data = data.replace(character.encode(), escape)
    return data


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. data: one line, which JSON always is. event: its name; None = an unnamed event."""
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def json_frame(value: Any, event: str | None = None) -> bytes:
    """One event with `value` as JSON."""
    return frame(json_bytes(value), event)
