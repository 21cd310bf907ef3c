"""What goes wrong, as the official clients raise it: their own classes, and words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from faulty_core import FAILS, SLOW
from servers import ThreadServer, thread_server

from deepinfer.server.keys import KeyRing, add_key
from deepinfer.server.quota import UNLIMITED, KeyLimits

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
ENDLESS: dict[str, Any] = {
    **CHAT,
    "messages": [{"role": "user", "content": SLOW}],
    "max_tokens": 300,
    "extra_body": {"ignore_eos": True},
}
FAILING: dict[str, Any] = {**CHAT, "messages": [{"role": "user", "content": FAILS}]}


class Keyed:
    """A server that asks for keys, with one of a whole tenant's and one of somebody who may do little."""

    def __init__(self, server: ThreadServer, key: str, poor_key: str) -> None:
        self.server, self.key, self.poor_key = server, key, poor_key

    def openai(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.base_url}/v1", api_key=key or self.key, max_retries=0, timeout=60)

    def anthropic(self, key: str | None = None) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.server.base_url, api_key=key or self.key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def keyed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    key, _ = add_key(path, "rich", UNLIMITED)
    poor, _ = add_key(path, "poor", KeyLimits(requests_per_minute=2))
    keys = KeyRing.load(path)
    with thread_server(tiny_checkpoint, keys, max_running=2, max_body_bytes=20_000) as server:
        yield Keyed(server, key, poor)


Both = openai.OpenAI | anthropic.Anthropic


def ask(client: Both, **fields: Any) -> Any:
    if isinstance(client, openai.OpenAI):
        return client.chat.completions.create(**{**CHAT, **fields})
    return client.messages.create(**{**CHAT, **fields})


def raised(client: Both, kind: str, **fields: Any) -> Any:
    """The error, which must be of that class of the client's own package."""
    package: Any = openai if isinstance(client, openai.OpenAI) else anthropic
    with pytest.raises(getattr(package, kind)) as caught:
        ask(client, **fields)
    error = caught.value
    assert type(error) is getattr(package, kind)
    assert error.message and error.request_id == error.response.headers["x-request-id"]
    return error


@pytest.fixture(params=["openai", "anthropic"])
def client(request: pytest.FixtureRequest, keyed: Keyed) -> Iterator[Both]:
    with getattr(keyed, request.param)() as made:
        yield made
    keyed.server.wait(lambda: keyed.server.state.num_open == 0, 10)


def test_a_wrong_field_is_a_bad_request_that_names_it(client: Both) -> None:
    for fields, names in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": 9}}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ):
        error = raised(client, "BadRequestError", **fields)
        assert error.status_code == 400 and error.type == "invalid_request_error"
        assert names == error.param if isinstance(client, openai.OpenAI) else names in error.message


def test_a_model_that_is_not_there_is_not_found(client: Both) -> None:
    error = raised(client, "NotFoundError", model="gpt-4")
    assert "gpt-4" in error.message and "tiny" in error.message
    code = error.code if isinstance(client, openai.OpenAI) else error.error_code
    assert code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error(keyed: Keyed) -> None:
    for key in ("wrong", "di-000000000000-" + "A" * 43, keyed.key + "x"):
        for client in (keyed.openai(key), keyed.anthropic(key)):
            with client:
                assert raised(client, "AuthenticationError").status_code == 401


def test_a_quota_that_is_used_up_is_a_rate_limit_with_a_time_to_wait(keyed: Keyed) -> None:
    with keyed.openai(keyed.poor_key) as first, keyed.anthropic(keyed.poor_key) as second:
        ask(first)
        ask(second)
        for client in (first, second):
            error = raised(client, "RateLimitError")
            assert 1 <= int(error.response.headers["retry-after"]) <= 60


def test_a_body_that_is_too_large_is_refused_by_size(client: Both) -> None:
    kind = "APIStatusError" if isinstance(client, openai.OpenAI) else "RequestTooLargeError"
    assert raised(client, kind, messages=[{"role": "user", "content": "x" * 30_000}]).status_code == 413


def test_a_full_server_says_that_it_is_overloaded(client: Both, keyed: Keyed) -> None:
    held = [ask(client, **ENDLESS, stream=True) for _ in range(2)]
    for stream in held:
        next(iter(stream))
    if isinstance(client, openai.OpenAI):
        error = raised(client, "InternalServerError")
        assert error.status_code == 503 and error.code == "overloaded"
    else:
        error = raised(client, "OverloadedError")
        assert error.status_code == 529 and error.type == "overloaded_error"
    assert int(error.response.headers["retry-after"]) >= 1
    for stream in held:
        stream.close()


def test_an_engine_that_fails_is_an_internal_error_and_the_next_request_is_answered(client: Both) -> None:
    error = raised(client, "InternalServerError", **FAILING)
    assert error.status_code == 500 and "engine" in error.message
    assert ask(client)


def test_a_stream_that_breaks_raises_where_it_breaks(client: Both, keyed: Keyed) -> None:
    stream = ask(client, **ENDLESS, stream=True)
    events = iter(stream)
    next(events)
    with keyed.openai() as other, pytest.raises(openai.InternalServerError):
        ask(other, **FAILING)
    with pytest.raises((openai.APIError, anthropic.APIStatusError), match="engine"):
        list(events)


def test_a_stream_of_a_response_that_breaks_ends_as_failed(keyed: Keyed) -> None:
    with keyed.openai() as client:
        asked = {"model": "tiny", "input": SLOW, "max_output_tokens": 300, "extra_body": {"ignore_eos": True}}
        events = iter(client.responses.create(stream=True, **asked))
        next(events)
        with pytest.raises(openai.InternalServerError):
            ask(client, **FAILING)
        last = list(events)[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert last.response.error.code == "server_error" and "engine" in last.response.error.message


def test_a_response_of_somebody_else_is_not_there(keyed: Keyed) -> None:
    with keyed.openai() as mine, keyed.openai(keyed.poor_key) as others:
        made = mine.responses.create(model="tiny", input="x", max_output_tokens=2)
        assert mine.responses.retrieve(made.id).id == made.id
        for look in (others.responses.retrieve, others.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no response"):
                look(made.id)
        again = mine.responses.create(model="tiny", input="y", previous_response_id=made.id, max_output_tokens=2)
        assert again.previous_response_id == made.id


def test_a_key_for_repetitions_that_belongs_to_another_request_is_said_so(keyed: Keyed) -> None:
    with keyed.openai() as client:
        header = {"extra_headers": {"idempotency-key": "once"}}
        first = ask(client, **header)
        assert ask(client, **header) == first
        with pytest.raises(openai.UnprocessableEntityError, match="another request"):
            ask(client, **header, max_tokens=2)
