"""Whatever goes wrong, as the RequestError that says so, and as an answer in the protocol's own shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.responses import Response

from deepinfer.codec.errors import RequestError
from deepinfer.codec.openai_errors import ERROR_SCHEMA
from deepinfer.codec.openai_errors import error_body as openai_error
from deepinfer.codec.sse import json_bytes
from deepinfer.engine.client import EngineDeadError, EngineDrainingError
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.server.refusal import headers_of

logger = logging.getLogger(__name__)


class ErrorShape(NamedTuple):
    """How a protocol tells of an error."""

    body: Callable[[RequestError], dict[str, Any]]
    status: Callable[[RequestError], int]
    schema: dict[str, Any]  # JSON schema of the body
    statuses: dict[int, str]  # those that are told in the OpenAPI description, and what they mean


STATUSES = {
    400: "The request cannot be served as it is; the field is named.",
    401: "No valid API key.",
    404: "No such model or object.",
    408: "The body came too slowly.",
    409: "An idempotency key whose answer is not at hand.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "A Host header that is none of this server's.",
    422: "An idempotency key that belongs to another request.",
    429: "A quota of the key is used up.",
    431: "The headers are too large.",
    500: "The engine failed.",
    503: "Not now: loading, draining, or overloaded.",
}
OPENAI_ERRORS = ErrorShape(openai_error, lambda error: error.status, ERROR_SCHEMA, STATUSES)

# The engine's names where the protocols have other ones, unless they say so themselves (protocols.py).
_FIELDS = {
    "seq_seed": "seed",
    "prompt_token_ids": "prompt",
    "structure": "response_format",
    "json_schema": "response_format",
    "regex": "response_format",
    "ebnf": "response_format",
    "logprobs": "top_logprobs",
}


def as_request_error(error: Exception, names: Mapping[str, str] = {}) -> RequestError:
    """What a client is told. An error that nobody foresaw is logged, and says nothing of itself. names: the engine's
    name of a parameter -> the field's."""
    match error:
        case RequestError():
            return error
        case InvalidRequestError():
            field = names.get(error.field) or _FIELDS.get(error.field, error.field)
            return RequestError(f"{field}: {error.message}", param=field)
        case EngineDrainingError():
            return unavailable("the server is shutting down and takes no new requests; send it to another one")
        case EngineDeadError():
            return unavailable("the engine was lost while it worked on this; it is started again", code="engine_dead")
        case EngineStepError():
            return internal("a step of the engine failed and took this request with it; it may be sent again")
        case RecursionError():
            return RequestError("the body: is nested too deeply")
    logger.error("a request ended with an unforeseen error", exc_info=error)
    return internal("an unforeseen error; the server's log has it under this request's id")


def unavailable(message: str, *, code: str = "unavailable", retry_after: float = 2.0) -> RequestError:
    """503: this server cannot now; later, or another one, can."""
    return RequestError(message, status=503, kind="server_error", code=code, retry_after=retry_after)


def internal(message: str) -> RequestError:
    return RequestError(message, status=500, kind="server_error", code="internal_error")


def http_error(status: int, path: str, method: str, detail: str = "") -> RequestError:
    """What the router itself says: no such path, not this method, ..."""
    if status == HTTPStatus.NOT_FOUND:
        return RequestError(f"there is nothing at {path}", status=status, code="not_found", kind="not_found_error")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return RequestError(f"{path} does not take {method}", status=status, code="method_not_allowed")
    return RequestError(detail or HTTPStatus(status).phrase, status=status)


def model_not_found(model: str, known: tuple[str, ...]) -> RequestError:
    return RequestError(
        f"model: {model!r} is not served here; there is {', '.join(known)}",
        param="model",
        status=404,
        kind="not_found_error",
        code="model_not_found",
    )


def described(shape: ErrorShape, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What FastAPI is told of a route's answers. streams: it can answer with server-sent events."""
    content = {"application/json": {"schema": shape.schema}}
    told: dict[int | str, dict[str, Any]] = {
        status: {"description": meaning, "content": content} for status, meaning in shape.statuses.items()
    }
    if streams:
        told[200] = {"description": "The answer; events where stream is true.", "content": {"text/event-stream": {}}}
    return told


def error_response(error: RequestError, shape: ErrorShape = OPENAI_ERRORS) -> Response:
    """The whole answer to a request that cannot be served."""
    return Response(json_bytes(shape.body(error)), shape.status(error), dict(headers_of(error)), "application/json")
