"""What the server said, sent back as history, is the very tokens that were drawn: the cache has them all.

The cache finds whole blocks of 128 tokens, and a wrong token anywhere hides its block and all behind it. So the first
prompt is filled up until a block ends right behind the call (or the answer) that the model makes, and the second turn
must get that block out of the cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from asking import QUESTION, REPORTS, TWO_CITIES, chat_tool, messages_tool, responses_tool

BLOCK = 128
LONG = " ".join(["word"] * 160)  # the last 134 tokens of a prompt are computed in any case
LEFT = 4  # tokens of the output that need not be in a whole block


class Turn(NamedTuple):
    prompt: int  # tokens
    cached: int  # of them
    output: int  # tokens
    answer: dict[str, Any]  # the whole body

    @property
    def last_block(self) -> int:
        """Where the last whole block ends that this turn has left in the cache."""
        return (self.prompt + self.output - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def client(nano_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=nano_server, timeout=120) as client:
        yield client


def good(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def chat(client: httpx.Client, system: str, **fields: Any) -> Turn:
    messages = [{"role": "system", "content": system}, *fields.pop("messages")]
    body = {"model": "nano", "temperature": 0, "max_tokens": 300, "messages": messages, **fields}
    answer = good(client.post("/v1/chat/completions", json=body))
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(usage["prompt_tokens"], cached, usage["completion_tokens"], answer)


def messages(client: httpx.Client, system: str, **fields: Any) -> Turn:
    body = {"model": "nano", "temperature": 0, "max_tokens": 300, "system": system, **fields}
    answer = good(client.post("/v1/messages", json=body))
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    return Turn(usage["input_tokens"] + cached, cached, usage["output_tokens"], answer)


def responses(client: httpx.Client, system: str, **fields: Any) -> Turn:
    body = {"model": "nano", "temperature": 0, "max_output_tokens": 300, "instructions": system, **fields}
    answer = good(client.post("/v1/responses", json=body))
    usage = answer["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Turn(usage["input_tokens"], cached, usage["output_tokens"], answer)


def first_turn(ask: Callable[..., Turn], client: httpx.Client, name: str, **fields: Any) -> tuple[str, Turn]:
    """A system text of its own with which a block ends right behind the output, and that turn."""
    words = 0
    for _ in range(10):
        system = f"Be brief, {name}." + " and" * words
        turn = ask(client, system, **fields)
        missing = -(turn.prompt + turn.output - 1) % BLOCK
        if missing == 0 or missing > BLOCK - LEFT:
            assert turn.last_block > turn.prompt, "the output is too short to be seen in the cache"
            return system, turn
        words = (words + missing) % BLOCK  # one more is one more token
    raise AssertionError("no system text fits")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def report(arguments: dict[str, str]) -> str:
    return f"{REPORTS[arguments['city']]} {LONG}"


# -- turns that call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["none", "high"])
def test_calls_of_chat_come_back_as_they_were_drawn(client: httpx.Client, effort: str) -> None:
    asked = {"tools": [chat_tool()], "reasoning_effort": effort}
    system, first = first_turn(chat, client, f"chat {effort}", messages=[user(TWO_CITIES)], **asked)
    message = first.answer["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2 and bool(message.get("reasoning_content")) == (effort == "high")
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": report(json.loads(call["function"]["arguments"]))}
        for call in message["tool_calls"]
    ]
    second = chat(client, system, messages=[user(TWO_CITIES), message, *results], **asked)
    assert second.cached == first.last_block
    message["tool_calls"][0]["function"]["arguments"] = '{"city":"Paris"}'  # the same to a reader, and to the prompt
    message["tool_calls"][1]["function"]["arguments"] = '{"city": "Rom"}'
    changed = chat(client, system, messages=[user(TWO_CITIES), message, *results], **asked)
    assert changed.cached < first.last_block


@pytest.mark.parametrize("effort", ["none", "high"])
def test_calls_of_messages_come_back_as_they_were_drawn(client: httpx.Client, effort: str) -> None:
    thinking = {"type": "disabled"} if effort == "none" else {"type": "enabled", "budget_tokens": 1024}
    asked = {"tools": [messages_tool()], "thinking": thinking}
    system, first = first_turn(messages, client, f"messages {effort}", messages=[user(TWO_CITIES)], **asked)
    content = first.answer["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": report(block["input"])}
        for block in content
        if block["type"] == "tool_use"
    ]
    assert len(results) == 2
    history = [user(TWO_CITIES), {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    second = messages(client, system, messages=history, **asked)
    assert second.cached == first.last_block


@pytest.mark.parametrize(("effort", "by_id"), [("none", True), ("high", True), ("high", False)])
def test_calls_of_responses_come_back_as_they_were_drawn(client: httpx.Client, effort: str, by_id: bool) -> None:
    asked = {"tools": [responses_tool()], "reasoning": {"effort": effort}}
    system, first = first_turn(responses, client, f"responses {effort} {by_id}", input=TWO_CITIES, **asked)
    output = first.answer["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": report(json.loads(item["arguments"]))}
        for item in output
        if item["type"] == "function_call"
    ]
    assert len(results) == 2
    if by_id:
        second = responses(client, system, input=results, previous_response_id=first.answer["id"], **asked)
    else:
        second = responses(client, system, input=[user(TWO_CITIES), *output, *results], **asked)
    assert second.cached == first.last_block


# -- turns that answer -------------------------------------------------------------------------------------------------


def test_an_answer_comes_back_as_it_was_drawn_whoever_asks_next(client: httpx.Client) -> None:
    """Without thinking all protocols render the same prompt, so the second turn may be another protocol's."""
    system, first = first_turn(chat, client, "anybody", messages=[user(QUESTION)], reasoning_effort="none")
    text = first.answer["choices"][0]["message"]["content"]
    history = [user(QUESTION), {"role": "assistant", "content": text}, user(LONG)]
    turns = [
        chat(client, system, messages=history, reasoning_effort="none"),
        messages(client, system, messages=history, thinking={"type": "disabled"}),
        responses(client, system, input=history, reasoning={"effort": "none"}),
    ]
    assert turns[0].cached == first.last_block
    assert len({turn.prompt for turn in turns}) == 1
    assert all(turn.cached >= first.last_block for turn in turns)


def test_a_tool_loop_of_several_rounds_is_computed_once(client: httpx.Client) -> None:
    asked = {"tools": [chat_tool()], "reasoning_effort": "high", "system": "Be brief."}
    history, before = [user(TWO_CITIES)], 0
    for round_ in range(4):
        turn = chat(client, messages=history, **asked)
        assert turn.cached >= before, f"round {round_} computed again what was known"
        message = turn.answer["choices"][0]["message"]
        before = turn.last_block
        calls = message.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"sunny {LONG}"} for call in calls] or [
            user(f"What is the weather in Rome? {LONG}")
        ]
        history += [message, *results]
    assert before > 3 * BLOCK
