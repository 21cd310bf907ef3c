"""Answers of the older Completions protocol, read by the official SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import openai_sdk
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.completions.request import CompletionRequest, to_generation
from deepinfer.codec.completions.writer import writer
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import Finish, TokenLogprob, Usage, WriterContext

BYTES = {1: b"U", 2: b"BS", 3: "é".encode(), 4: b"\xe2\x82", 5: b"\xac"}
CONTEXT = WriterContext(id="abc", created=5, model="flash", token_bytes=lambda i: BYTES.get(i, b"?"))
Outputs = Sequence[tuple[int, str, Sequence[int]]]  # choice, text, token ids in it


def answered(outputs: Outputs, reasons: Sequence[str] = ("stop",), **fields: Any) -> bytes:
    body = parse(CompletionRequest, {"model": "flash", "prompt": "Once"} | fields)
    generation = to_generation(body)
    out = writer(body, generation, CONTEXT)
    pieces = [out.start(Usage(3, 1))]
    places: dict[int, int] = {}
    for index, text, ids in outputs:
        begin = places.get(index, 0)
        places[index] = begin + len(ids)
        entries = {begin + i: TokenLogprob(t, -0.5 * t, {t: -0.5 * t, 9: -3.0, 8: -3.0}) for i, t in enumerate(ids)}
        event = Content(text, tuple(range(begin, begin + len(ids))))
        pieces.append(out.events(index, [event], entries if generation.top_logprobs is not None else {}))
    pieces += [out.finish(index, Finish(reason)) for index, reason in enumerate(reasons)]
    pieces.append(out.end(Usage(3, 1, 4)))
    if not body.stream:
        assert not any(pieces[:-1])
    return b"".join(pieces)


def sdk_answer(outputs: Outputs, reasons: Sequence[str] = ("stop",), **fields: Any) -> Any:
    client = openai_sdk.client(answered(outputs, reasons, **fields), "application/json")
    return client.completions.create(model="m", prompt="")


def sdk_stream(outputs: Outputs, reasons: Sequence[str] = ("stop",), **fields: Any) -> list[Any]:
    stream = answered(outputs, reasons, stream=True, **fields)
    assert stream.endswith(b"data: [DONE]\n\n")
    client = openai_sdk.client(stream, "text/event-stream; charset=utf-8", cut=7)
    return list(client.completions.create(model="m", prompt="", stream=True))


def collected(chunks: Sequence[Any], count: int) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": []} for _ in range(count)]
    for chunk in chunks:
        for choice in chunk.choices:
            choices[choice.index]["text"] += choice.text
            choices[choice.index]["reason"] = choice.finish_reason
            if choice.logprobs:
                choices[choice.index]["logprobs"].append(choice.logprobs)
    return choices


def test_text_and_usage() -> None:
    answer = sdk_answer([(0, "U", [1]), (0, "BS", [2])], ["length"])
    assert (answer.id, answer.object, answer.model, answer.created) == ("cmpl-abc", "text_completion", "flash", 5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.choices[0].logprobs) == (
        "UBS",
        "length",
        None,
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_usage_of_a_stream_comes_in_its_own_chunk_when_asked_for() -> None:
    chunks = sdk_stream([(0, "U", [1])])
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    chunks = sdk_stream([(0, "U", [1])], stream_options={"include_usage": True})
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4


def test_several_prompts_with_several_answers_each_keep_their_places() -> None:
    outputs = [(3, "b1", [1]), (0, "a0", [1]), (2, "b0", [1]), (1, "a1", [1])]
    fields: dict[str, Any] = {"prompt": ["A:", "B:"], "n": 2}
    answer = sdk_answer(outputs, ["stop"] * 4, **fields)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    echoed = sdk_answer(outputs, ["stop"] * 4, echo=True, **fields)
    assert [c.text for c in echoed.choices] == ["A:a0", "A:a1", "B:b0", "B:b1"]
    told = collected(sdk_stream(outputs, ["stop"] * 4, echo=True, **fields), 4)
    assert [choice["text"] for choice in told] == ["A:a0", "A:a1", "B:b0", "B:b1"]


def test_echo_of_ids_is_their_text() -> None:
    assert sdk_answer([(0, "!", [1])], prompt=[2, 4, 5], echo=True).choices[0].text == "BS€!"


def test_logprobs_have_the_older_shape_and_offsets_point_into_the_text() -> None:
    logprobs = sdk_answer([(0, "Ué", [1, 3]), (0, "€BS", [4, 5, 2])], logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["U", "é", "\\xe2\\x82", "\\xac", "BS"]
    assert logprobs.token_logprobs == [-0.5, -1.5, -2.0, -2.5, -1.0]
    assert logprobs.text_offset == [0, 1, 2, 2, 3]
    assert logprobs.top_logprobs[0] == {"U": -0.5, "?": -3.0}
    none = sdk_answer([(0, "U", [1])], logprobs=0).choices[0].logprobs
    assert (none.tokens, none.top_logprobs) == (["U"], None)


TOKENS = st.lists(st.integers(1, 5), max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(
        st.tuples(st.integers(0, 1), st.text(max_size=4), st.lists(st.integers(1, 5), max_size=3)), max_size=8
    ),
    logprobs=st.sampled_from([None, 0, 2]),
)
def test_a_stream_put_together_is_the_complete_answer(data: list[Any], logprobs: int | None) -> None:
    reasons = ["stop", "length"]
    told = collected(sdk_stream(data, reasons, n=2, logprobs=logprobs), 2)
    for mine, choice in zip(told, sdk_answer(data, reasons, n=2, logprobs=logprobs).choices, strict=True):
        assert (mine["text"], mine["reason"]) == (choice.text, choice.finish_reason)
        if logprobs is None:
            assert mine["logprobs"] == [] and choice.logprobs is None
            continue
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [x for piece in mine["logprobs"] for x in getattr(piece, name)] == getattr(choice.logprobs, name)
        alternatives = [x for piece in mine["logprobs"] for x in piece.top_logprobs or ()]
        assert alternatives == (choice.logprobs.top_logprobs or [])


def test_an_error_in_a_stream_reaches_the_client_as_one() -> None:
    body = parse(CompletionRequest, {"model": "m", "prompt": "x", "stream": True})
    out = writer(body, to_generation(body), CONTEXT)
    stream = out.start(Usage(1, 0)) + out.heartbeat() + out.events(0, [Content("U", (0,))], {})
    stream += out.error(RequestError("the engine died", status=500, kind="server_error"))
    client = openai_sdk.client(stream, out.media_type)
    with pytest.raises(openai.APIError, match="the engine died"):
        list(client.completions.create(model="m", prompt="", stream=True))
    whole = parse(CompletionRequest, {"model": "m", "prompt": "x"})
    complete = writer(whole, to_generation(whole), CONTEXT)
    assert complete.heartbeat() == b""
    assert json.loads(complete.error(RequestError("no")))["error"]["message"] == "no"
