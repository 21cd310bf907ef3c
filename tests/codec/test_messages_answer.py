"""Messages out: what Anthropic's own SDK reads in our streams and complete answers."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st
from protocol_answers import BEFORE, CONTEXT, USAGE, Call, Output, anthropic_client, frames, outputs, play

from deepinfer.codec.anthropic import MessagesRequest, MessagesWriter, error_body, to_generation, writer
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolStart
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import Finish
from deepinfer.codec.sealed import SIGNATURE, unseal

ALL = Output("think", "Look:", (Call("get_weather", '{"city": "Rome"}'), Call("get_time", "{}")))
BODY: dict[str, Any] = {"model": "flash", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}


def writer_of(**fields: Any) -> MessagesWriter:
    body = parse(MessagesRequest, BODY | fields)
    return writer(body, to_generation(body), CONTEXT)


def stream(output: Output, cut: int = 3, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return frames(play(writer_of(stream=True, **fields), output.events(cut), output.finish))


def complete(output: Output, **fields: Any) -> dict[str, Any]:
    return json.loads(play(writer_of(**fields), output.events(), output.finish))


def read(sent: bytes, made: MessagesWriter) -> Message:
    """What the SDK makes of a stream."""
    with anthropic_client(sent, made.media_type).messages.stream(**BODY) as events:
        return events.get_final_message()


def test_a_stream_tells_every_block_from_its_beginning_to_its_end() -> None:
    events = stream(ALL, cut=100)
    names = ["message_start"]
    names += ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]  # signature
    names += ["content_block_start", "content_block_delta", "content_block_stop"] * 3
    names += ["message_delta", "message_stop"]
    assert [name for name, _ in events] == names
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2, 3]


@settings(deadline=None, max_examples=40)
@given(outputs(), st.integers(1, 9), st.integers(1, 5))
@example(Output("", "", (Call("get_time", '{"n": 12345678901234567890123, "x": 1e400}'),)), 2, 1)
@example(Output("", "", (Call("get_time", '{"n": "\\ud800"}'),)), 2, 1)
def test_a_stream_and_a_complete_answer_are_the_same_message(output: Output, cut: int, at_once: int) -> None:
    made = writer_of(stream=True)
    sent = play(made, output.events(cut), output.finish, at_once=at_once)
    whole = complete(output)
    Message.model_validate(whole)
    found: list[dict[str, Any]] = []
    for name, data in frames(sent):
        if name == "content_block_start":
            found.append(data["content_block"] | {"partial": ""})
        elif name == "content_block_delta":
            for key in ("text", "thinking", "signature"):
                if key in data["delta"]:
                    found[data["index"]][key] += data["delta"][key]
            found[data["index"]]["partial"] += data["delta"].get("partial_json", "")
    for block in found:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    assert found == whole["content"]
    assert frames(sent)[-2][1]["delta"] == {key: whole[key] for key in ("stop_reason", "stop_sequence")}


def test_the_sdk_reads_a_stream() -> None:
    made = writer_of(stream=True)
    message = read(play(made, ALL.events(), ALL.finish), made)
    thinking, text, first, second = message.content
    assert thinking.type == "thinking" and (thinking.thinking, thinking.signature) == ("think", SIGNATURE)
    assert text.type == "text" and text.text == "Look:"
    assert first.type == second.type == "tool_use"
    assert (first.id, first.name, first.input, second.input) == ("id_0", "get_weather", {"city": "Rome"}, {})
    assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, "flash")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (15, 9)
    assert message.usage.cache_read_input_tokens == 5 and message.usage.cache_creation_input_tokens == 0


def test_the_sdk_reads_a_complete_answer() -> None:
    made = writer_of()
    message = anthropic_client(play(made, ALL.events(), ALL.finish), made.media_type).messages.create(**BODY)
    assert (message.id, message.type, message.role) == ("msg_0a1b", "message", "assistant")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    details = message.usage.output_tokens_details
    assert details is not None and details.thinking_tokens == 4
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (15, 5)  # counted apart


def test_the_prompts_tokens_are_known_when_the_message_starts() -> None:
    message = stream(ALL)[0][1]["message"]
    assert message["usage"]["input_tokens"] == 15 and message["usage"]["output_tokens"] == 0
    assert (message["content"], message["stop_reason"]) == ([], None)


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (Finish("stop"), "end_turn", None),
        (Finish("length"), "max_tokens", None),
        (Finish("stop", "\n\nHuman:"), "stop_sequence", "\n\nHuman:"),
        (Finish("tool_calls"), "tool_use", None),
        (Finish("deadline"), "max_tokens", None),
    ],
)
def test_why_it_stopped_is_told_in_anthropics_words(finish: Finish, reason: str, sequence: str | None) -> None:
    for streams in (False, True):
        made = writer_of(stream=streams)
        sent = play(made, [Content("x")], finish)
        end = frames(sent)[-2][1]["delta"] if streams else json.loads(sent)
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


def test_a_call_that_the_token_limit_cut_has_no_input_to_act_on() -> None:
    cut = Output(calls=(Call("get_weather", '{"path": "/"}'),))
    whole = json.loads(play(writer_of(), cut.events(cut_last=True), Finish("length")))
    assert whole["content"] == [{"type": "tool_use", "id": "id_0", "name": "get_weather", "input": {}}]
    made = writer_of(stream=True)
    message = read(play(made, cut.events(cut_last=True), Finish("length")), made)
    assert message.stop_reason == "max_tokens"


def test_thinking_that_must_not_be_shown_comes_sealed() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    events = stream(ALL, thinking=thinking)
    assert "think" not in json.dumps([data["delta"] for _, data in events if "delta" in data]).replace("thinking", "")
    (signature,) = [data["delta"]["signature"] for _, data in events if data.get("delta", {}).get("signature")]
    assert unseal(signature) == "think"
    block = complete(ALL, thinking=thinking)["content"][0]
    assert (block["thinking"], unseal(block["signature"])) == ("", "think")


def test_an_answer_of_calls_alone_has_no_empty_text() -> None:
    assert [block["type"] for block in complete(Output(calls=ALL.calls))["content"]] == ["tool_use"] * 2
    assert complete(Output())["content"] == []


def test_a_silent_stream_is_kept_open_by_pings() -> None:
    made = writer_of(stream=True)
    sent = made.heartbeat() + made.start(BEFORE) + made.heartbeat() + made.events(0, [Content("x")], {})
    sent += made.heartbeat() + made.finish(0, Finish("stop")) + made.end(USAGE)
    assert [name for name, _ in frames(sent)].count("ping") == 3
    assert read(sent, made).content[0].type == "text"
    assert writer_of().heartbeat() == b""


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (500, "api_error", anthropic.APIStatusError),
        (503, "overloaded_error", anthropic.APIStatusError),
        (429, "rate_limit_error", anthropic.APIStatusError),
    ],
)
def test_an_error_in_a_stream_is_raised_by_the_sdk(status: int, kind: str, raised: type[Exception]) -> None:
    made = writer_of(stream=True)
    sent = made.start(BEFORE) + made.events(0, [Reasoning("t"), ToolStart(0, "u", "f"), ToolArguments(0, "{")], {})
    sent += made.error(RequestError("the engine died", status=status))
    name, data = frames(sent)[-1]
    assert (name, data["error"]) == ("error", {"type": kind, "message": "the engine died"})
    with pytest.raises(raised) as caught:
        read(sent, made)
    assert "the engine died" in str(caught.value)


def test_the_sdk_raises_our_errors_as_its_own() -> None:
    body = json.dumps(error_body(RequestError("max_tokens: is required", param="max_tokens"))).encode()
    with pytest.raises(anthropic.BadRequestError) as caught:
        anthropic_client(body, "application/json", 400).messages.create(**BODY)
    assert "max_tokens: is required" in str(caught.value)


def test_an_error_of_a_complete_answer_is_its_whole_body() -> None:
    made = writer_of()
    made.start(BEFORE)
    error = RequestError("no", status=500)
    assert json.loads(made.error(error)) == error_body(error)


def test_pieces_of_a_call_arrive_while_it_is_written() -> None:
    # spec/codec.md 11, bug 4
    arguments = json.dumps({"text": "x" * 500})
    deltas = [
        data["delta"]["partial_json"]
        for name, data in stream(Output(calls=(Call("write", arguments),)), cut=10)
        if name == "content_block_delta"
    ]
    assert len(deltas) > 40 and "".join(deltas) == arguments


def test_nothing_is_lost_between_pieces_that_come_at_once_and_pieces_that_come_alone() -> None:
    # spec/codec.md 11, bugs 13, 14 and 30
    events: list[Event] = ALL.events(1)
    messages = []
    for at_once in (1, 2, 5, len(events)):
        made = writer_of(stream=True)
        messages.append(read(play(made, events, ALL.finish, at_once=at_once), made).to_dict())
    assert all(message == messages[0] for message in messages)
