"""One line per request, that machines read, without what people wrote; and an id in every answer."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading

import pytest
from asgi_calls import Answer, Call, echo, make_scope, run

from deepinfer.codec.generation import Usage
from deepinfer.server.access_log import AccessLog, LogWriter, record_of
from deepinfer.server.asgi import App, Receive, Scope, Send
from deepinfer.server.keys import Principal
from deepinfer.server.quota import UNLIMITED


def logged(app: App, call=None, **log_options) -> tuple[Answer, list[dict[str, object]]]:  # type: ignore[no-untyped-def]
    """The answer and the lines."""
    lines: list[bytes] = []

    async def work() -> Answer:
        return await (call or Call)(AccessLog(app, lines.append, **log_options))

    answer = run(work())
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    return answer, [json.loads(line) for line in lines]


async def serve(scope: Scope, receive: Receive, send: Send) -> None:
    """As a route does: fills in what it knows."""
    record = record_of(scope)
    record.identify(Principal("team-a", "", UNLIMITED, "0123456789ab"))
    record.model, record.stream, record.finish, record.ignored = "nano", True, "stop", ["user"]
    record.prompt, record.answer = "my secret question", "the secret answer"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    record.saw_first_token()
    first = record.first_token
    record.saw_first_token()
    assert record.first_token == first
    await send({"type": "http.response.body", "body": b"12345", "more_body": True})
    record.usage = Usage(100, 64, 20, 5)
    await send({"type": "http.response.body", "body": b"678"})


def test_a_request_leaves_one_line_with_who_what_and_how_long() -> None:
    answer, (line,) = logged(serve)
    assert answer.headers["x-own"] == "1" and answer.headers["x-request-id"] == line["request_id"]
    expected = {
        "tenant": "team-a", "key": "0123456789ab", "method": "POST", "path": "/v1/x", "status": 200, "model": "nano",
        "stream": True, "finish": "stop", "ignored": ["user"], "bytes": 8,
        "prompt_tokens": 100, "cached_tokens": 64, "completion_tokens": 20, "reasoning_tokens": 5,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["ttft_ms"] <= line["duration_ms"]  # type: ignore[operator]
    assert "disconnected" not in line and "error" not in line


def test_what_people_wrote_is_in_no_line_unless_asked_for() -> None:
    _, (line,) = logged(serve)
    assert "secret" not in json.dumps(line)
    _, (line,) = logged(serve, with_text=True)
    assert (line["prompt"], line["answer"]) == ("my secret question", "the secret answer")


def test_the_clients_own_id_is_echoed_and_logged() -> None:
    for given in ("abc-123", "Root=1-5759e988:x/y+z@host", "x" * 128):
        answer, (line,) = logged(echo, lambda app, given=given: Call(app, headers={"X-Request-ID": given}))
        assert answer.headers["x-request-id"] == line["request_id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "a\r\nset-cookie: x", "\xff", "<script>", "a\x1b[31m"])
def test_an_id_that_could_do_harm_is_replaced(given: str) -> None:
    answer, (line,) = logged(echo, lambda app: Call(app, headers={"x-request-id": given}))
    made = answer.headers["x-request-id"]
    assert made == line["request_id"] != given and len(made) == 32 and int(made, 16)


def test_anthropics_clients_find_the_id_where_they_look() -> None:
    answer, (line,) = logged(echo, lambda app: Call(app, path="/v1/messages"))
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == line["request_id"]
    answer, _ = logged(echo)
    assert "request-id" not in answer.headers


def test_a_path_cannot_forge_lines() -> None:
    path = '/v1/x\n{"status": 200} \u2028\x1b[2J\udcff' + "y" * 5000
    _, (line,) = logged(echo, lambda app: Call(app, scope=make_scope() | {"path": path}))
    assert line["path"] == path[:256]


def test_a_client_that_left_is_told_apart() -> None:
    async def unanswered(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await unanswered(scope, receive, send)

    async def finished(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        await unanswered(scope, receive, send)

    def leaving(app: App) -> Call:
        call = Call(app)
        call.leave()
        return call

    results = [logged(app, leaving)[1][0] for app in (unanswered, answered, finished)]
    assert [(line["status"], line.get("disconnected")) for line in results] == [(499, True), (200, True), (200, None)]


def test_an_app_that_breaks_leaves_a_line_with_500_and_the_error_goes_on() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("broken")

    lines: list[bytes] = []

    async def work() -> None:
        await Call(AccessLog(broken, lines.append))

    with pytest.raises(ValueError, match="broken"):
        run(work())
    line = json.loads(lines[0])
    assert (line["status"], line["error"]) == (500, "exception")


def test_probes_leave_a_line_only_where_they_begin_to_fail() -> None:
    statuses = iter([200, 503, 503, 503, 200, 503, 500])
    lines: list[bytes] = []

    async def ready(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": next(statuses), "headers": []})
        await send({"type": "http.response.body"})

    async def work() -> None:
        server = AccessLog(ready, lines.append)
        for _ in range(7):
            await Call(server, path="/ready", method="GET")

    run(work())
    assert [json.loads(line)["status"] for line in lines] == [503, 503, 500]


def test_without_a_log_ids_are_there_all_the_same() -> None:
    async def work() -> Answer:
        return await Call(AccessLog(echo, None))

    assert len(run(work()).headers["x-request-id"]) == 32


# The thread that writes.


def test_all_lines_are_written_in_order_when_it_closes() -> None:
    file = io.BytesIO()
    writer = LogWriter(file)
    for number in range(1000):
        writer.write(b"%d\n" % number)
    writer.close()
    assert file.getvalue() == b"".join(b"%d\n" % number for number in range(1000))


def test_a_pipe_that_nobody_reads_stops_no_request_and_what_was_dropped_is_told() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb", buffering=0) as file:
        writer = LogWriter(file, max_lines=100)
        line = b"x" * 999 + b"\n"
        for _ in range(1000):  # far more than a pipe and the queue hold
            writer.write(line)
        assert writer.dropped > 500
        read = bytearray()
        thread = threading.Thread(target=lambda: read.extend(reader.read()))
        thread.start()
        writer.close()
        file.close()
        thread.join(20)
    told = [json.loads(each) for each in bytes(read).split(b"\n") if each.startswith(b"{")]
    assert sum(each["dropped_lines"] for each in told) == writer.dropped
    assert read.count(b"x\n") == 1000 - writer.dropped


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    file = io.BytesIO()
    file.close()
    writer = LogWriter(file)
    for _ in range(10):
        writer.write(b"line\n")
    writer.close()
    assert writer.dropped == 10


def test_a_record_is_each_requests_own() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        await asyncio.sleep(0)
        seen.append(record.request_id)
        await echo(scope, receive, send)

    async def work() -> None:
        server = AccessLog(app, None)
        await asyncio.gather(*[Call(server, headers={"x-request-id": f"r{number}"}).task for number in range(20)])

    run(work())
    assert sorted(seen) == sorted(f"r{number}" for number in range(20))
