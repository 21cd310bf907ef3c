"""What operators see: health, metrics, heartbeats, and the settings in force."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty_core import HANGS
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus
from servers import ThreadServer, thread_server

from deepinfer.server.keys import KeyRing, add_key
from deepinfer.server.quota import KeyLimits
from deepinfer.server.settings import ServerSettings, is_loopback

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none", "max_tokens": 3}


def test_metrics_join_the_engines_numbers_and_the_servers(tiny_server: ThreadServer) -> None:
    for _ in range(2):
        httpx.post(f"{tiny_server.base_url}/v1/chat/completions", json={**CHAT, "ignore_eos": True})
    httpx.get(f"{tiny_server.base_url}/some/path?of=a%20client")
    answer = httpx.get(f"{tiny_server.base_url}/metrics")
    families = {family.name: family for family in prometheus(answer.text)}
    assert {"dsv_generation_tokens", "dsv_time_to_first_token_seconds", "dsv_http_requests"} <= set(families)
    requests = {(s.labels["route"], s.labels["status"]): s.value for s in families["dsv_http_requests"].samples}
    assert requests["/v1/chat/completions", "200"] >= 2 and requests["other", "404"] >= 1
    assert not any("some" in route for route, _ in requests)
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(f"{tiny_server.base_url}/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert any(family.name == "dsv_engine_restarts" for family in openmetrics(answer.text))


@pytest.mark.parametrize(
    ("path", "fields", "beat"),
    [
        ("/v1/completions", {"prompt": HANGS}, ": "),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HANGS}]}, ": "),
        ("/v1/messages", {"messages": [{"role": "user", "content": HANGS}]}, "event: ping"),
    ],
)
def test_a_stream_that_has_nothing_to_say_is_kept_open(
    tiny_server: ThreadServer, path: str, fields: dict[str, Any], beat: str
) -> None:
    body = {"model": "tiny", "stream": True, "max_tokens": 2, **fields}
    with httpx.stream("POST", tiny_server.base_url + path, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        text = "".join(answer.iter_text())
    assert text.count(beat) >= 3  # in three seconds without a token
    assert text.startswith(beat) and "\n\n" in text


def test_an_idle_engine_is_asked_for_a_token_now_and_then(
    tiny_server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tiny_server.state.host.current
    assert client is not None
    monkeypatch.setattr("deepinfer.server.health.PROOF_SECONDS", 0.2)
    assert tiny_server.wait(lambda: tiny_server.status("/ready") == 503, 10) < 10  # no token for so long
    finished = tiny_server.metric("dsv_request_success_total")
    monkeypatch.setattr("deepinfer.server.health.PROBE_SECONDS", 0.1)
    monkeypatch.setattr("deepinfer.server.health.PROOF_SECONDS", 5.0)
    tiny_server.wait(lambda: client.last_output_age < 1.0, 10)
    assert tiny_server.status("/ready") == 200
    assert tiny_server.metric("dsv_request_success_total") == finished  # probes are no requests


def test_keys_divide_tenants_and_their_limits_hold(tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    ada, _ = add_key(file, "ada", KeyLimits(requests_per_minute=4))
    bob, _ = add_key(file, "bob", KeyLimits())
    with thread_server(tiny_checkpoint, KeyRing.load(file)) as server:
        url = f"{server.base_url}/v1/responses"
        body = {"model": "tiny", "input": "x", "max_output_tokens": 2}
        assert server.status("/ready") == server.status("/health") == 200
        for headers in ({}, {"authorization": "Bearer nonsense"}, {"x-api-key": ada + "x"}):
            assert httpx.post(url, json=body, headers=headers).status_code == 401
            assert httpx.get(f"{server.base_url}/v1/models", headers=headers).status_code == 401
        mine = httpx.post(url, json=body, headers={"x-api-key": ada}, timeout=60)
        assert mine.status_code == 200 and mine.headers["x-ratelimit-limit-requests"] == "4"
        path = f"{url}/{mine.json()['id']}"
        assert httpx.get(path, headers={"authorization": f"Bearer {ada}"}).status_code == 200
        for answer in (
            httpx.get(path, headers={"authorization": f"Bearer {bob}"}),
            httpx.post(url, json={**body, "previous_response_id": mine.json()["id"]}, headers={"x-api-key": bob}),
        ):
            assert answer.status_code == 404
        answers = [httpx.post(url, json=body, headers={"x-api-key": ada}, timeout=60) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert int(answers[-1].headers["retry-after"]) >= 1
        messages = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        refused = httpx.post(f"{server.base_url}/v1/messages", json=messages, headers={"x-api-key": ada})
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        assert httpx.post(url, json=body, headers={"x-api-key": bob}, timeout=60).status_code == 200


def test_an_answer_is_repeated_to_whoever_repeats_its_idempotency_key(tiny_server: ThreadServer) -> None:
    headers = {"idempotency-key": f"key-{time.monotonic()}"}
    url = f"{tiny_server.base_url}/v1/chat/completions"
    first, second = (httpx.post(url, json=CHAT, headers=headers) for _ in range(2))
    assert first.json() == second.json() and second.headers["idempotency-replayed"] == "true"
    assert httpx.post(url, json={**CHAT, "max_tokens": 4}, headers=headers).status_code == 422


def test_a_page_from_elsewhere_that_calls_this_machine_by_its_own_name_gets_nothing(tiny_server: ThreadServer) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.7", ""):
        for path in ("/v1/models", "/metrics", "/v1/responses/resp_1"):
            answer = httpx.get(tiny_server.base_url + path, headers={"host": host})
            assert answer.status_code in (400, 421), host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.1.2.3:8000", "[::1]:80"):
        assert httpx.get(f"{tiny_server.base_url}/v1/models", headers={"host": host}).status_code == 200, host


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org"):
        with pytest.raises(ValueError, match=r"host: .* keys"):
            ServerSettings(host=host)
        ServerSettings(host=host, keys=tmp_path / "keys.json")
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    for wrong in (
        {"port": 70000},
        {"sampling_policy": "best"},
        {"heartbeat": 0},
        {"request_timeout": float("inf")},
        {"max_running": 0},
        {"model_names": ("",)},
        {"drain_timeout": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerSettings(**wrong)  # type: ignore[arg-type]
    lines = "\n".join(ServerSettings(hang_timeout=7, keys=tmp_path / "k.json").describe())
    assert "k.json" in lines and "hang_timeout 7" in lines
