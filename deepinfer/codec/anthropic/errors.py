"""The error object of Anthropic's protocol."""

from __future__ import annotations

from typing import Any

from deepinfer.codec.errors import RequestError
from deepinfer.codec.openai_errors import error_body as openai_error

OVERLOADED = 529

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string", "description": "Begins with the field that is wrong."},
                "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
            },
        },
    },
}
"""Of what `error_body` makes, as JSON schema."""


def error_status(error: RequestError) -> int:
    """Of the HTTP answer: what is 503 elsewhere because too much is asked of the server is 529 here."""
    return OVERLOADED if error.status == 503 and error.code == "overloaded" else error.status


def error_body(error: RequestError) -> dict[str, Any]:
    """{"type": "error", "error": {"type", "message"}}, and "details" with the error's code if it has one. There is no
    place for the field: the message begins with it."""
    plain = openai_error(error)["error"]
    message, param = plain["message"], plain["param"]
    if param is not None and param not in message:
        message = f"{param}: {message}"
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}
