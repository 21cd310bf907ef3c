"""What crosses from the front end to the engine core and back arrives as it was sent, or is refused by name."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.core_routes import Routes
from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.messages import EngineRequest, decode_request, encode_request
from deepinfer.engine.sampling_params import SEED_LIMIT, SamplingParams
from deepinfer.engine.step_output import (
    FINISH_CODE,
    FINISH_CODES,
    PromptScores,
    Rounds,
    SequenceEvent,
    StepOutput,
    decode,
    encode,
)
from deepinfer.engine.stop import FinishReason
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar


def rounds(*numbers: int) -> Rounds:
    count = len(numbers)
    return Rounds(
        numbers=np.array(numbers, np.int64),
        indices=np.zeros(count, np.int32),
        drafted=np.arange(count),
        accepted=np.zeros(count, np.int64),
        predicted=np.array([0.5, 0.25, 0.125] * count, np.float32),
    )


def request(params: SamplingParams | None = None, ids=(3, 4), **fields) -> EngineRequest:
    return EngineRequest(
        number=7,
        request_id="r",
        prompt_token_ids=np.array(ids, np.int32),
        params=params or SamplingParams(),
        max_tokens=5,
        **fields,
    )


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 1024),
            "temperature": st.floats(0, 100) | st.integers(0, 100),
            "top_k": st.integers(-1, 2**31 - 1),
            "max_tokens": st.integers(1, 2**31 - 1) | st.none(),
            "stop": st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
            | st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3),
            "stop_token_ids": st.sets(st.integers(0, 2**31 - 1), max_size=3),
            "logit_bias": st.dictionaries(
                st.integers(0, 2**31 - 1), st.floats(-100, 100) | st.just(-math.inf) | st.integers(-100, 100)
            ),
            "logprobs": st.integers(0, 1000) | st.none(),
            "seq_seed": st.integers(0, SEED_LIMIT - 1) | st.none(),
            "priority": st.integers(-(2**31), 2**31 - 1),
            "deadline": st.floats(0, 1e9, exclude_min=True) | st.none(),
            "ttft_deadline": st.integers(1, 10**9) | st.none(),
            "ignore_eos": st.booleans(),
            "asked": st.sampled_from(
                [
                    {"json_schema": {"type": "object", "properties": {"n": {"maximum": 1 << 80, "const": 0.5}}}},
                    {"json_schema": False},
                    {"regex": "[ä-ö]+"},
                    {
                        "structure": Structure(
                            content=Grammar("choice", '["a"]'),
                            tools=(ToolGrammar("f", "{}", True), ToolGrammar("g")),
                            tool_mode="auto",
                            thinking=True,
                            thinking_budget=7,
                            prefix="{",
                        )
                    },
                ]
            ),
        },
    )
)
def test_any_parameters_that_can_be_made_arrive_equal(fields) -> None:
    fields |= fields.pop("asked", {})
    if "structure" in fields or "json_schema" in fields or "regex" in fields:
        fields.pop("ignore_eos", None)
    params = SamplingParams(**fields)
    arrived = decode_request(encode_request(request(params))).params
    assert arrived == params
    assert type(arrived.stop) is type(arrived.stop_token_ids) is tuple


def test_a_request_arrives_whole() -> None:
    ids = np.arange(100_000, dtype=np.int32) % 129_280
    message = encode_request(request(ids=ids, age=0.25, tenant="böse", salt="s"))
    assert len(message) < 4 * len(ids) + 1000  # ids travel as bytes, not as msgpack integers
    arrived = decode_request(message)
    assert arrived.prompt_token_ids.dtype == np.int32
    np.testing.assert_array_equal(arrived.prompt_token_ids, ids)
    assert (arrived.number, arrived.request_id, arrived.max_tokens) == (7, "r", 5)
    assert (arrived.age, arrived.tenant, arrived.salt) == (0.25, "böse", "s")


def test_numbers_and_texts_that_only_look_plain_travel_as_what_they_stand_for() -> None:
    class Text(str):
        pass

    params = SamplingParams(stop=Text("end"), temperature=np.float64(0.5))  # type: ignore[arg-type]
    arrived = decode_request(encode_request(request(params))).params
    assert arrived.stop == ("end",) and arrived.temperature == 0.5


def test_parameters_are_checked_again_where_they_arrive() -> None:
    """A client may send anything; what SamplingParams refuses never reaches the engine."""
    plain = msgspec.msgpack.decode(encode_request(request()))
    plain["params"]["top_p"] = 7.0
    with pytest.raises(msgspec.ValidationError, match=r"top_p: must be .* at `\$.params`"):
        decode_request(msgspec.msgpack.encode(plain))
    del plain["params"], plain["number"]
    with pytest.raises(msgspec.ValidationError, match="number"):
        decode_request(msgspec.msgpack.encode(plain))


@pytest.mark.parametrize("ids", [np.array([1], np.int64), np.empty(0, np.int32), np.zeros((1, 2), np.int32)])
def test_token_ids_of_another_shape_or_type_are_refused(ids) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_token_ids: must be int32"):
        EngineRequest(number=0, request_id="r", prompt_token_ids=ids, params=SamplingParams(), max_tokens=1)


def test_an_array_of_objects_is_never_read_from_a_message() -> None:
    plain = msgspec.msgpack.decode(encode_request(request()))
    plain["prompt_token_ids"] = ("|O", b"\0" * 16)
    with pytest.raises(msgspec.ValidationError, match="only arrays of numbers"):
        decode_request(msgspec.msgpack.encode(plain))


def test_a_step_output_arrives_as_it_was() -> None:
    output = StepOutput(
        numbers=np.array([5, 1 << 40], np.int64),
        indices=np.array([0, 2], np.int32),
        token_ids=np.array([129_279, -1], np.int64),
        logprobs=np.array([-0.5, -np.inf], np.float32),
        finish=np.array([0, FINISH_CODE[FinishReason.DEADLINE]], np.int8),
        top=[{17: -0.25, 129_279: -0.5}, None],
        events=[SequenceEvent(5, 0, "admitted", 256, 128, 0.125)],
        prompt_scores=[PromptScores(5, [{3: -1.5}, {4: -math.inf}])],
        rounds=rounds(5, 1 << 40),
    )
    arrived = decode(encode(output))
    for name in ("numbers", "indices", "token_ids", "logprobs", "finish"):
        sent, got = getattr(output, name), getattr(arrived, name)
        assert sent.dtype == got.dtype
        np.testing.assert_array_equal(sent, got)
    assert arrived.top == output.top
    assert arrived.events == output.events and arrived.events[0].replay_tokens == 128
    assert arrived.prompt_scores == output.prompt_scores
    assert arrived.rounds is not None and output.rounds is not None
    for name in ("numbers", "indices", "drafted", "accepted", "predicted", "predictions"):
        np.testing.assert_array_equal(getattr(output.rounds, name), getattr(arrived.rounds, name))
    assert len(decode(encode(StepOutput.empty()))) == 0


def test_every_client_gets_the_rounds_of_its_own_requests_under_its_own_numbers() -> None:
    routes = Routes()
    for client in (b"a", b"b"):
        routes.join(client)
    for client, theirs, number in ((b"a", 0, 10), (b"b", 0, 11), (b"b", 7, 12)):
        routes.add(client, theirs, number, 1)
    output = StepOutput(
        numbers=np.array([10, 12, 13], np.int64),
        indices=np.zeros(3, np.int32),
        token_ids=np.array([4, 5, 6], np.int64),
        logprobs=np.zeros(3, np.float32),
        finish=np.zeros(3, np.int8),
        rounds=rounds(10, 12, 13),  # 13 was aborted: it is nobody's
    )
    shares = dict(routes.divide(output))
    got = {client: share.rounds for client, share in shares.items()}
    assert got[b"a"] is not None and got[b"b"] is not None and set(got) == {b"a", b"b"}
    assert (got[b"a"].numbers.tolist(), got[b"a"].drafted.tolist()) == ([0], [0])
    assert (got[b"b"].numbers.tolist(), got[b"b"].drafted.tolist()) == ([7], [1])
    np.testing.assert_array_equal(got[b"b"].predictions, [[0.5, 0.25, 0.125]])
    output.rounds = rounds(12)
    assert dict(routes.divide(output))[b"a"].rounds is None


def test_every_finish_reason_has_a_code_that_leads_back() -> None:
    assert {FINISH_CODES[FINISH_CODE[reason]] for reason in FinishReason} == set(FinishReason)
    assert FINISH_CODES[0] is None
