"""Server-sent events (WHATWG HTML 9.2), as far as a stream of JSON needs them."""

from __future__ import annotations

from typing import Any

import msgspec

MEDIA_TYPE = "text/event-stream; charset=utf-8"
COMMENT = b": alive\n\n"  # clients drop lines that begin with a colon; proxies see traffic
DONE = b"data: [DONE]\n\n"  # how OpenAI's Chat and Completions streams end

json_bytes = msgspec.json.Encoder().encode
"""A value as compact JSON in UTF-8. Line feeds inside texts come out as \\n, so the result is always one line."""


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. data: one line, which JSON always is. event: its name; None = an unnamed event."""
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def json_frame(value: Any, event: str | None = None) -> bytes:
    """One event with `value` as JSON."""
    return frame(json_bytes(value), event)
