"""Clients that leave, at any moment and in any manner, take their requests along."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import httpx
import pytest
from faulty_core import SLOW, trigger_ids
from servers import ThreadServer, raw_request

ENDLESS = {"model": "tiny", "prompt": f"{SLOW}abc", "max_tokens": 400, "ignore_eos": True}
SECONDS = 1.0  # to be forgotten in; the engine's own step (20 ms) and a look at the metrics are part of it


def body(**fields: object) -> bytes:
    return json.dumps({**ENDLESS, **fields}).encode()


def running(server: ThreadServer, count: int) -> bool:
    return server.metric("dsv_requests_running") == count


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_frees_the_engine_within_a_second(
    tiny_server: ThreadServer, stream: bool, how: str
) -> None:
    connection = raw_request(tiny_server.port, "/v1/completions", body(stream=stream))
    tiny_server.wait(lambda: running(tiny_server, 1), 10)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert tiny_server.wait(lambda: running(tiny_server, 0), 10) < 5 * SECONDS  # five times: machines have other work


def test_a_client_that_leaves_while_it_waits_is_forgotten_too(tiny_server: ThreadServer) -> None:
    seated = [raw_request(tiny_server.port, "/v1/completions", body()) for _ in range(8)]  # all slots
    tiny_server.wait(lambda: running(tiny_server, 8), 20)
    waiting = raw_request(tiny_server.port, "/v1/completions", body(stream=True))
    tiny_server.wait(lambda: tiny_server.metric("dsv_requests_waiting") == 1, 10)
    waiting.close()
    tiny_server.wait(lambda: tiny_server.metric("dsv_requests_waiting") == 0, 10)
    assert running(tiny_server, 8)
    for connection in seated:
        connection.close()


def test_one_of_several_prompts_leaves_nothing_behind(tiny_server: ThreadServer) -> None:
    prompts = [f"{SLOW}a", f"{SLOW}b", f"{SLOW}c"]
    connection = raw_request(tiny_server.port, "/v1/completions", body(prompt=prompts, n=2, stream=True))
    tiny_server.wait(lambda: running(tiny_server, 6), 10)
    connection.close()
    tiny_server.wait(tiny_server.is_empty, 10)


def test_half_a_request_is_nobodys(tiny_server: ThreadServer) -> None:
    whole = body()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(whole)
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        connection = socket.create_connection(("127.0.0.1", tiny_server.port))
        connection.sendall(head + whole[:cut])
        connection.close()
    time.sleep(0.2)
    assert tiny_server.is_empty()


def test_a_thousand_clients_that_vanish_leave_no_request_and_no_block(tiny_server: ThreadServer) -> None:
    chance = random.Random(3)
    steady: list[httpx.Response] = []
    harmless = sorted(set(range(5, 480)) - set(trigger_ids(tiny_server.state.model.tokenizer)))
    question = {"model": "tiny", "prompt": f"{SLOW}xy", "max_tokens": 40, "seed": 4, "ignore_eos": True}

    def neighbour() -> None:
        steady.append(httpx.post(f"{tiny_server.base_url}/v1/completions", json=question, timeout=120))

    alone = httpx.post(f"{tiny_server.base_url}/v1/completions", json=question, timeout=60).json()
    thread = threading.Thread(target=neighbour)
    thread.start()
    for number in range(1000):
        ids = chance.choices(harmless, k=chance.randrange(1, 40))
        fields = {"prompt": ids, "stream": chance.random() < 0.5, "n": chance.choice((1, 1, 2))}
        connection = raw_request(tiny_server.port, "/v1/completions", body(**fields))
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.01)
        if number % 50 == 0 and fields["stream"]:
            connection.recv(100)
        connection.close()
    thread.join()
    assert steady[0].json()["choices"] == alone["choices"]
    tiny_server.wait(tiny_server.is_empty, 20)
    assert tiny_server.state.num_open == 0
