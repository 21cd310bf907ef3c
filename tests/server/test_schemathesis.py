"""schemathesis reads /openapi.json and tries what it promises: no 5xx, no status or content type that is not told."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import schemathesis
from faulty_core import FAILS, HANGS, SLOW, trigger_ids
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from servers import ThreadServer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = 15  # 200 of each were tried
MOST_TOKENS = 6
MOST_FIELDS = 3
MESSAGES = [{"role": "user", "content": "x"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "x", "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/tokenize": {"model": "tiny", "messages": MESSAGES},
    "/detokenize": {"model": "tiny", "tokens": [5]},
}
OPERATIONS = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /metrics",
]


def description(server: ThreadServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.base_url}/openapi.json")


def aimed(path: str, body: Any, mode: GenerationMode) -> Any:
    """A body that gets somewhere: it names the model and asks for a few tokens. In positive mode it is one that is
    answered, with some fields of schemathesis' own: all of these at once always contradict each other."""
    if not isinstance(body, dict):
        return body
    if mode == GenerationMode.POSITIVE:
        body = LEAST[path] | dict(list(body.items())[-MOST_FIELDS:])
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > MOST_TOKENS:
            body[name] = MOST_TOKENS
    return body


def harmless(value: Any, triggers: Collection[int]) -> Any:
    """The value without what makes this server's engine fail on command, as a text or as an id: chance finds both."""
    if isinstance(value, str):
        return value.translate(dict.fromkeys(map(ord, (FAILS, HANGS, SLOW)), "x"))
    if isinstance(value, dict):
        return {harmless(key, triggers): harmless(each, triggers) for key, each in value.items()}
    if isinstance(value, list):
        return [harmless(each, triggers) for each in value]
    return 5 if type(value) is int and value in triggers else value


def test_every_operation_of_the_description_is_tried_here(tiny_server: ThreadServer) -> None:
    told = [operation.ok() for operation in description(tiny_server).get_all_operations()]
    assert sorted(operation.label for operation in told) == sorted(OPERATIONS)


CASES = [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
CASES += [(label, GenerationMode.NEGATIVE) for label in OPERATIONS if label.startswith("POST")]


@pytest.mark.parametrize(("label", "mode"), CASES, ids=[f"{label} {mode.value}" for label, mode in CASES])
def test_the_server_keeps_what_its_description_promises(
    tiny_server: ThreadServer, label: str, mode: GenerationMode
) -> None:
    method, path = label.split()
    operation = description(tiny_server)[path][method]
    triggers = trigger_ids(tiny_server.state.model.tokenizer)

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )
    @given(operation.as_strategy(generation_mode=mode))
    def keeps_it(case: schemathesis.Case) -> None:
        case.body = harmless(aimed(path, case.body, mode), triggers)
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)

    keeps_it()
    if path in LEAST:  # what examples are built around is a good request
        # An engine that took this busy process for dead is started again.
        tiny_server.wait(lambda: tiny_server.status("/ready") == 200)
        assert operation.Case(body=LEAST[path]).call(timeout=60).status_code == 200
