"""The error object of OpenAI's protocols."""

from __future__ import annotations

from typing import Any

from deepinfer.codec.errors import RequestError

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""Of what `error_body` makes, as JSON schema."""


def error_body(error: RequestError) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; all of it can be written as UTF-8, whatever the client sent."""
    return {
        "error": {
            "message": _writable(error.message),
            "type": error.kind,
            "param": _writable(error.param),
            "code": error.code,
        }
    }


def _writable(text: str | None) -> str | None:
    """A lone surrogate that is quoted from the request must not break the answer."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")
