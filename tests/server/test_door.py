"""The whole stack in front of the routes, as the server puts it together."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from asgi_calls import Answer, Call, echo, read_all, render, run, serving

from deepinfer.server.access_log import record_of
from deepinfer.server.asgi import App, Receive, Scope, Send
from deepinfer.server.connections import ConnectionLimits
from deepinfer.server.door import front
from deepinfer.server.gate import Gate
from deepinfer.server.keys import KeyRing, Principal, add_key
from deepinfer.server.limits import RequestLimits
from deepinfer.server.quota import UNLIMITED


class Stack:
    def __init__(self, tmp_path: Path, app: App = echo) -> None:
        path = tmp_path / "keys.json"
        self.keys = {tenant: add_key(path, tenant, UNLIMITED)[0] for tenant in ("team-a", "team-b")}
        self.gate = Gate(KeyRing.load(path))
        self.lines: list[bytes] = []
        self.app = front(
            app, gate=self.gate, render_error=render, limits=RequestLimits(max_body=1000), write_log=self.lines.append
        )

    def ask(self, body=b"{}", tenant: str | None = "team-a", headers=None, **more) -> Answer:  # type: ignore[no-untyped-def]
        given = {"authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}

        async def work() -> Answer:
            return await Call(self.app, body, headers={**given, **(headers or {})}, **more)

        return run(work())

    def line(self) -> dict[str, object]:
        line: dict[str, object] = json.loads(self.lines[-1])
        return line


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)


def test_who_has_no_key_is_refused_before_any_of_the_body_is_read(stack: Stack) -> None:
    answer = stack.ask(iter([b"x" * 100] * 5), tenant=None)
    assert (answer.status, answer.unread, answer.json["code"]) == (401, 5, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
    assert (stack.line()["status"], stack.line()["error"]) == (401, "invalid_api_key")


def test_every_refusal_of_the_door_is_in_the_protocols_shape_with_an_id_and_a_line(stack: Stack) -> None:
    cases = [
        (stack.ask(b"x" * 2000, path="/v1/messages"), 413, "body_too_large"),
        (stack.ask(b"[" * 100), 400, "json_too_deep"),
        (stack.ask(headers={"idempotency-key": " "}), 400, "invalid_idempotency_key"),
        (stack.ask(tenant=None), 401, "invalid_api_key"),
    ]
    assert [answer.json["path"] for answer, *_ in cases] == ["/v1/messages", "/v1/x", "/v1/x", "/v1/x"]
    for (answer, status, code), line in zip(cases, map(json.loads, stack.lines), strict=True):
        assert (answer.status, answer.json["code"]) == (status, code) == (line["status"], line["error"])
        assert answer.headers["x-request-id"] == line["request_id"]
        assert answer.headers["content-type"] == "application/json"


def test_probes_need_no_key_and_nothing_else_goes_without(stack: Stack) -> None:
    assert [stack.ask(tenant=None, path=path, method="POST").status for path in ("/", "/health", "/ready")] == [200] * 3
    closed = ("/metrics", "/v1/models", "/docs", "//health", "/health/", "/HEALTH", "/v1/chat/completions")
    assert [stack.ask(tenant=None, path=path).status for path in closed] == [401] * len(closed)


def test_routes_know_who_asks(tmp_path: Path) -> None:
    seen: list[Principal] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["principal"])
        assert record_of(scope).tenant == seen[-1].tenant
        await echo(scope, receive, send)

    stack = Stack(tmp_path, app)
    for tenant in ("team-a", "team-b"):
        stack.ask(tenant=tenant)
        assert (stack.line()["tenant"], stack.line()["key"]) == (tenant, seen[-1].key_id)
    assert [principal.tenant for principal in seen] == ["team-a", "team-b"]
    assert not any(stack.keys[tenant].encode() in line for tenant in stack.keys for line in stack.lines)


def test_an_answer_is_replayed_to_its_tenant_alone_and_said_so_in_the_log(stack: Stack) -> None:
    first, again, other = (
        stack.ask(tenant=tenant, headers={"idempotency-key": "k"}) for tenant in ("team-a", "team-a", "team-b")
    )
    replayed = [answer.headers.get("idempotency-replayed") for answer in (first, again, other)]
    assert replayed == [None, "true", None]
    assert [json.loads(line).get("replayed") for line in stack.lines] == [None, True, None]
    assert len({answer.headers["x-request-id"] for answer in (first, again, other)}) == 3


def test_a_stranger_cannot_get_a_replay_with_a_revoked_or_no_key(stack: Stack) -> None:
    stack.ask(headers={"idempotency-key": "k"})
    assert stack.ask(tenant=None, headers={"idempotency-key": "k"}).status == 401


def test_a_thousand_that_connect_and_vanish_leave_nothing(tmp_path: Path) -> None:
    inside = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal inside
        await receive()
        async with gate.admit(scope["state"]["principal"], prompt_tokens_estimate=100):
            inside += 1
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
            finally:
                inside -= 1

    gate = Gate(max_queued_tokens=10**9, max_queued_requests=10**6, max_running=10**6)
    lines: list[bytes] = []
    served = front(app, gate=gate, render_error=render, write_log=lines.append)

    async def vanish(port: int, number: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        whole = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
        if number % 3 == 0:
            whole = whole.replace(b"Host: h", b"Host: h\r\nIdempotency-Key: k%d" % (number % 30))
        writer.write(whole[: len(whole) - number % 5 * 8] if number % 2 else whole)
        await writer.drain()
        await asyncio.sleep(0.01 * (number % 7))
        writer.transport.abort()

    async def work() -> None:
        async with serving(served, ConnectionLimits()) as port:
            for start in range(0, 1000, 100):
                await asyncio.gather(*[vanish(port, number) for number in range(start, start + 100)])
            async with asyncio.timeout(20):
                while inside or gate.stats().running:
                    await asyncio.sleep(0.01)
            assert gate.stats() == (0, 0, 0, {})
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n")
            assert (await read_all(reader)).startswith(b"HTTP/1.1 413")
            writer.close()

    run(work())
    assert sum(json.loads(line)["status"] == 499 for line in lines) > 300
