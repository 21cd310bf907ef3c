"""Routes whose body is one of ours: shown by FastAPI, read by the codec, so that errors look as the protocol wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from deepinfer.codec.body import Body, parse
from deepinfer.codec.errors import RequestError
from deepinfer.server.access_log import note_error
from deepinfer.server.errors import as_request_error, described, error_response
from deepinfer.server.protocols import errors_of

Respond = Callable[[Request, Any, int], Awaitable[Any]]
"""Request, its parsed body, and how many bytes that had -> an ASGI response."""

LARGE_BODY = 64 << 10
"""Bytes: about 100 messages, 2 ms. Longer ones are taken apart in a thread, beside the streams."""


def body_route(
    path: str,
    model: type[Body],
    respond: Respond,
    threads: Executor,
    *,
    summary: str,
    name: str,
    streams: bool = False,
) -> APIRoute:
    """A POST route. What `respond` raises is answered in the shape of the path's protocol. streams: it can answer with
    events."""

    async def endpoint(body: Any) -> Response:
        raise AssertionError("the route reads its body itself")

    endpoint.__annotations__ = {"body": model, "return": Response}

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def handle(request: Request) -> Response:
                try:
                    raw = await request.body()
                    kind = request.headers.get("content-type")
                    if len(raw) <= LARGE_BODY:
                        body = read_body(model, raw, kind)
                    else:
                        body = await asyncio.get_running_loop().run_in_executor(threads, read_body, model, raw, kind)
                    response: Response = await respond(request, body, len(raw))
                    return response
                except Exception as error:
                    known = as_request_error(error)
                    note_error(request.scope, known)
                    return error_response(known, errors_of(path))

            return handle

    told = described(errors_of(path), streams=streams)
    return BodyRoute(path, endpoint, methods=["POST"], summary=summary, name=name, responses=told)


def read_body(model: type[Body], raw: bytes, content_type: str | None) -> Body:
    """RequestError."""
    return parse(model, decode_json(raw, content_type))


def decode_json(raw: bytes, content_type: str | None) -> Any:
    """The body as Python objects. RequestError.

    The content type is asked for because browsers send anything else to anybody without asking: a page from elsewhere
    must not use the server of whoever looks at it.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        what = f"not {kind!r:.80}" if kind else "and none was given"
        raise RequestError(f"content-type: must be application/json, {what}", status=415, param="content-type")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise RequestError("the body: nests too deeply", code="json_too_deep") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are
        if isinstance(error, RequestError):
            raise
        what = str(error).partition(";")[0]  # Python adds advice to its own programmers
        raise RequestError(f"the body: is not valid JSON in UTF-8 ({what})", code="invalid_json") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key that comes twice is refused: which of the two is meant, readers of JSON do not agree on."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))[:64]  # type: ignore[func-returns-value]
        raise RequestError(f"{twice}: stands twice in one object", param=twice)
    return made
