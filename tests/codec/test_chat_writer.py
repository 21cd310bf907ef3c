"""Answers of Chat Completions, read by the official SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import openai_sdk
import pytest
from chat_bodies import TOOL
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.chat.request import ChatRequest, to_generation
from deepinfer.codec.chat.writer import make_call_id, writer
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart, merged
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import Finish, TokenLogprob, Usage, WriterContext

BYTES = {1: b"U", 2: b"BS", 3: "é".encode(), 4: b"\xe2\x82", 5: b"\xac", 6: b'"\n'}
CONTEXT = WriterContext(
    id="abc", created=1_700_000_000, model="flash", token_bytes=lambda i: BYTES.get(i, b"?"), fingerprint="fp_1"
)
LOGPROBS = {place: TokenLogprob(place % 6 + 1, -0.5 - place, {1: -0.25, 2: -1.5, 4: -9.0}) for place in range(60)}
CALL: list[Event] = [
    ToolStart(0, "call_1", "get_weather"),
    ToolArguments(0, '{"city": '),
    ToolArguments(0, '"Paris"}'),
    ToolEnd(0, '{"city": "Paris"}', True),
]
USAGE = Usage(10, 4, 7, 2)
Outputs = Sequence[tuple[int, Sequence[Event]]]  # completion, its next events


def answered(outputs: Outputs, reasons: Sequence[str] = ("stop",), usage: Usage = USAGE, **fields: Any) -> bytes:
    """The whole body of an answer."""
    body = parse(ChatRequest, {"model": "flash", "messages": [{"role": "user", "content": "x"}]} | fields)
    generation = to_generation(body)
    out = writer(body, generation, CONTEXT)
    entries = LOGPROBS if generation.top_logprobs is not None else {}
    pieces = [out.start(usage._replace(completion_tokens=0, reasoning_tokens=0))]
    pieces += [out.events(index, events, entries) for index, events in outputs]
    pieces += [out.finish(index, Finish(reason)) for index, reason in enumerate(reasons)]
    pieces.append(out.end(usage))
    if not body.stream:
        assert not any(pieces[:-1])
    return b"".join(pieces)


def frames(stream: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    parts = stream.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def deltas(stream: bytes, index: int = 0) -> list[dict[str, Any]]:
    chunks = [choice for chunk in frames(stream) for choice in chunk["choices"]]
    return [choice["delta"] for choice in chunks if choice["index"] == index]


def sdk_answer(outputs: Outputs, reasons: Sequence[str] = ("stop",), **fields: Any) -> Any:
    client = openai_sdk.client(answered(outputs, reasons, **fields), "application/json")
    return client.chat.completions.create(model="m", messages=[])


def sdk_stream(stream: bytes, cut: int = 0) -> list[Any]:
    client = openai_sdk.client(stream, "text/event-stream; charset=utf-8", cut=cut)
    return list(client.chat.completions.create(model="m", messages=[], stream=True))


def test_first_token_is_never_lost_and_no_delta_is_all_null() -> None:
    stream = answered([(0, [Content("U", (0,))]), (0, [Content("BS", (1,))])], stream=True, tools=[TOOL])
    told = deltas(stream)
    assert "".join(delta.get("content") or "" for delta in told) == "UBS"
    assert told[0] == {"role": "assistant", "content": None, "reasoning_content": ""}
    assert all(any(value is not None for value in delta.values()) for delta in told[:-1])
    assert told[-1] == {}


def test_every_chunk_has_the_same_id_model_and_fingerprint() -> None:
    for chunk in sdk_stream(answered([(0, [Content("U", (0,))])], stream=True)):
        assert (chunk.id, chunk.model, chunk.object) == ("chatcmpl-abc", "flash", "chat.completion.chunk")
        assert (chunk.created, chunk.system_fingerprint) == (1_700_000_000, "fp_1")


def test_usage_comes_in_its_own_chunk_and_only_when_asked_for() -> None:
    plain = frames(answered([(0, [Content("U", (0,))])], stream=True))
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    asked = frames(answered([(0, [Content("U", (0,))])], stream=True, stream_options={"include_usage": True}))
    assert [chunk["choices"] == [] for chunk in asked] == [False] * (len(asked) - 1) + [True]
    assert all(chunk["usage"] is None for chunk in asked[:-1])
    assert asked[-1]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
        "prompt_cache_hit_tokens": 4,
        "prompt_cache_miss_tokens": 6,
    }


def test_continuous_usage_counts_up_to_the_whole() -> None:
    outputs: Outputs = [(0, [Reasoning("a", (0, 1))]), (0, [Content("b", (3,))]), (0, [Content("c", (4, 5))])]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = frames(answered(outputs, stream=True, stream_options=options, include_reasoning=False))
    told = [(chunk["usage"]["completion_tokens"], chunk["usage"]["prompt_tokens"]) for chunk in chunks]
    assert told == [(0, 10), (3, 10), (5, 10), (5, 10), (7, 10)]
    assert chunks[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_an_answer_of_calls_alone_has_no_content() -> None:
    message = sdk_answer([(0, CALL)], ["tool_calls"], tools=[TOOL]).choices[0].message
    assert message.content is None
    call = message.tool_calls[0]
    assert (call.id, call.type, call.function.name) == ("call_1", "function", "get_weather")
    assert call.function.arguments == '{"city": "Paris"}'
    assert sdk_answer([(0, [])]).choices[0].message.content == ""


def test_parallel_calls_stream_with_their_numbers() -> None:
    second: list[Event] = [ToolStart(1, "call_2", "get_time"), ToolArguments(1, "{}"), ToolEnd(1, "{}", True)]
    stream = answered([(0, CALL), (0, second)], ["tool_calls"], stream=True, tools=[TOOL])
    calls: dict[int, list[Any]] = {}
    for chunk in sdk_stream(stream):
        for call in chunk.choices[0].delta.tool_calls or ():
            calls.setdefault(call.index, []).append(call)
    assert [(c[0].id, c[0].type, c[0].function.name) for c in calls.values()] == [
        ("call_1", "function", "get_weather"),
        ("call_2", "function", "get_time"),
    ]
    assert all(call.id is None and call.function.name is None for c in calls.values() for call in c[1:])
    assert ["".join(call.function.arguments for call in c) for c in calls.values()] == ['{"city": "Paris"}', "{}"]


def test_a_call_that_was_cut_off_keeps_what_it_had() -> None:
    cut: list[Event] = [ToolStart(0, "call_1", "f"), ToolArguments(0, '{"a'), ToolEnd(0, '{"a', False)]
    choice = sdk_answer([(0, cut)], ["length"]).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.arguments == '{"a'


def test_reasoning_is_hidden_when_the_client_wants_none_of_it() -> None:
    outputs: Outputs = [(0, [Reasoning("secret", (0,)), Content("U", (1,))])]
    assert b"secret" not in answered(outputs, include_reasoning=False)
    stream = answered(outputs, include_reasoning=False, stream=True)
    assert b"secret" not in stream and b"reasoning_content" not in stream
    assert sdk_answer(outputs).choices[0].message.reasoning_content == "secret"


def test_logprobs_belong_to_content_alone() -> None:
    outputs: Outputs = [(0, [Reasoning("t", (0,))]), (0, [Content('U"\n€', (1, 5, 3, 4))]), (0, CALL)]
    for fields in ({"stream": True}, {}):
        raw = answered(outputs, ["tool_calls"], logprobs=True, top_logprobs=2, tools=[TOOL], **fields)
        if fields:
            told = [chunk.choices[0].logprobs for chunk in sdk_stream(raw)]
            entries = [entry for logprobs in told if logprobs for entry in logprobs.content]
        else:
            answer = openai_sdk.client(raw, "application/json").chat.completions.create(model="m", messages=[])
            entries = answer.choices[0].logprobs.content
        assert [entry.token for entry in entries] == ["BS", '"\n', "\\xe2\\x82", "\\xac"]
        assert [bytes(entry.bytes) for entry in entries] == [b"BS", b'"\n', b"\xe2\x82", b"\xac"]
        assert [entry.logprob for entry in entries] == [-1.5, -5.5, -3.5, -4.5]
        assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [("U", -0.25), ("BS", -1.5)]


def test_logprobs_that_json_cannot_hold_are_written_all_the_same() -> None:
    body = parse(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True})
    out = writer(body, to_generation(body), CONTEXT)
    out.events(0, [Content("ab", (0, 1))], {0: TokenLogprob(1, float("-inf")), 1: TokenLogprob(2, float("nan"))})
    out.finish(0, Finish("stop"))
    content = json.loads(out.end(Usage(1, 0)))["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-9999.0, -9999.0]


def test_answers_without_logprobs_say_null() -> None:
    assert sdk_answer([(0, [Content("U", (0,))])]).choices[0].logprobs is None
    assert sdk_answer([(0, CALL)], ["tool_calls"], logprobs=True).choices[0].logprobs.content == []


@pytest.mark.parametrize(
    ("reason", "told"),
    [("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls"), ("deadline", "length"), ("abort", "length")],
)
def test_what_was_cut_off_never_claims_to_be_whole(reason: str, told: str) -> None:
    assert sdk_answer([(0, [])], [reason]).choices[0].finish_reason == told
    assert sdk_stream(answered([(0, [])], [reason], stream=True))[-1].choices[0].finish_reason == told


def test_several_answers_keep_their_places() -> None:
    outputs: Outputs = [(1, [Content("one", (0,))]), (0, [Content("zero", (0,))]), (2, CALL), (1, [Content("!", (1,))])]
    reasons = ["stop", "length", "tool_calls"]
    answer = sdk_answer(outputs, reasons, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["zero", "one!", None]
    assert [choice.finish_reason for choice in answer.choices] == reasons
    stream = answered(outputs, reasons, n=3, stream=True)
    assert ["".join(d.get("content") or "" for d in deltas(stream, i)) for i in range(3)] == ["zero", "one!", ""]
    assert [deltas(stream, i)[0]["role"] for i in range(3)] == ["assistant"] * 3


def test_clients_of_before_tools_get_a_function_call() -> None:
    function = {"functions": [TOOL["function"]]}
    choice = sdk_answer([(0, CALL)], ["tool_calls"], **function).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == (
        "get_weather",
        '{"city": "Paris"}',
    )
    told = [d["function_call"] for d in deltas(answered([(0, CALL)], ["tool_calls"], stream=True, **function))[1:-1]]
    assert told[0]["name"] == "get_weather"
    assert "".join(call["arguments"] for call in told) == '{"city": "Paris"}'


def test_an_error_in_a_stream_reaches_the_client_as_one() -> None:
    body = parse(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True})
    out = writer(body, to_generation(body), CONTEXT)
    stream = out.start(Usage(1, 0)) + out.events(0, [Content("U", (0,))], {}) + out.heartbeat()
    stream += out.error(RequestError("the engine died \ud800", status=500, kind="server_error", code="engine_died"))
    assert b"[DONE]" not in stream
    client = openai_sdk.client(stream, out.media_type)
    told = []
    with pytest.raises(openai.APIError, match="the engine died"):
        for chunk in client.chat.completions.create(model="m", messages=[], stream=True):
            told.append(chunk.choices[0].delta.content)
    assert told == [None, "U"]


def test_a_complete_answer_has_no_heartbeat_and_can_be_an_error() -> None:
    body = parse(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]})
    out = writer(body, to_generation(body), CONTEXT)
    assert out.heartbeat() == b"" and out.media_type == "application/json"
    assert json.loads(out.error(RequestError("no", param="n"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
    }


def test_call_ids_are_never_the_same() -> None:
    ids = {make_call_id() for _ in range(1000)}
    assert len(ids) == 1000 and all(one.startswith("call_") for one in ids)


TEXTS = st.text(min_size=1, max_size=6) | st.sampled_from(
    ["<", "\u2028", "\n\n", "data: [DONE]", "\x00", '"}', "😀", "�"]
)


@st.composite
def outputs_of(draw: st.DrawFn) -> tuple[Outputs, list[str]]:
    """What one or several completions say, in bursts, interleaved."""
    count = draw(st.integers(1, 3))
    streams: list[list[Event]] = []
    for _ in range(count):
        place = 0
        events: list[Event] = []
        for kind in [Reasoning] * draw(st.integers(0, 3)) + [Content] * draw(st.integers(0, 3)):
            size = draw(st.integers(0, 2))
            events.append(kind(draw(TEXTS), tuple(range(place, place + size))))
            place += size
        for call in range(draw(st.integers(0, 2))):
            arguments = json.dumps({"k": draw(TEXTS)}, ensure_ascii=draw(st.booleans()))
            cut = draw(st.integers(0, len(arguments)))
            events += [ToolStart(call, f"call_{call}", "get_weather"), ToolArguments(call, arguments[:cut])]
            events += [ToolArguments(call, arguments[cut:]), ToolEnd(call, arguments, True)]
        streams.append(events)
    bursts: list[tuple[int, Sequence[Event]]] = []
    while any(streams):
        index = draw(st.sampled_from([i for i, events in enumerate(streams) if events]))
        size = draw(st.integers(1, 4))
        bursts.append((index, streams[index][:size]))
        streams[index] = streams[index][size:]
    return bursts, [draw(st.sampled_from(["stop", "length", "tool_calls"])) for _ in range(count)]


def _collected(stream: bytes, cut: int, count: int) -> list[dict[str, Any]]:
    """The choices of a stream, put together as a client does."""
    choices: list[dict[str, Any]] = [{"text": "", "reasoning": "", "calls": {}, "logprobs": []} for _ in range(count)]
    for chunk in sdk_stream(stream, cut):
        for choice in chunk.choices:
            mine, delta = choices[choice.index], choice.delta
            mine["text"] += delta.content or ""
            mine["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                known = mine["calls"].setdefault(call.index, [call.id, call.function.name, ""])
                known[2] += call.function.arguments
            mine["logprobs"] += choice.logprobs.content if choice.logprobs else []
            mine["reason"] = choice.finish_reason
    return choices


@settings(max_examples=60, deadline=None)
@given(said=outputs_of(), cut=st.integers(0, 40), logprobs=st.booleans())
def test_a_stream_put_together_is_the_complete_answer(
    said: tuple[Outputs, list[str]], cut: int, logprobs: bool
) -> None:
    outputs, reasons = said
    fields: dict[str, Any] = {"n": len(reasons), "tools": [TOOL], "logprobs": logprobs}
    stream = answered(outputs, reasons, stream=True, **fields)
    whole = sdk_answer(outputs, reasons, **fields)
    for mine, choice in zip(_collected(stream, cut, len(reasons)), whole.choices, strict=True):
        message = choice.message
        assert mine["text"] == (message.content or "")
        assert mine["reasoning"] == message.reasoning_content
        calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or ()]
        assert list(mine["calls"].values()) == calls
        assert mine["reason"] == choice.finish_reason
        assert mine["logprobs"] == (choice.logprobs.content if logprobs else [])


@settings(max_examples=60, deadline=None)
@given(said=outputs_of())
def test_an_answer_sent_back_as_history_is_the_turn_that_was_generated(said: tuple[Outputs, list[str]]) -> None:
    outputs, reasons = said
    answer = json.loads(answered(outputs, reasons, n=len(reasons), tools=[TOOL]))
    for index, choice in enumerate(answer["choices"]):
        calls = choice["message"].get("tool_calls", ())
        messages = [{"role": "user", "content": "x"}, choice["message"]]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
        body = parse(ChatRequest, {"model": "m", "messages": messages, "tools": [TOOL]})
        conversation = to_generation(body).conversation
        assert conversation is not None
        turn = conversation.turns[1]
        events = [event for i, burst in outputs if i == index for event in burst]
        assert turn.text == "".join(event.text for event in events if isinstance(event, Content))
        assert turn.reasoning == "".join(event.text for event in events if isinstance(event, Reasoning))
        ends = [event.arguments for event in events if isinstance(event, ToolEnd)]
        assert [call.arguments for call in turn.tool_calls] == ends


def test_merging_joins_only_what_continues() -> None:
    events: list[Event] = [
        Reasoning("a", (0,)), Reasoning("b", (1,)), Content("c", (3,)), Content("d"), ToolStart(0, "i", "f"),
        ToolArguments(0, "x"), ToolArguments(0, "y"), ToolArguments(1, "z"), ToolEnd(1, "z", False), Content("e"),
    ]  # fmt: skip
    assert merged(events) == [
        Reasoning("ab", (0, 1)), Content("cd", (3,)), ToolStart(0, "i", "f"), ToolArguments(0, "xy"),
        ToolArguments(1, "z"), ToolEnd(1, "z", False), Content("e"),
    ]  # fmt: skip
    assert merged([]) == []
