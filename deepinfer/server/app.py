"""The routes, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from deepinfer import __version__
from deepinfer.codec.anthropic import CountTokensRequest
from deepinfer.codec.body import validation_error
from deepinfer.codec.errors import RequestError
from deepinfer.codec.sse import json_bytes
from deepinfer.server import stored
from deepinfer.server.access_log import note_error
from deepinfer.server.asgi import App, Message, Receive, Scope, Send
from deepinfer.server.bodies import body_route
from deepinfer.server.door import OPEN_PATHS, front
from deepinfer.server.errors import OPENAI_ERRORS, as_request_error, described, error_response, http_error
from deepinfer.server.health import readiness
from deepinfer.server.hosts import HostGuard
from deepinfer.server.limits import RequestLimits
from deepinfer.server.models import anthropic_entry, list_entry
from deepinfer.server.ops import exposition
from deepinfer.server.page_routes import PAGE_PATHS, page_routes
from deepinfer.server.protocols import PROTOCOLS, RESPONSES, Protocol, errors_of
from deepinfer.server.respond import Exchange
from deepinfer.server.state import ServerState
from deepinfer.server.tokens import DetokenizeRequest, TokenizeRequest, count_tokens, detokenize, tokenize
from deepinfer.server.tracing import Tracing

# The framework's own, which would write exceptions into whatever OpenTelemetry provider it finds; ours is tracing.py.
NO_TELEMETRY: Any = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
DESCRIPTION = "DeepSeek-V4.1 behind OpenAI's and Anthropic's protocols. docs/api.md lists every field."

TOLD = described(OPENAI_ERRORS)
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "No requests, please: the body says why."}}


def build_app(state: ServerState) -> FastAPI:
    """The routes alone, for whoever puts them behind something else; `whole_app` is what is served."""

    app = FastAPI(
        title="deepinfer",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
    )
    for protocol in PROTOCOLS:
        _add_protocol(app, state, protocol)
    _add_tokens(app, state)
    _add_models(app, state)
    _add_stored(app, state)
    _add_ops(app, state)
    app.router.routes.extend(page_routes())
    app.add_exception_handler(RequestError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return app


def whole_app(
    state: ServerState, *, write_log: Callable[[bytes], object] | None = None, tracing: Tracing | None = None
) -> App:
    """The routes behind the door: access log, keys (or names of this machine, where there are none), limits,
    idempotency."""
    settings = state.settings
    limits = RequestLimits(max_body=settings.max_body_bytes)
    app = build_app(state)

    def render_error(path: str, error: RequestError) -> bytes:
        return json_bytes(errors_of(path).body(error))

    guarded = app if state.gate.has_keys else HostGuard(app, (settings.host, *settings.allowed_hosts), render_error)
    whole = front(
        guarded,
        gate=state.gate,
        render_error=render_error,
        limits=limits,
        write_log=write_log,
        log_text=settings.log_content,
        tracing=tracing,
        open_paths=OPEN_PATHS | PAGE_PATHS,
    )
    return Counted(whole, app, state)


class Counted:
    """The middleware that counts requests by route and status."""

    def __init__(self, app: App, routes: FastAPI, state: ServerState) -> None:
        self._app = app
        self._metrics = state.metrics
        self._paths = frozenset(route.path for route in routes.routes if hasattr(route, "path"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 499  # the client left before there was one

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.count_request(self._route(scope), status)

    def _route(self, scope: Scope) -> str:
        """A path of ours: clients must not be able to fill the metrics with theirs."""
        if scope["path"] in self._paths:
            return str(scope["path"])
        for prefix in ("/v1/responses/", "/v1/models/"):
            if scope["path"].startswith(prefix):
                return f"{prefix}..."
        return "other"


async def _on_error(request: Request, error: Exception) -> Response:
    """What routes raise, and what the router itself says, in the shape of the path's protocol."""
    path = request.scope["path"]
    if isinstance(error, HTTPException):
        known = http_error(error.status_code, path, request.method, str(error.detail))
    elif isinstance(error, RequestValidationError):
        known = validation_error(error.errors(), None)
    else:
        known = as_request_error(error)
    note_error(request.scope, known)
    response = error_response(known, errors_of(path))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def _add_protocol(app: FastAPI, state: ServerState, protocol: Protocol) -> None:
    kind = stored.ResponsesExchange if protocol is RESPONSES else Exchange

    async def respond(request: Request, body: Any, size: int) -> Any:
        return kind(state, protocol, body, size)

    route = body_route(
        protocol.path,
        protocol.body,
        respond,
        state.threads,
        summary=protocol.summary,
        name=protocol.name,
        streams=True,
    )
    app.router.routes.append(route)


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    async def respond_count(request: Request, body: CountTokensRequest, size: int) -> Response:
        return _json(await count_tokens(state, body))

    async def respond_tokenize(request: Request, body: TokenizeRequest, size: int) -> Response:
        return _json(await tokenize(state, body))

    async def respond_detokenize(request: Request, body: DetokenizeRequest, size: int) -> Response:
        return _json(await detokenize(state, body))

    for path, model, respond, summary in (
        ("/tokenize", TokenizeRequest, respond_tokenize, "The ids of a text, or of a conversation's prompt."),
        ("/detokenize", DetokenizeRequest, respond_detokenize, "The text of ids."),
        ("/v1/messages/count_tokens", CountTokensRequest, respond_count, "The length of a prompt, as Anthropic asks."),
    ):
        route = body_route(path, model, respond, state.threads, summary=summary, name=path.strip("/"))
        app.router.routes.append(route)


def _add_models(app: FastAPI, state: ServerState) -> None:
    def context() -> int | None:
        client = state.host.current
        return client.max_model_len if client is not None and client.state == "ready" else None

    @app.get("/v1/models", summary="The models that requests may name.", responses=TOLD)
    async def models(request: Request) -> Response:
        names = state.model.names
        if "anthropic-version" in request.headers:
            data = [anthropic_entry(state.model, name, context()) for name in names]
            return _json({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return _json({"object": "list", "data": [list_entry(state.model, name, context()) for name in names]})

    @app.get("/v1/models/{name:path}", summary="One model.", responses=TOLD)
    async def model(request: Request, name: str) -> Response:
        state.model.check_name(name)
        if "anthropic-version" in request.headers:
            return _json(anthropic_entry(state.model, name, context()))
        return _json(list_entry(state.model, name, context()))


def _add_stored(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/responses/{response_id}", summary="A stored response.", responses=TOLD)
    async def retrieve(request: Request, response_id: str) -> Response:
        return _json(await stored.retrieve(state, request, response_id))

    @app.delete("/v1/responses/{response_id}", summary="Forgets a stored response.", responses=TOLD)
    async def delete(request: Request, response_id: str) -> Response:
        return _json(await stored.delete(state, request, response_id))


def _add_ops(app: FastAPI, state: ServerState) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="200 as long as the server's event loop runs.")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", summary="200 if requests should come here; else 503 and why not.", responses=NOT_READY)
    async def ready() -> Response:
        status, body = readiness(state)
        return _json(body, status)

    @app.get("/metrics", summary="Prometheus' text format.", response_class=PlainTextResponse, responses=TOLD)
    async def metrics(request: Request) -> Response:
        content, content_type = await exposition(state, request.headers.get("accept", ""))
        return Response(content, media_type=content_type)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")
