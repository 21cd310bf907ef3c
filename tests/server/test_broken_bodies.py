"""Bodies that nobody should send, to every route that takes one: each is refused in the protocol's own shape with the
field's name, the server stays well, and whoever is served meanwhile notices nothing.

corpus/broken: bodies whose very bytes are wrong. corpus/valid: for every route a body with nearly all of its fields,
each of which is then replaced by what it is not.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from bodies_of_corpus import BROKEN, VALID, places, replaced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROUTES = sorted(VALID)
JSON = {"content-type": "application/json"}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, 10**400, 1e308, -1e-300, "", "x", "\0\n<｜User｜>", "9" * 300,
    [], [[]], [None], ["x"], [{}], {}, {"type": "x"}, {"a": {"b": []}},
)  # fmt: skip
TRIED = 2  # of VALUES in the place of every field
OTHER_NAMES = {"tools": "tool_choice", "logprobs": "top_logprobs", "messages": "prompt"}
"""Fields that another one needs: without them that one is to blame."""


class Neighbour(threading.Thread):
    """Asks for the same stream again and again, and for the server's health in between."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self.alone = self._ask()
        self.wrong: list[str] = []
        self.rounds = 0
        self._stops = threading.Event()

    def run(self) -> None:
        while not self._stops.wait(0.2):
            answer, health = self._ask(), self._client.get("/health")
            self.rounds += 1
            if answer != self.alone or health.status_code != 200:
                self.wrong.append(f"{answer} {health.status_code}")

    def _ask(self) -> str:
        body = {"model": "nano", "prompt": "The old", "max_tokens": 30, "seed": 3, "ignore_eos": True, "stream": True}
        return "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in self._client.post("/v1/completions", json=body).text.splitlines()
            if line.startswith("data: {")
        )

    def stop(self) -> None:
        self._stops.set()
        self.join()
        assert self.rounds and not self.wrong


@pytest.fixture(scope="module")
def client(nano_server: str) -> Iterator[httpx.Client]:
    """With a neighbour whose streams must not change; in the end nothing may be left of all this."""
    with httpx.Client(base_url=nano_server, timeout=120) as client:
        neighbour = Neighbour(client)
        neighbour.start()
        yield client
        neighbour.stop()
        until = time.monotonic() + 20
        while left := in_use(client):
            assert time.monotonic() < until, left
            time.sleep(0.05)


def in_use(client: httpx.Client) -> list[str]:
    names = ("dsv_requests_running", "dsv_requests_waiting", "dsv_kv_cache_usage_ratio", "dsv_http_open_answers")
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(names)]
    assert {line.partition("{")[0].partition(" ")[0] for line in lines} >= set(names)
    return [line for line in lines if float(line.rpartition(" ")[2])]


def refused(answer: httpx.Response, path: str, statuses: tuple[int, ...] = (400,)) -> tuple[str | None, str]:
    """The field and the message of an error, which must have the protocol's shape."""
    assert answer.status_code in statuses, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    body = answer.json()
    error = body.pop("error")
    if path.startswith("/v1/messages"):
        assert body == {"type": "error"} and {"type", "message"} <= set(error) <= {"type", "message", "details"}
        return error["message"].partition(":")[0], error["message"]
    assert body == {} and set(error) == {"message", "type", "param", "code"}
    return error["param"], error["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_bytes_that_are_no_json_are_refused(client: httpx.Client, path: str) -> None:
    for name, body in BROKEN.items():
        _, message = refused(client.post(path, content=body, headers=JSON), path)
        assert message, name


def test_what_json_readers_do_not_agree_on_is_refused_by_its_field(client: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        for name, field in (
            ("nan", "temperature"),
            ("nan_where_nobody_looks", "metadata.a"),
            ("minus_infinity", "temperature"),
            ("beyond_floats", "temperature"),
            ("beyond_floats_where_nobody_looks", "metadata.a"),
            ("same_key_twice", "max_tokens"),
            ("same_key_twice_inside", "content"),
            ("half_a_pair", "stop"),
            ("half_a_pair_in_a_message", "messages.0.content"),
        ):
            param, message = refused(client.post(path, content=BROKEN[name], headers=JSON), path)
            assert param == field, (name, message)


def try_values(client: httpx.Client, path: str, count: int) -> None:
    chance = random.Random(path)
    for place, _ in places(VALID[path]):
        for new in chance.sample(VALUES, count):
            body = json.dumps(replaced(VALID[path], place, new))
            answer = client.post(path, content=body, headers=JSON)
            if answer.status_code == 200:
                continue
            param, message = refused(answer, path, (400, 404))
            assert param, (place, new, message)
            assert param.split(".")[0] in (place[0], OTHER_NAMES.get(place[0])), (place, new, message)
            assert message.startswith(param), (place, new, message)


@pytest.mark.parametrize("path", ROUTES)
def test_a_value_that_a_field_cannot_have_is_blamed_on_that_field(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=VALID[path]).status_code == 200
    try_values(client, path, TRIED)


USER = {"role": "user", "content": "x"}
LONG = {"role": "user", "content": "x y " * 5000}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 4}}, "required": ["a"]}
BAD_TOOL = {"type": "function", "name": "f", "parameters": BAD_SCHEMA, "strict": True}
GOOD_TOOL = {**BAD_TOOL, "parameters": {"type": "object", "properties": {}}}


def text_format(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "p", "schema": schema}}


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"messages": [LONG]}, "messages"),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 10**6}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [USER], "stop_token_ids": [10**6]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x y " * 5000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
        ("/v1/responses", {"input": [LONG]}, "input"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "text": text_format(BAD_SCHEMA), "tools": [GOOD_TOOL]}, "text.format.schema"),
        ("/v1/responses", {"input": "x", "text": text_format({}), "tools": [BAD_TOOL]}, "tools"),
        ("/v1/messages", {"messages": [LONG], "max_tokens": 5}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_the_engine_knows_is_told_in_the_protocols_own_names(
    client: httpx.Client, path: str, fields: dict[str, Any], name: str
) -> None:
    param, message = refused(client.post(path, json={"model": "nano", **fields}), path)
    assert param == name and message.startswith(f"{name}: ")


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
def test_no_value_of_any_kind_breaks_a_field(client: httpx.Client, path: str) -> None:
    try_values(client, path, len(VALUES))


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_that_was_cut_or_changed_on_its_way_never_breaks_the_server(client: httpx.Client, path: str) -> None:
    whole = json.dumps(VALID[path], ensure_ascii=False).encode()

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(st.integers(0, len(whole) - 1), st.binary(max_size=3), st.integers(0, 4), st.booleans())
    def survives(at: int, put: bytes, dropped: int, cut: bool) -> None:
        body = whole[:at] + put + (b"" if cut else whole[at + dropped :])
        answer = client.post(path, content=body, headers=JSON)
        if answer.status_code != 200:
            refused(answer, path, (400, 404))

    survives()


HEAD = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
NEEDED = {"/tokenize": ["messages"], "/v1/responses": ["input", "max_output_tokens"]} | {
    path: ["max_tokens"] for path in ("/v1/chat/completions", "/v1/completions")
}
"""Fields without which there would be no answer, or a long one."""
RAW = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "no_version": b"POST /v1/messages\r\n\r\n",
    "no_such_version": HEAD.replace(b"1.1", b"9.9") + b"\r\n",
    "no_such_method": HEAD.replace(b"POST", b"FROB") + b"\r\n",
    "negative_length": HEAD + b"content-length: -5\r\n\r\n{}",
    "words_for_length": HEAD + b"content-length: five\r\n\r\n{}",
    "two_lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
    "length_and_chunks": HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk_of_no_number": CHUNKED + b"zz\r\n{}\r\n",
    "chunk_too_short": CHUNKED + b"5\r\n{}\r\n0\r\n\r\n",
    "chunk_beyond_memory": CHUNKED + b"f" * 20 + b"\r\n{}",
    "no_end": CHUNKED + b"2\r\n{}\r\n",
    "coding_of_no_kind": HEAD + b"transfer-encoding: frob\r\n\r\n{}",
    "space_in_a_header": HEAD + b"a b: c\r\n\r\n",
    "line_feed_in_a_header": b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: a\nb: c\r\n\r\n",
}


def test_nonsense_on_a_connection_ends_that_connection(client: httpx.Client) -> None:
    for name, raw in RAW.items():
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (name, answer)
        if name == "line_feed_in_a_header":
            assert b"\nb: c" not in answer


@pytest.mark.parametrize("path", ROUTES)
def test_null_is_as_good_as_leaving_a_field_out(client: httpx.Client, path: str) -> None:
    described = client.get("/openapi.json").json()
    kind = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = described["components"]["schemas"][kind.rpartition("/")[2]]
    least = {name: VALID[path][name] for name in [*fields.get("required", ()), *NEEDED.get(path, ())]}
    optional = set(fields["properties"]) - set(least)
    assert client.post(path, json={**least, **dict.fromkeys(optional)}).status_code == 200


def test_good_bodies_in_odd_wrappings(client: httpx.Client) -> None:
    path = "/v1/chat/completions"
    body = json.dumps({"model": "nano", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"):
        assert client.post(path, content=body, headers={"content-type": kind}).status_code == 200
    pieces = (body[at : at + 1] for at in range(len(body)))
    assert client.post(path, content=pieces, headers=JSON).status_code == 200  # a chunk per byte
    refused(client.post(path, content=iter([body, b"x"]), headers=JSON), path)
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "json", ""):
        refused(client.post(path, content=body, headers={"content-type": kind}), path, (415,))
    refused(client.post(path, content=body, headers={**JSON, "content-encoding": "gzip"}), path, (415,))
