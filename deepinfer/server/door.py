"""Everything that stands in front of the routes, from the outside in:

    AccessLog      an id, a record, a line in the log
    Traced         spans, where traces are on
    SignIn         who asks; 401 before any body is read
    BodyLimits     the body, whole and counted
    Idempotency    a repeated key joins the request that runs, or gets its answer again

    app = front(routes, gate=gate, render_error=..., write_log=LogWriter(sys.stderr.buffer).write)
    uvicorn.Config(app, http=bounded_protocol(ConnectionLimits()), ws="none", ...)

Routes find in `request.scope["state"]`: "record" (access_log.RequestRecord) and "principal" (keys.Principal), which
`gate.admit` takes in place of headers.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.codec.errors import RequestError
from deepinfer.server.access_log import AccessLog, note_error, record_of
from deepinfer.server.asgi import App, Receive, Scope, Send, refuse_unread
from deepinfer.server.gate import Gate
from deepinfer.server.idempotency import DEFAULT_IDEMPOTENCY, Idempotency, IdempotencyLimits
from deepinfer.server.limits import DEFAULT_LIMITS, BodyLimits, RequestLimits
from deepinfer.server.tracing import Traced, Tracing

Render = Callable[[str, RequestError], bytes]
"""Path and error -> the error's body, in the shape of the path's protocol."""

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Asked by those who have no key: a browser for the chat page, a load balancer."""


class SignIn:
    """The middleware that asks who it is."""

    def __init__(self, app: App, gate: Gate, render: Render, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._gate = gate
        self._render = render
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                principal = self._gate.authenticate(scope["headers"])
            except RequestError as error:
                note_error(scope, error)
                return await refuse_unread(receive, send, error, self._render(scope["path"], error))
            record_of(scope).identify(principal)
            scope["state"]["principal"] = principal
        await self._app(scope, receive, send)


def front(
    app: App,
    *,
    gate: Gate,
    render_error: Render,
    limits: RequestLimits = DEFAULT_LIMITS,
    idempotency: IdempotencyLimits = DEFAULT_IDEMPOTENCY,
    write_log: Callable[[bytes], object] | None = None,
    log_text: bool = False,
    tracing: Tracing | None = None,
    open_paths: frozenset[str] = OPEN_PATHS,
) -> App:
    """The whole stack around `app`."""
    app = BodyLimits(Idempotency(app, idempotency, render_error), limits, render_error)
    app = SignIn(app, gate, render_error, open_paths)
    if tracing is not None:
        app = Traced(app, tracing)
    return AccessLog(app, write_log, with_text=log_text)
