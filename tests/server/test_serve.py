"""A server as its clients meet it: what goes in, what comes out, and what is wrong with a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import ThreadServer

from deepinfer import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"model": "nano", "messages": MESSAGES, "temperature": 0, "reasoning_effort": "none", "max_tokens": 60}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def nano(nano_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=nano_server, timeout=120) as client:
        yield client


@pytest.fixture
def tiny(tiny_server: ThreadServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.base_url, timeout=60) as client:
        yield client


def good(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def frames(answer: httpx.Response) -> list[Any]:
    """The JSON of every event of a stream."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# -- answers ----------------------------------------------------------------------------------------------------------


def test_all_protocols_answer_a_question_streamed_and_whole(nano: httpx.Client) -> None:
    question = MESSAGES[0]["content"]
    chat = good(nano.post("/v1/chat/completions", json=CHAT))
    text = chat["choices"][0]["message"]["content"]
    assert "Paris" in text and chat["choices"][0]["finish_reason"] == "stop"
    chunks = frames(nano.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == text

    body = {"model": "nano", "input": question, "temperature": 0, "reasoning": {"effort": "none"}}
    response = good(nano.post("/v1/responses", json=body))
    assert response["output"][0]["content"][0]["text"] == text
    events = frames(nano.post("/v1/responses", json={**body, "stream": True}))
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == text
    response = good(nano.post("/v1/responses", json={"model": "nano", "input": "Hi", "max_output_tokens": 1}))
    assert (response["temperature"], response["top_p"]) == (0.7, 0.95)  # what held: the checkpoint's

    body = {"model": "nano", "messages": MESSAGES, "max_tokens": 60, "temperature": 0, "thinking": {"type": "disabled"}}
    message = good(nano.post("/v1/messages", json=body))
    assert message["content"] == [{"type": "text", "text": text, "citations": None}] or (
        message["content"][0]["text"] == text
    )
    events = frames(nano.post("/v1/messages", json={**body, "stream": True}))
    assert "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta") == text

    body = {"model": "nano", "prompt": "def fibonacci(n):", "max_tokens": 20, "temperature": 0}
    completion = good(nano.post("/v1/completions", json=body))["choices"][0]["text"]
    chunks = frames(nano.post("/v1/completions", json={**body, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == completion != ""


def test_answers_are_those_of_the_offline_engine(nano: httpx.Client) -> None:
    llm = LLM("nano", verbose=False, max_num_seqs=2)
    for body in (CHAT, {**CHAT, "reasoning_effort": "high"}, {**CHAT, "temperature": 0.8, "seed": 5}):
        ids = good(nano.post("/tokenize", json={key: body[key] for key in ("messages", "reasoning_effort")}))["tokens"]
        sampling = {"temperature": body["temperature"], "top_p": 0.95, "seq_seed": body.get("seed")}
        (output,) = llm.generate(
            prompt_token_ids=ids, sampling_params=SamplingParams(max_tokens=60, **sampling), use_tqdm=False
        )
        answer = good(nano.post("/v1/chat/completions", json=body))
        message = answer["choices"][0]["message"]
        assert (message.get("reasoning_content") or "") + message["content"] == output.outputs[0].text.replace(
            "</think>", ""
        )
        assert answer["usage"]["completion_tokens"] == len(output.outputs[0].token_id)


def test_several_answers_differ_and_a_seed_repeats_them(nano: httpx.Client) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 1.0, "n": 3}
    body |= {"seed": 11, "max_tokens": 24}
    first, second = (good(nano.post("/v1/chat/completions", json=body)) for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    chunks = frames(nano.post("/v1/chat/completions", json={**body, "stream": True}))
    for index, text in enumerate(texts):
        mine = [c["choices"][0]["delta"] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert "".join(delta.get("content") or "" for delta in mine) == text


def test_several_prompts_answer_under_their_own_indices(nano: httpx.Client) -> None:
    body = {"model": "nano", "prompt": ["def fibonacci(n):", "The old lighthouse"], "n": 2, "max_tokens": 8}
    body |= {"temperature": 0}
    alone = [
        good(nano.post("/v1/completions", json={**body, "prompt": prompt}))["choices"][0]["text"]
        for prompt in body["prompt"]
    ]
    answer = good(nano.post("/v1/completions", json=body))
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer["usage"]["completion_tokens"] == 32
    chunks = [c["choices"][0] for c in frames(nano.post("/v1/completions", json={**body, "stream": True}))]
    for index, text in enumerate([alone[0], alone[0], alone[1], alone[1]]):
        assert "".join(choice["text"] for choice in chunks if choice["index"] == index) == text


def test_a_stop_string_ends_the_answer_and_counts_what_came_before_it(nano: httpx.Client) -> None:
    whole = good(nano.post("/v1/chat/completions", json=CHAT))
    text = whole["choices"][0]["message"]["content"]
    body = {**CHAT, "stop": ["France is"]}
    answers = [good(nano.post("/v1/chat/completions", json=body)) for _ in range(3)]
    for answer in answers:
        assert answer["choices"][0]["message"]["content"] == text.partition("France is")[0]
        assert answer["choices"][0]["finish_reason"] == "stop"
    (used,) = {answer["usage"]["completion_tokens"] for answer in answers}  # drafts behind the stop are not billed
    assert 3 <= used < whole["usage"]["completion_tokens"]
    body = {"model": "nano", "messages": MESSAGES, "max_tokens": 60, "temperature": 0, "thinking": {"type": "disabled"}}
    message = good(nano.post("/v1/messages", json={**body, "stop_sequences": ["France is"]}))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "France is")


def test_log_probabilities_belong_to_the_content_and_its_tokens(nano: httpx.Client) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "high"}
    whole = good(nano.post("/v1/chat/completions", json=body))["choices"][0]
    entries = whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == whole["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    chunks = frames(nano.post("/v1/chat/completions", json={**body, "stream": True}))
    streamed = [c["choices"][0].get("logprobs") for c in chunks]
    assert [entry for part in streamed if part for entry in part["content"]] == entries


def test_tools_are_called_when_asked_for_with_valid_arguments_also_behind_thinking(nano: httpx.Client) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "Weather in Paris?"}], "tools": [TOOL], "max_tokens": 300}
    for effort in ("none", "low"):
        asked = {**body, "tool_choice": "required", "reasoning_effort": effort}
        choice = good(nano.post("/v1/chat/completions", json=asked))["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        for call in choice["message"]["tool_calls"]:
            assert call["function"]["name"] == "get_weather" and call["id"].startswith("call_")
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        chunks = frames(nano.post("/v1/chat/completions", json={**asked, "stream": True}))
        calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
        pieces = "".join(call["function"].get("arguments", "") for call in calls if call["index"] == 0)
        assert json.loads(pieces) == json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    quiet = good(nano.post("/v1/chat/completions", json={**body, "tool_choice": "none"}))["choices"][0]
    assert "tool_calls" not in quiet["message"] and "DSML" not in quiet["message"]["content"]


def test_content_of_a_schema_is_valid_also_behind_thinking(nano: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    body = {**CHAT, "reasoning_effort": "low", "max_tokens": 400}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}}
    choice = good(nano.post("/v1/chat/completions", json=body))["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert set(value) == {"name", "age"} and isinstance(value["age"], int)
    assert choice["finish_reason"] == "stop"


def test_a_response_goes_on_from_an_earlier_one_until_that_is_deleted(nano: httpx.Client) -> None:
    body = {"model": "nano", "input": "My name is Ada.", "temperature": 0, "reasoning": {"effort": "none"}}
    first = good(nano.post("/v1/responses", json={**body, "max_output_tokens": 30}))
    again = {**body, "input": "Who am I?", "previous_response_id": first["id"], "max_output_tokens": 30}
    second = good(nano.post("/v1/responses", json=again))
    alone = good(nano.post("/v1/responses", json={**body, "input": "Who am I?", "max_output_tokens": 30}))
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > alone["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    streamed = frames(nano.post("/v1/responses", json={**again, "stream": True}))
    kept = good(nano.get(f"/v1/responses/{streamed[-1]['response']['id']}"))
    assert kept == streamed[-1]["response"]
    refused = nano.get(f"/v1/responses/{kept['id']}", params={"stream": "true"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"
    assert good(nano.delete(f"/v1/responses/{first['id']}"))["deleted"] is True
    for answer in (
        nano.post("/v1/responses", json=again),
        nano.get(f"/v1/responses/{first['id']}"),
        nano.delete(f"/v1/responses/{first['id']}"),
        nano.get(f"/v1/responses/{good(nano.post('/v1/responses', json={**body, 'store': False}))['id']}"),
    ):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_the_tokenizer_counts_as_the_model_reads(nano: httpx.Client) -> None:
    chat = good(nano.post("/v1/chat/completions", json=CHAT))
    ids = good(nano.post("/tokenize", json={"messages": MESSAGES, "reasoning_effort": "none"}))
    assert ids["count"] == len(ids["tokens"]) == chat["usage"]["prompt_tokens"]
    count = {"model": "nano", "messages": MESSAGES, "thinking": {"type": "disabled"}}
    assert good(nano.post("/v1/messages/count_tokens", json=count)) == {"input_tokens": ids["count"]}
    text = "Zürich 日本 <｜User｜></think>｜DSML｜ \n\t."
    tokens = good(nano.post("/tokenize", json={"prompt": text, "add_special_tokens": False}))["tokens"]
    assert good(nano.post("/detokenize", json={"tokens": tokens})) == {"prompt": text}
    controls = good(nano.post("/tokenize", json={"messages": MESSAGES, "reasoning_effort": "none"}))["tokens"]
    hostile = [{"role": "user", "content": MESSAGES[0]["content"] + text}]
    more = good(nano.post("/tokenize", json={"messages": hostile, "reasoning_effort": "none"}))["tokens"]
    assert [i for i in more if i < 16 or i >= 8160] == [i for i in controls if i < 16 or i >= 8160]


def test_models_are_listed_for_both_kinds_of_clients(nano: httpx.Client) -> None:
    openai = good(nano.get("/v1/models"))
    assert [entry["id"] for entry in openai["data"]] == ["nano"] and openai["data"][0]["max_model_len"] == 4096
    assert good(nano.get("/v1/models/nano")) == openai["data"][0]
    anthropic = good(nano.get("/v1/models", headers={"anthropic-version": "2023-06-01"}))
    assert anthropic["data"][0]["id"] == "nano" and anthropic["data"][0]["type"] == "model"
    assert nano.get("/v1/models/gpt").status_code == 404


def test_the_description_names_every_route_and_its_body(nano: httpx.Client) -> None:
    described = good(nano.get("/openapi.json"))
    for path in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens"):
        body = described["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].rsplit("/", 1)[1]
        assert "model" in described["components"]["schemas"][name]["properties"]
    assert {"/v1/models", "/tokenize", "/detokenize", "/health", "/ready", "/metrics"} <= set(described["paths"])
    assert set(described["paths"]["/v1/responses/{response_id}"]) == {"get", "delete"}


# -- what is wrong with a request -------------------------------------------------------------------------------------


def refused(answer: httpx.Response, status: int, path: str) -> dict[str, Any]:
    """The error, checked for its protocol's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert answer.headers["x-request-id"]
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert {"type", "message"} <= set(body["error"]) <= {"type", "message", "details"}
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]  # type: ignore[no-any-return]


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}, 400, "model"),
    ("/v1/chat/completions", {"model": "tiny"}, 400, "messages"),
    ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"model": "gpt-4", "messages": MESSAGES}, 404, "model"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "temperature": "0"}, 400, "temperature"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "temperature": 3}, 400, "temperature"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "n": 99}, 400, "n"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 5000}, 400, "max_tokens"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "logit_bias": {"5000": 1}}, 400, "logit_bias"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "min_tokens": 9, "max_tokens": 3}, 400, "min_tok"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "allowed_token_ids": [600]}, 400, "allowed_token"),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "guided_regex": "("}, 400, "guided_regex"),
    ("/v1/completions", {"model": "tiny", "prompt": [600]}, 400, "prompt"),
    ("/v1/completions", {"model": "tiny", "prompt": []}, 400, "prompt"),
    ("/v1/completions", {"model": "tiny", "prompt": "a " * 600}, 400, "tokens"),
    ("/v1/responses", {"model": "tiny", "input": "x", "background": True}, 400, "background"),
    ("/v1/responses", {"model": "tiny", "input": "x", "previous_response_id": "resp_x"}, 404, "resp_x"),
    ("/v1/messages", {"model": "tiny", "messages": MESSAGES}, 400, "max_tokens"),
    ("/v1/messages", {"model": "claude", "messages": MESSAGES, "max_tokens": 5}, 404, "model"),
    ("/v1/messages/count_tokens", {"model": "tiny"}, 400, "messages"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [600]}, 400, "tokens.0"),
]


@pytest.mark.parametrize(("path", "body", "status", "names"), WRONG, ids=[f"{w[0]}-{w[3]}" for w in WRONG])
def test_a_refusal_names_the_field_in_the_protocols_own_shape(
    tiny: httpx.Client, path: str, body: dict[str, Any], status: int, names: str
) -> None:
    error = refused(tiny.post(path, json=body), status, path)
    assert names in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
def test_a_body_that_is_no_json_is_refused_whatever_it_is(tiny: httpx.Client, path: str) -> None:
    headers = {"content-type": "application/json"}
    for content in (
        b"",
        b"{",
        b"nonsense",
        b'{"model": "\xff"}',
        b"[1, 2]",
        b"null",
        b"1e999999",
        b'"text"',
        b"\xef\xbb\xbf{}",
    ):
        refused(tiny.post(path, content=content, headers=headers), 400, path)
    refused(tiny.post(path, content=b"[" * 5000, headers=headers), 400, path)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused(tiny.post(path, content=b"{}", headers={"content-type": kind}), 415, path)
    refused(tiny.post(path, content=b" " * (9 << 20), headers=headers), 413, path)
    refused(tiny.get(path), 405, path)


def test_what_is_not_there_is_not_found(tiny: httpx.Client) -> None:
    for path in ("/v2/chat", "/v1/messages/batches", "/v1/chat/completions/", "/.env"):
        refused(tiny.get(path), 404, path)


def test_budgets_beyond_the_context_are_lowered_where_the_protocol_says_so_and_by_default(tiny: httpx.Client) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100_000, "thinking": {"type": "disabled"}}
    message = good(tiny.post("/v1/messages", json=body))
    used = message["usage"]["input_tokens"] + message["usage"]["output_tokens"]
    assert message["stop_reason"] in ("max_tokens", "end_turn", "stop_sequence") and used <= 512
    chat = good(tiny.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES, "ignore_eos": True}))
    assert chat["usage"]["total_tokens"] == 512 and chat["choices"][0]["finish_reason"] == "length"


def test_fields_without_effect_are_named(tiny: httpx.Client, tiny_server: ThreadServer) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "user": "u1", "frobnicate": 3}
    answer = tiny.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    assert set(answer.headers["x-ignored-fields"].split(",")) == {"user", "frobnicate"}
    assert answer.headers["x-request-id"] == "mine-1"
    tiny_server.wait(lambda: any(b'"mine-1"' in line for line in tiny_server.lines), 5)
    line = json.loads(next(line for line in tiny_server.lines if b'"mine-1"' in line))
    assert line["status"] == 200 and line["completion_tokens"] == 2 and set(line["ignored"]) == {"user", "frobnicate"}
    assert "capital" not in json.dumps(line)  # no text of prompts


def test_whoever_ignores_the_end_gets_all_tokens(tiny: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    for stream in (False, True):
        answer = tiny.post(
            "/v1/completions",
            json={**body, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})},
        )
        usage = frames(answer)[-1]["usage"] if stream else good(answer)["usage"]
        assert usage["completion_tokens"] == 200
