"""Spans of a request: their names, times and attributes, which requests are kept, and what is in none of them."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest
from asgi_calls import Call, run

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deepinfer.codec.generation import Usage
from deepinfer.server.access_log import AccessLog, record_of
from deepinfer.server.asgi import Receive, Scope, Send
from deepinfer.server.tracing import Traced, Tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Route:
    """Fills the record as the server does, and answers."""

    def __init__(self, status: int = 200, finish: str | None = "stop", slow: float = 0.0, breaks: bool = False) -> None:
        self.status, self.finish, self.slow, self.breaks = status, finish, slow, breaks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        now = record.arrival
        record.operation, record.model, record.response_id = "chat", "nano", "chatcmpl-1"
        record.parameters = {"max_tokens": 100, "temperature": 0.5, "top_p": 0.9, "seed": 7}
        record.tenant, record.prompt, record.answer = "team-a", "my secret question", "the secret answer"
        record.encoding, record.submitted = (now + 0.01, now + 0.02), now + 0.03
        record.first_token, record.last_token = now + 0.1 + self.slow, now + 0.5 + self.slow
        record.queue_seconds, record.decoding_seconds, record.accepted_ratio = 0.005, 0.04, 0.75
        record.usage, record.finish = Usage(200, 128, 30), self.finish
        if self.breaks:
            raise ValueError("broken")
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Kept:
    def __init__(self, share: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(share=share, slow_seconds=2.0, exporter=self._exporter)
        self.lines: list[bytes] = []

    def ask(self, route: Route, **request) -> None:  # type: ignore[no-untyped-def]
        async def work() -> None:
            await Call(AccessLog(Traced(route, self.tracing), self.lines.append), **request)

        run(work())

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracing._provider.force_flush()
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.tracing.close()


def test_a_request_is_five_spans_in_one_trace(kept: Kept) -> None:
    kept.ask(Route())
    spans = kept.spans()
    assert set(spans) == {"gateway", "codec.encode", "prefill", "decode", "codec.decode"}
    gateway = spans.pop("gateway")
    assert gateway.parent is None and gateway.kind is SpanKind.SERVER
    assert {span.parent.span_id for span in spans.values() if span.parent} == {gateway.context.span_id}
    assert {span.context.trace_id for span in spans.values()} == {gateway.context.trace_id}
    assert json.loads(kept.lines[0])["trace_id"] == f"{gateway.context.trace_id:032x}"


def test_spans_are_where_the_time_went(kept: Kept) -> None:
    before = time.time_ns()
    kept.ask(Route())
    spans = kept.spans()
    start = spans["gateway"].start_time
    assert start is not None and abs(start - before) < 60e9  # the wall's clock, not the machine's

    def milliseconds(name: str) -> tuple[int, int]:
        span = spans[name]
        assert span.start_time is not None and span.end_time is not None
        return round((span.start_time - start) / 1e6), round((span.end_time - start) / 1e6)

    assert milliseconds("codec.encode") == (10, 20)
    assert milliseconds("prefill") == (30, 100)
    assert milliseconds("decode") == milliseconds("codec.decode") == (100, 500)


def test_attributes_have_the_names_of_the_genai_conventions(kept: Kept) -> None:
    kept.ask(Route(), headers={"x-request-id": "r1"})
    spans = kept.spans()
    assert dict(spans["gateway"].attributes or {}) == {
        "http.request.method": "POST",
        "url.path": "/v1/x",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "deepinfer",
        "gen_ai.request.model": "nano",
        "gen_ai.response.model": "nano",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.response.finish_reasons": ("stop",),
        "dsv.cached_tokens": 128,
        "dsv.request_id": "r1",
        "dsv.tenant": "team-a",
    }
    assert dict(spans["prefill"].attributes or {}) == {"dsv.queue_ms": 5.0}
    assert dict(spans["decode"].attributes or {}) == {"dsv.accepted_ratio": 0.75}
    assert dict(spans["codec.decode"].attributes or {}) == {"dsv.busy_ms": 40.0}


def test_what_people_wrote_is_in_no_span(kept: Kept) -> None:
    kept.ask(Route())
    assert "secret" not in "".join(span.to_json() for span in kept.spans().values())


def test_the_callers_trace_goes_on(kept: Kept) -> None:
    kept.ask(Route(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "theirs=1"})
    gateway = kept.spans()["gateway"]
    assert f"{gateway.context.trace_id:032x}" == TRACE
    assert gateway.parent is not None and f"{gateway.parent.span_id:016x}" == PARENT
    assert gateway.context.trace_state.get("theirs") == "1"


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 32 + "-" + PARENT + "-01", f"ff-{TRACE}-{PARENT}-01"])
def test_a_context_that_is_none_begins_a_new_trace(kept: Kept, given: str) -> None:
    kept.ask(Route(), headers={"traceparent": given})
    gateway = kept.spans()["gateway"]
    assert gateway.parent is None and f"{gateway.context.trace_id:032x}" != TRACE


def test_the_callers_choice_is_kept_either_way() -> None:
    none = Kept(share=0.0)
    none.ask(Route(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert "gateway" in none.spans()
    every = Kept(share=1.0)
    every.ask(Route(status=500), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert every.spans() == {}
    none.tracing.close()
    every.tracing.close()


def test_failures_and_slow_ones_are_kept_and_of_the_rest_a_share() -> None:
    cases = {
        "well": (Route(), False),
        "not found": (Route(status=404, finish=None), False),
        "bad request": (Route(status=400, finish="error"), False),
        "client left": (Route(finish="abort"), False),
        "broken stream": (Route(finish="error"), True),
        "late": (Route(finish="deadline"), True),
        "500": (Route(status=500, finish=None), True),
        "503": (Route(status=503, finish=None), True),
        "slow": (Route(slow=2.0), True),
    }
    for name, (route, expected) in cases.items():
        made = Kept(share=0.0)
        made.ask(route)
        assert bool(made.spans()) == expected, name
        assert ("trace_id" in json.loads(made.lines[0])) == expected
        made.tracing.close()


def test_an_app_that_breaks_is_an_error_in_its_trace() -> None:
    made = Kept(share=0.0)
    with pytest.raises(ValueError, match="broken"):
        made.ask(Route(breaks=True))
    gateway = made.spans()["gateway"]
    assert gateway.status.status_code is StatusCode.ERROR
    assert (gateway.attributes or {})["error.type"] == "exception"
    made.tracing.close()


def test_a_request_refused_at_the_door_has_only_its_gateway(kept: Kept) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).error = "invalid_api_key"
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    kept.ask(refuse)  # type: ignore[arg-type]
    (gateway,) = kept.spans().values()
    assert (gateway.attributes or {})["error.type"] == "invalid_api_key"
    assert not any(name.startswith("gen_ai") for name in gateway.attributes or {})


def test_probes_are_not_traced(kept: Kept) -> None:
    kept.ask(Route(), method="GET", path="/health")
    assert kept.spans() == {}


def test_spans_reach_a_collector() -> None:
    received: list[tuple[str, str, int]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["content-type"], len(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        tracing = Tracing(f"http://127.0.0.1:{collector.server_port}", share=1.0)

        async def work() -> None:
            await Call(AccessLog(Traced(Route(), tracing), None))

        run(work())
        tracing.close()
        collector.shutdown()
        thread.join(20)
    ((path, kind, size),) = received
    assert (path, kind) == ("/v1/traces", "application/x-protobuf") and size > 500


@pytest.mark.parametrize("endpoint", ["", "collector:4318", "ftp://collector", "http://"])
def test_an_address_that_is_none_is_refused_at_start(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        Tracing(endpoint)


def test_a_share_that_is_none_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="share"):
        Tracing("http://collector:4318", share=1.5)
