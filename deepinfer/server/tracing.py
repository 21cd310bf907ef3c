"""OpenTelemetry spans of requests: off unless an endpoint is given, and needs `pip install deepinfer[tracing]`.

    gateway                          arrival to the last byte; attributes of GenAI and of HTTP
      codec.encode                   rendering and encoding of the prompt
      prefill                        the engine has it, to the first token
      decode                         first to last token
      codec.decode                   the same time; `dsv.busy_ms` is what parsing and rendering took of it

Everything is taken from the request's record (access_log.py) when it has ended, so a request that runs costs nothing,
and what is kept can be decided knowing how it went: with errors and slow ones all, of the rest a share. A request that
comes with a W3C `traceparent` is kept if that says so. Names are those of the GenAI conventions' current version (they
are still in development); prompts and answers are in no span.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deepinfer.server.access_log import RequestRecord, record_of
from deepinfer.server.asgi import App, Receive, Scope, Send, header

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

PROVIDER = "deepinfer"
_EXPORT_SECONDS = 5.0


class Tracing:
    """endpoint: OTLP over HTTP, as "http://collector:4318". share: of the requests that are neither failed nor slow.
    slow_seconds: to the first token. exporter: in place of OTLP, for tests. Raises ValueError for what cannot be.
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        share: float = 0.01,
        slow_seconds: float = 5.0,
        service_name: str = "deepinfer",
        exporter: SpanExporter | None = None,
    ) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share: must be from 0 to 1, is {share}")
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode, get_current_span
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError("traces need OpenTelemetry: pip install 'deepinfer[tracing]'") from error
        self._share = share
        self._slow_seconds = slow_seconds
        self._kinds = SpanKind
        self._codes = StatusCode
        self._propagator = TraceContextTextMapPropagator()
        self._current_span = get_current_span
        # A provider of our own: the process may have another, and shall keep it.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _otlp(endpoint)))
        self._tracer = self._provider.get_tracer("deepinfer.server")
        self._epoch = time.time_ns() - time.monotonic_ns()

    def emit(self, record: RequestRecord, carrier: Mapping[str, str]) -> None:
        """The request has ended. carrier: its headers traceparent and tracestate, as far as there are."""
        end = time.monotonic()
        parent = self._propagator.extract(carrier)
        if not self._is_kept(record, parent):
            return
        from opentelemetry.trace import set_span_in_context

        gateway = self._tracer.start_span(
            "gateway", parent, self._kinds.SERVER, _attributes(record), start_time=self._nanoseconds(record.arrival)
        )
        record.trace_id = f"{gateway.get_span_context().trace_id:032x}"
        inside = set_span_in_context(gateway, parent)
        if record.encoding is not None:
            self._span("codec.encode", inside, *record.encoding)
        if record.submitted is not None:
            waited = {} if record.queue_seconds is None else {"dsv.queue_ms": record.queue_seconds * 1000}
            self._span("prefill", inside, record.submitted, record.first_token or end, waited)
        if record.first_token is not None:
            last = record.last_token or end
            ratio = {} if record.accepted_ratio is None else {"dsv.accepted_ratio": record.accepted_ratio}
            self._span("decode", inside, record.first_token, last, ratio)
            busy = {"dsv.busy_ms": record.decoding_seconds * 1000}
            self._span("codec.decode", inside, record.first_token, last, busy)
        if _is_error(record):
            gateway.set_status(self._codes.ERROR)
        gateway.end(self._nanoseconds(end))

    def close(self) -> None:
        """Sends what waits, for some seconds at most."""
        self._provider.force_flush(int(_EXPORT_SECONDS * 1000))
        self._provider.shutdown()

    def _is_kept(self, record: RequestRecord, parent: Context) -> bool:
        context = self._current_span(parent).get_span_context()
        if context.is_valid:
            return bool(context.trace_flags.sampled)
        ttft = None if record.first_token is None else record.first_token - record.arrival
        slow = ttft is not None and ttft >= self._slow_seconds
        return _is_error(record) or slow or random.random() < self._share

    def _span(
        self, name: str, parent: Context, start: float, end: float, attributes: dict[str, float] | None = None
    ) -> None:
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=self._nanoseconds(start))
        span.end(self._nanoseconds(end))

    def _nanoseconds(self, moment: float) -> int:
        """Unix time of a moment of time.monotonic."""
        return self._epoch + int(moment * 1e9)


class Traced:
    """The middleware; inside of AccessLog, so that the line can name the trace."""

    def __init__(self, app: App, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            if scope["type"] == "http":
                record_of(scope).error = "exception"
            raise
        finally:
            if scope["type"] == "http" and scope["method"] == "POST":
                given = {name: header(scope, name.encode()) for name in ("traceparent", "tracestate")}
                self._tracing.emit(record_of(scope), {name: value for name, value in given.items() if value})


def _is_error(record: RequestRecord) -> bool:
    """Ours: a client that leaves or sends something wrong is none."""
    status = record.status or 0
    broke_off = record.failed and record.finish != "abort" and status < 400
    return status >= 500 or broke_off or record.error == "exception"


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Of the gateway's span. What is not known is not there."""
    values: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "error.type": record.error or (str(record.status) if (record.status or 0) >= 500 else None),
        "dsv.request_id": record.request_id,
        "dsv.tenant": record.tenant,
    }
    if record.operation is not None:
        values |= {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.response.id": record.response_id,
            "gen_ai.response.finish_reasons": None if record.finish is None else [record.finish],
        }
        values |= {f"gen_ai.request.{name}": value for name, value in record.parameters.items()}
    if record.usage is not None:
        values |= {
            "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": record.usage.completion_tokens,
            "dsv.cached_tokens": record.usage.cached_tokens,
        }
    return {name: value for name, value in values.items() if value is not None}


def _otlp(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"endpoint: {endpoint!r} is no address of an OTLP collector, as http://localhost:4318")
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    return OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
