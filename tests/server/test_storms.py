"""Many clients at once that mean no good, or do not care: nothing of them stays, and their neighbours do not notice."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty_core import SLOW
from servers import ThreadServer
from storm import PATHS, PHASES, body, storm

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))
from hostile import MAKERS, hostile

from deepinfer.grammar.structure import Grammar, Structure

QUESTION = {"model": "tiny", "prompt": f"{SLOW}xy", "max_tokens": 20, "seed": 4, "ignore_eos": True, "stream": True}


class Neighbour(threading.Thread):
    """Asks for the same stream again and again, and for the server's health in between."""

    def __init__(self, server: ThreadServer) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=server.base_url, timeout=120)
        self.alone = self._ask()
        self.wrong: list[str] = []
        self.rounds = 0
        self._ends = threading.Event()

    def _ask(self) -> list[str]:
        lines = self._client.post("/v1/completions", json=QUESTION).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return [choice["text"] for chunk in chunks for choice in chunk["choices"]]

    def run(self) -> None:
        while not self._ends.is_set():
            answer, health = self._ask(), self._client.get("/health")
            self.rounds += 1
            if "".join(answer) != "".join(self.alone) or health.status_code != 200:
                self.wrong.append(f"{answer} {health.status_code}")

    def end(self) -> None:
        self._ends.set()
        self.join(120)
        self._client.close()
        assert self.rounds and not self.wrong


@contextmanager
def neighbour(server: ThreadServer) -> Iterator[None]:
    """Whose streams are the same as when it was alone."""
    other = Neighbour(server)
    other.start()
    try:
        yield
    finally:
        other.end()


def tasks(server: ThreadServer) -> int:
    """Of the server's event loop."""
    assert server.server._loop is not None
    return len(asyncio.all_tasks(server.server._loop))


def assert_nothing_is_left(server: ThreadServer, idle_tasks: int) -> None:
    server.wait(server.is_empty, 30)
    server.wait(lambda: not server.server.server_state.connections, 30)
    server.wait(lambda: tasks(server) <= idle_tasks, 30)
    client, gate = server.state.host.current, server.state.gate.stats()
    assert client is not None and not client._streams and not client._named
    assert (gate.running, gate.queued, gate.queued_tokens, server.state.num_open) == (0, 0, 0, 0)


def vanish_by_the_hundred(server: ThreadServer, seeds: range) -> None:
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        client.post("/v1/completions", json=QUESTION)  # what is made once is there now
    server.wait(lambda: not server.server.server_state.connections, 30)
    idle = tasks(server)
    with neighbour(server):
        phases = asyncio.run(storm(server.port, seeds, 40))
    assert set(phases) == set(PHASES)
    assert_nothing_is_left(server, idle)


def test_clients_of_all_protocols_that_vanish_at_any_moment_leave_no_trace(tiny_server: ThreadServer) -> None:
    vanish_by_the_hundred(tiny_server, range(250))


@pytest.mark.slow
def test_thousands_of_clients_of_all_protocols_that_vanish_leave_no_trace(tiny_server: ThreadServer) -> None:
    vanish_by_the_hundred(tiny_server, range(1000, 5000))


def test_connections_that_say_nothing_are_in_nobodys_way(tiny_server: ThreadServer) -> None:
    """Half-open ones, and those that send a byte now and then."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sent = (b"", b"PO", head, head + b"content-length: 1000\r\n\r\n{", head + b"transfer-encoding: chunked\r\n\r\n1")
    silent = []
    try:
        with neighbour(tiny_server):
            for number in range(400):
                silent.append(socket.create_connection(("127.0.0.1", tiny_server.port), timeout=30))
                silent[-1].sendall(sent[number % len(sent)])
            for connection in silent[1::2]:
                connection.sendall(b"x")
        assert len(tiny_server.server.server_state.connections) >= 200  # the others made no sense in the end
    finally:
        for connection in silent:
            connection.close()
    tiny_server.wait(lambda: not tiny_server.server.server_state.connections, 30)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_reader_that_does_not_read_fills_no_memory_and_gets_all_of_it_when_it_does(tiny_server: ThreadServer) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "stream": True, "n": 2, "seed": 3}
    asked |= {"max_tokens": 200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "reasoning_effort": "none"}
    whole = httpx.post(f"{tiny_server.base_url}/v1/chat/completions", json=asked, timeout=120).text
    tiny_server.wait(lambda: not tiny_server.server.server_state.connections, 30)
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(60)
        lazy.connect(("127.0.0.1", tiny_server.port))
        tiny_server.wait(lambda: tiny_server.server.server_state.connections, 30)
        (connection,) = tiny_server.server.server_state.connections
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        lazy.sendall(head_and_body("/v1/chat/completions", asked))
        tiny_server.wait(lambda: tiny_server.metric("dsv_requests_running") == 2, 30)
        tiny_server.wait(lambda: tiny_server.metric("dsv_requests_running") == 0, 60)  # the engine waits for nobody
        assert 0 < connection.transport.get_write_buffer_size() < len(whole) / 4
        assert tiny_server.metric("dsv_http_open_answers") == 1
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            piece = lazy.recv(1 << 20)
            assert piece
            got += piece
    assert said(got.decode()) == said(whole)


def head_and_body(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def said(stream: str) -> dict[int, tuple[str, list[Any], str | None]]:
    """Text, log-probabilities and end of each choice of a chat's stream, however it was cut."""
    found: dict[int, tuple[str, list[Any], str | None]] = {}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text, entries, end = found.get(choice["index"], ("", [], None))
                more = (choice.get("logprobs") or {}).get("content", [])
                text += choice["delta"].get("content") or ""
                found[choice["index"]] = (text, entries + more, choice["finish_reason"] or end)
    assert len(found) == 2 and all(text and end for text, _, end in found.values())
    return found


def test_requests_that_are_over_leave_nothing_in_memory(tiny_server: ThreadServer) -> None:
    """Of the server: it lives in this process, so its objects can be counted."""

    def ask(client: httpx.Client, number: int) -> None:
        chance = random.Random(number)
        path = PATHS[number % len(PATHS)]
        fields = json.loads(json.dumps(body(path, chance)).replace(json.dumps(SLOW)[1:-1], "a"))
        fields |= {"store": False} if path == "/v1/responses" else {"max_tokens": 8}
        for form in ("response_format", "structured_outputs"):  # verdicts on grammars are kept, up to a number
            fields.pop(form, None)
        answer = client.post(path, json=fields, headers={"x-request-id": f"n{number}"})
        assert answer.status_code == 200, answer.text
        assert client.post(path, json={**fields, "model": f"m{number}"}).status_code == 404
        assert client.post(path, json={**fields, "temperature": -number - 1}).status_code == 400
        assert client.get(f"/nowhere/{number}").status_code == 404

    idle = tasks(tiny_server) + 1  # the client's connection
    with httpx.Client(base_url=tiny_server.base_url, timeout=60) as client:
        counts = []
        for numbers in (range(24), range(24, 64), range(64, 104)):
            for number in numbers:
                ask(client, number)
            tiny_server.wait(tiny_server.is_empty, 10)
            tiny_server.wait(lambda: tasks(tiny_server) <= idle, 10)
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 150, counts  # less than an object per request; what comes and goes is about 80


# -- grammars ---------------------------------------------------------------------------------------------------------


def fields_of(structure: Structure) -> dict[str, Any]:
    """How a chat asks for a structure."""
    if structure.tools:
        tools = [
            {"type": "function", "function": {"name": t.name, "parameters": _json(t.schema), "strict": t.strict}}
            for t in structure.tools
        ]
        return {"tools": tools, "tool_choice": "required"}
    content = structure.content or Grammar("json_object")
    match content.kind:
        case "json_schema":
            return {"structured_outputs": {"json": content.source}}
        case "choice":
            return {"structured_outputs": {"choice": _json(content.source)}}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "regex":
            return {"structured_outputs": {"regex": content.source}}
    return {"structured_outputs": {"grammar": content.source}}


def _json(text: str) -> Any:
    """What a text says, else the text: something is sent in any case."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def send_hostile(server: ThreadServer, seeds: range) -> dict[int, int]:
    """-> answers by status. Nothing but these may come: an answer, a fault of the request's, no time for it now."""
    counts: dict[int, int] = {}
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        for seed in seeds:
            fields: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
            fields |= {"stream": seed % 3 == 0, "reasoning_effort": ("none", "low")[seed % 2]}
            try:
                text = json.dumps(fields | fields_of(hostile(seed)))
            except (ValueError, RecursionError):
                continue  # nobody could send it
            answer = client.post("/v1/chat/completions", content=text, headers={"content-type": "application/json"})
            counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 503), (seed, answer.text[:300])
            if answer.status_code == 200:
                assert '"finish_reason":' in answer.text and '"error"' not in answer.text, (seed, answer.text[:300])
            else:
                error = answer.json()["error"]
                assert error["message"] and (answer.status_code == 503) == (error["code"] == "overloaded"), (
                    seed,
                    error,
                )
                assert answer.status_code == 503 or error["param"] or error["code"] == "json_too_deep", (seed, error)
    return counts


def test_hostile_grammars_are_refused_and_nobody_else_notices(tiny_server: ThreadServer) -> None:
    with neighbour(tiny_server):
        counts = send_hostile(tiny_server, range(2 * len(MAKERS)))
    assert counts[400] > counts.get(503, 0)


@pytest.mark.slow
def test_a_thousand_hostile_grammars_are_refused_and_nobody_else_notices(tiny_server: ThreadServer) -> None:
    with neighbour(tiny_server), ThreadPoolExecutor() as threads:
        parts = threads.map(partial(send_hostile, tiny_server), [range(at, at + 125) for at in range(1000, 2000, 125)])
        counts = sum(map(Counter, parts), Counter())
    assert counts[400] > counts.get(503, 0)
