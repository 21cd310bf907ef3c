"""Responses out: what OpenAI's own SDK reads in our streams and complete answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from protocol_answers import BEFORE, CONTEXT, USAGE, Call, Output, frames, openai_client, outputs, pieces, play

from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import Finish, TokenLogprob
from deepinfer.codec.responses import ResponsesRequest, ResponsesWriter, error_body, output_items, to_generation, writer
from deepinfer.codec.responses.string_value import StringValue
from deepinfer.codec.sealed import unseal
from deepinfer.codec.sse import COMMENT

WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
TIME = {"type": "function", "name": "get_time"}
TOOLS: list[dict[str, Any]] = [
    WEATHER,
    {"type": "namespace", "name": "crm", "description": "Customers", "tools": [TIME]},
    {"type": "custom", "name": "apply_patch"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]
NAMES = ("get_weather", "crm::get_time", "apply_patch", "tool_search")
ALL = Output("think", "Look:", (Call("get_weather", '{"city": "Rome"}'), Call("crm::get_time", "{}")))


def writer_of(**fields: Any) -> ResponsesWriter:
    body = parse(ResponsesRequest, {"model": "flash", "input": "Hi", "tools": TOOLS} | fields)
    return writer(body, to_generation(body), CONTEXT)


def stream(output: Output, cut: int = 3, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return frames(play(writer_of(stream=True, **fields), output.events(cut), output.finish))


def complete(output: Output, **fields: Any) -> dict[str, Any]:
    return json.loads(play(writer_of(**fields), output.events(), output.finish))


def untimed(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "completed_at"}


def test_a_stream_tells_every_item_from_its_beginning_to_its_end() -> None:
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    expected = ["created", "in_progress"]
    expected += [name.format("reasoning_text") for name in text]
    expected += [name.format("output_text") for name in text]
    expected += [name.format("function_call_arguments") for name in call] * 2
    expected += ["completed"]
    assert [name.removeprefix("response.") for name, _ in stream(ALL, cut=100)] == expected


def test_events_are_numbered_from_zero_and_belong_to_their_items() -> None:
    events = stream(ALL)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    ids = [data["item"]["id"] for name, data in events if name == "response.output_item.added"]
    assert ids == ["rs_0a1b_0", "msg_0a1b_1", "fc_0a1b_2", "fc_0a1b_3"]
    assert all(data["item_id"] == ids[data["output_index"]] for _, data in events if "item_id" in data)
    whole = events[-1][1]["response"]["output"]
    assert [data["item"] for name, data in events if name == "response.output_item.done"] == whole


@settings(deadline=None, max_examples=40)
@given(outputs(NAMES), st.integers(1, 9), st.integers(1, 5))
@example(Output("a", "b", (Call("apply_patch", '{"input": "*** \\"x\\"\\n\\u00e9\\ud83d\\ude42"}'),)), 1, 1)
@example(Output("", "", (Call("apply_patch", '{"other": 1, "input": "late"}'),)), 2, 1)
@example(Output("", "", (Call("tool_search", '{"n": 12345678901234567890123}'),)), 2, 3)
@example(Output("", "", (Call("tool_search", '{"n": "\\ud800"}'), Call("apply_patch", '{"input": "\\ud800"}'))), 2, 3)
def test_a_stream_and_a_complete_answer_are_the_same_response(output: Output, cut: int, at_once: int) -> None:
    made = writer_of(stream=True)
    sent = play(made, output.events(cut), output.finish, at_once=at_once)
    client = openai_client(sent, made.media_type)
    deltas: dict[int, str] = {}
    with client.responses.stream(model="flash", input="Hi") as events:
        for event in events:
            if event.type.endswith(".delta"):
                deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta  # type: ignore[union-attr, operator]
        response = events.get_final_response()
    whole = complete(output)
    Response.model_validate(whole)
    assert made.answer is not None and untimed(made.answer) == untimed(whole)
    assert [item.type for item in response.output] == [item["type"] for item in whole["output"]]
    for place, item in enumerate(whole["output"]):
        parts = item.get("content") or [{"text": item.get("arguments", item.get("input"))}]
        if item["type"] != "tool_search_call":  # its arguments come whole
            assert deltas.get(place, "") == parts[0]["text"]


def test_the_sdk_reads_a_complete_answer() -> None:
    made = writer_of(instructions="Be terse.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=99, user="me")
    body = play(made, ALL.events(), ALL.finish)
    response = openai_client(body, made.media_type).responses.create(model="flash", input="Hi")
    Response.model_validate(json.loads(body))
    assert (response.id, response.status, response.model, response.object) == (
        "resp_0a1b",
        "completed",
        "flash",
        "response",
    )
    reasoning, message, first, second = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and reasoning.content[0].text == "think"
    assert message.type == "message" and response.output_text == "Look:"
    assert first.type == second.type == "function_call"
    assert (first.call_id, first.name, first.arguments) == ("id_0", "get_weather", '{"city": "Rome"}')
    assert (second.call_id, second.name, second.namespace) == ("id_1", "get_time", "crm")
    usage = response.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 9, 29)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (5, 4)
    assert (response.instructions, response.metadata, response.temperature) == ("Be terse.", {"a": "b"}, 0.5)
    assert (response.max_output_tokens, response.user, response.created_at) == (99, "me", 1700000000)


def test_the_response_repeats_what_was_asked_and_not_what_is_usual() -> None:
    # spec/codec.md 5, row 17
    fields: dict[str, Any] = {
        "parallel_tool_calls": False,
        "store": False,
        "service_tier": "flex",
        "tool_choice": {"type": "function", "name": "get_weather"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "truncation": "disabled",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "max_tool_calls": 3,
        "top_logprobs": 2,
        "top_p": 0.5,
    }
    answer = complete(Output(text="{}"), **fields)
    given = {key: answer[key] for key in fields if key != "reasoning"}
    assert given == {key: value for key, value in fields.items() if key != "reasoning"}
    assert answer["reasoning"]["effort"] == "low" and answer["tools"] == TOOLS
    bare = complete(Output(text="x"), tools=None)
    assert (bare["parallel_tool_calls"], bare["store"], bare["service_tier"]) == (True, True, "default")
    assert (bare["tool_choice"], bare["text"], bare["tools"]) == ("auto", {"format": {"type": "text"}}, [])
    assert complete(Output(text="x"), reasoning={"effort": "none"})["reasoning"]["effort"] == "none"


def test_a_message_in_front_of_calls_is_commentary_and_the_last_one_the_answer() -> None:
    assert complete(ALL)["output"][1]["phase"] == "commentary"
    assert complete(Output(text="x"))["output"][0]["phase"] == "final_answer"


def test_an_answer_of_calls_alone_has_no_empty_message() -> None:
    # spec/codec.md 5, row 16
    assert [item["type"] for item in complete(Output(calls=ALL.calls))["output"]] == ["function_call"] * 2


def test_an_answer_that_only_thinks_says_so() -> None:
    # spec/codec.md 11, bug 18
    answer = complete(Output("hm"))
    assert [item["type"] for item in answer["output"]] == ["reasoning"] and answer["status"] == "completed"
    assert complete(Output())["output"] == []


def test_sealed_reasoning_comes_only_when_it_is_included() -> None:
    assert "encrypted_content" not in complete(ALL)["output"][0]
    sealed = complete(ALL, include=["reasoning.encrypted_content"])["output"][0]["encrypted_content"]
    assert unseal(sealed) == "think"


def test_a_patch_arrives_while_it_is_written() -> None:
    # spec/codec.md 11, bug 4
    patch = "*** Begin Patch\n" + "+line\n" * 50
    events = stream(Output(calls=(Call("apply_patch", json.dumps({"input": patch})),)), cut=10)
    deltas = [data["delta"] for name, data in events if name == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 30 and "".join(deltas) == patch
    (item,) = events[-1][1]["response"]["output"]
    assert (item["type"], item["input"], item["call_id"]) == ("custom_tool_call", patch, "id_0")


@settings(deadline=None, max_examples=40)
@given(st.text(), st.integers(1, 7), st.booleans())
def test_a_text_inside_json_comes_out_however_the_json_is_cut(text: str, cut: int, ascii_only: bool) -> None:
    value = StringValue()
    given_json = json.dumps({"input": text, "more": '"'}, ensure_ascii=ascii_only)
    assert "".join(value.push(piece) for piece in pieces(given_json, cut)) == text


def test_a_text_inside_json_of_another_form_is_left_to_the_whole() -> None:
    for other in ('{"other": "x", "input": "y"}', "[" * 200, '{"input": 5}'):
        value = StringValue()
        assert "".join(value.push(char) for char in other) == ""


def test_what_the_token_limit_cuts_is_incomplete() -> None:
    made = writer_of(stream=True)
    events = frames(play(made, ALL.events(cut_last=True), Finish("length")))
    assert events[-1][0] == "response.incomplete"
    response = events[-1][1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed"] * 3 + ["incomplete"]
    assert [item["type"] for item in output_items(response)] == ["reasoning", "message", "function_call"]
    text = json.loads(play(writer_of(), [Content("half")], Finish("length")))
    assert (text["status"], text["output"][0]["status"]) == ("incomplete", "incomplete")
    assert text["completed_at"] is None


def test_a_deadline_is_no_completion() -> None:
    assert json.loads(play(writer_of(), [Content("half")], Finish("deadline")))["status"] == "incomplete"
    broken = json.loads(play(writer_of(), [Content("half")], Finish("error")))
    assert (broken["status"], broken["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize(
    ("status", "code"), [(500, "server_error"), (503, "server_error"), (429, "rate_limit_exceeded")]
)
def test_an_error_in_a_stream_fails_the_response_and_keeps_what_was_said(status: int, code: str) -> None:
    made = writer_of(stream=True)
    sent = made.start(BEFORE) + made.events(0, [Reasoning("t"), Content("Hal")], {})
    sent += made.error(RequestError("the engine died", status=status))
    name, data = frames(sent)[-1]
    response = data["response"]
    assert (name, response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": code, "message": "the engine died"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    Response.model_validate(response)
    with openai_client(sent, made.media_type).responses.stream(model="flash", input="Hi") as events:
        assert [event.type for event in events][-1] == "response.failed"


def test_an_error_inside_a_call_keeps_it_incomplete() -> None:
    made = writer_of(stream=True)
    sent = made.start(BEFORE) + made.events(0, [ToolStart(0, "c", "get_weather"), ToolArguments(0, '{"ci')], {})
    item = frames(sent + made.error(RequestError("x", status=500)))[-1][1]["response"]["output"][0]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"ci')


def test_the_sdk_raises_our_errors_as_its_own() -> None:
    body = json.dumps(error_body(RequestError("input: is required", param="input"))).encode()
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client(body, "application/json", 400).responses.create(model="flash", input="Hi")
    assert caught.value.param == "input" and "is required" in caught.value.message


def test_log_probabilities_cover_every_token_of_the_message_and_none_else() -> None:
    logprobs = {
        0: TokenLogprob(ord("t"), -0.1, {ord("t"): -0.1}),
        1: TokenLogprob(ord("A"), -0.5, {ord("A"): -0.5, ord("B"): -1.0, ord("C"): -2.0}),
        2: TokenLogprob(0xC3, -1.5, {0xC3: -1.5}),
        3: TokenLogprob(0xA9, float("-inf"), {}),
    }
    events: list[Event] = [Reasoning("t", (0,)), Content("A", (1,)), Content("", (2,)), Content("é", (3,))]
    made = writer_of(stream=True, top_logprobs=2)
    sent = frames(play(made, events, logprobs=logprobs))
    entries = [entry for name, data in sent if name == "response.output_text.delta" for entry in data["logprobs"]]
    assert [(entry["token"], entry["bytes"], entry["logprob"]) for entry in entries] == [
        ("A", [65], -0.5),
        ("\\xc3", [0xC3], -1.5),
        ("\\xa9", [0xA9], -9999.0),
    ]
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["A", "B"]
    done = next(data for name, data in sent if name == "response.output_text.done")
    part = sent[-1][1]["response"]["output"][1]["content"][0]
    assert done["logprobs"] == part["logprobs"] == entries
    Response.model_validate(sent[-1][1]["response"])


def test_nothing_is_lost_between_pieces_that_come_at_once_and_pieces_that_come_alone() -> None:
    # spec/codec.md 11, bugs 13, 14 and 30
    events = ALL.events(1)
    answers = []
    for at_once in (1, 2, 5, len(events)):
        made = writer_of(stream=True)
        play(made, events, ALL.finish, at_once=at_once)
        assert made.answer is not None
        answers.append(untimed(made.answer))
    assert all(answer == answers[0] for answer in answers)


def test_a_silent_stream_is_kept_open_by_comments_that_the_sdk_does_not_see() -> None:
    made = writer_of(stream=True)
    sent = made.start(BEFORE) + made.heartbeat() + made.events(0, [Content("x")], {}) + made.heartbeat()
    sent += made.finish(0, Finish("stop")) + made.end(USAGE)
    assert made.heartbeat() == COMMENT and writer_of().heartbeat() == b""
    with openai_client(sent, made.media_type).responses.stream(model="flash", input="Hi") as events:
        assert events.get_final_response().output_text == "x"


def test_a_call_of_a_tool_that_nobody_declared_is_a_function_call() -> None:
    # tools may come from an earlier request's history; the parser decides what counts as a call
    events: list[Event] = [ToolStart(0, "c", "other"), ToolArguments(0, "{}"), ToolEnd(0, "{}", True)]
    (item,) = json.loads(play(writer_of(), events, Finish("tool_calls")))["output"]
    assert (item["type"], item["name"]) == ("function_call", "other")
