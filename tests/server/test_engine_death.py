"""The engine fails, hangs or is killed: who waits is told at once and rightly, and the server goes on."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import process_cores as cores
import pytest
import zmq
from faulty_core import FAILS, HANGS, SLOW, faulty, trigger_ids
from servers import ThreadServer, thread_server

from deepinfer.codec.errors import RequestError
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.client import AsyncEngineClient, EngineDeadError
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.server.engine_host import EngineHost

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none", "max_tokens": 3}


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[ThreadServer]:
    """Its own: these tests kill engines."""
    with thread_server(tiny_checkpoint) as started:
        yield started


def asking(prompt: str) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}


class Reader(threading.Thread):
    """Asks, reads to the end, and notes when that was."""

    def __init__(self, server: ThreadServer, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = server.base_url + path, body
        self.status, self.text, self.ended = 0, "", 0.0
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=60) as client, client.stream("POST", self._url, json=self._body) as answer:
            self.status = answer.status_code
            for piece in answer.iter_text():
                self.text += piece
        self.ended = time.monotonic()


def stream_of(path: str) -> dict[str, Any]:
    """A request of that protocol for a stream that lasts."""
    messages = [{"role": "user", "content": SLOW}]
    common = {"model": "tiny", "stream": True, "ignore_eos": True}
    match path:
        case "/v1/responses":
            return {**common, "input": messages, "max_output_tokens": 300}
        case "/v1/completions":
            return {**common, "prompt": SLOW, "max_tokens": 300}
    return {**common, "messages": messages, "max_tokens": 300}


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def assert_told(path: str, reader: Reader, streams: bool) -> None:
    """That the engine was lost, in the protocol's own shape."""
    if not streams or reader.status != 200:
        assert reader.status == 503, reader.text
        error = json.loads(reader.text)["error"]
        code = error["details"]["error_code"] if path == "/v1/messages" else error["code"]
        assert code in ("engine_dead", "engine_loading")
        return
    event, data = ["", *reader.text.rstrip().split("\n\n")[-1].split("\n")][-2:]
    last = json.loads(data.removeprefix("data: "))
    match path:
        case "/v1/responses":
            assert event == "event: response.failed" and last["response"]["error"]["message"]
        case "/v1/messages":
            assert event == "event: error" and last["error"]["type"] == "overloaded_error"
        case _:
            assert last["error"]["code"] == "engine_dead"


def engines() -> set[int]:
    """The engines' processes of this test process, also those that load."""
    children = multiprocessing.active_children()
    return {each.pid for each in children if each.name == "deepinfer-engine" and each.pid is not None}


def engine_pid(server: ThreadServer) -> int:
    client = server.state.host.current
    assert client is not None and client.process is not None
    return client.process.pid


def test_a_killed_engine_ends_everything_in_two_seconds_and_comes_back_without_the_server(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of all protocols, complete answers, what waits for a place, and what is held to a grammar. The next start
    fails for want of files, the one after that is killed on its way."""
    asked = [(path, True) for path in PATHS * 2]
    readers = [Reader(server, path, stream_of(path)) for path, _ in asked]
    server.wait(lambda: all("e" in reader.text for reader in readers), 30)  # all places are taken
    for path in PATHS:
        asked.append((path, False))
        readers.append(Reader(server, path, {**stream_of(path), "stream": False}))
    form = {"structured_outputs": {"regex": "[ab]{300}"}, "reasoning_effort": "none", "ignore_eos": False}
    asked.append((PATHS[0], True))
    readers.append(Reader(server, PATHS[0], {**stream_of(PATHS[0]), **form}))
    server.wait(lambda: server.metric("dsv_requests_running") == 8 and server.metric("dsv_requests_waiting") == 5, 30)
    fail_once_to_start(monkeypatch)
    others = engines() - {engine_pid(server)}  # of servers that other modules share
    os.kill(engine_pid(server), signal.SIGKILL)
    killed = time.monotonic()
    server.wait(lambda: server.status("/ready") == 503, 10)
    for (path, stream), reader in zip(asked, readers, strict=True):
        reader.join(20)
        assert not reader.is_alive()
        assert reader.ended - killed < 5  # two seconds on a machine that does nothing else
        assert_told(path, reader, stream)
    assert [reader.status for reader in readers] == [200] * 8 + [503] * 5
    assert (server.state.num_open, server.state.gate.stats().running) == (0, 0)
    refused = httpx.post(f"{server.base_url}/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    server.wait(lambda: "Too many open files" in str(server.state.host.error), 20)
    server.wait(lambda: engines() - others, 20)
    (loading,) = engines() - others
    os.kill(loading, signal.SIGKILL)
    assert server.status("/health") == 200 and server.status("/metrics") == 200
    server.wait(lambda: server.status("/ready") == 200)
    assert httpx.post(f"{server.base_url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
    assert server.metric("dsv_engine_restarts_total") == 3 and server.is_empty()


def fail_once_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = AsyncEngineClient.start, False

    async def failing(*arguments: Any, **options: Any) -> AsyncEngineClient:
        nonlocal failed
        if not failed:
            failed = True
            raise zmq.ZMQError(errno.EMFILE)
        return await start(*arguments, **options)

    monkeypatch.setattr(AsyncEngineClient, "start", failing)


def test_a_step_that_fails_takes_its_requests_and_nothing_else(server: ThreadServer) -> None:
    neighbour = Reader(server, "/v1/completions", {**asking(SLOW), "stream": True})
    server.wait(lambda: neighbour.text, 20)
    answer = httpx.post(f"{server.base_url}/v1/completions", json=asking(FAILS), timeout=60)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "fire" not in answer.text  # what went wrong inside is for the log
    neighbour.join(20)
    assert "server_error" in neighbour.text  # it was in the same step
    assert httpx.post(f"{server.base_url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200


def test_ready_is_false_while_a_step_hangs(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.server.health.STEP_SECONDS", 1.0)
    reader = Reader(server, "/v1/completions", {**asking(HANGS), "max_tokens": 2})
    server.wait(lambda: server.status("/ready") == 503, 20)
    assert server.status("/health") == 200
    reasons = httpx.get(f"{server.base_url}/ready").json()
    assert "no step" in reasons["reasons"][0] or reasons["ready"]
    reader.join(30)
    assert reader.status == 200
    server.wait(lambda: server.status("/ready") == 200, 20)


def test_an_engine_that_hangs_for_too_long_is_replaced(tiny_checkpoint: Path) -> None:
    async def hang() -> None:
        _, hangs, _ = trigger_ids(Tokenizer.from_directory(tiny_checkpoint))
        host = EngineHost(faulty(tiny_checkpoint), hang_timeout=1.0)
        await host.start()
        with pytest.raises(RequestError) as caught:
            _ = host.client
        assert (caught.value.status, caught.value.code) == (503, "engine_loading")
        await asyncio.wait_for(host.wait_ready(), 90)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        with pytest.raises(EngineDeadError):
            await host.client.complete([hangs, 5], params)
        with pytest.raises(RequestError, match=r"started again|loaded"):
            _ = host.client
        while host.state != "ready":
            await asyncio.sleep(0.05)
        assert host.restarts == 1
        assert (await host.client.complete([5, 6], params)).outputs[0].num_tokens == 2
        await host.close()

    asyncio.run(asyncio.wait_for(hang(), 180))


def test_a_model_that_cannot_be_loaded_is_not_tried_for_ever() -> None:
    async def load() -> None:
        host = EngineHost(cores.failing_core)
        await host.start()
        with pytest.raises(EngineDeadError, match="num_hidden_layers: must be at least 1"):
            await asyncio.wait_for(host.wait_ready(), 90)
        assert host.restarts == 0 and host.state == "dead"
        await host.close()

    asyncio.run(load())
