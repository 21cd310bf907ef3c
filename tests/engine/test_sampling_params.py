"""Every wrong parameter is refused when the object is made, and the message names the field."""

from __future__ import annotations

import math

import pytest

from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.sampling_params import SamplingParams

WRONG = [
    ("n", 0), ("n", 1.5), ("n", True),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
    ("top_k", -2), ("top_k", 2.5), ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 2),
    ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0), ("repetition_penalty", math.nan),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.0), ("min_tokens", -1), ("min_tokens", 129),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [3]), ("stop", 7), ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
    ("logit_bias", {-1: 0.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101}), ("logit_bias", [1]),
    ("logprobs", -1), ("logprobs", 1001), ("prompt_logprobs", -1),
    ("seq_seed", -1), ("seq_seed", 1 << 64), ("seq_seed", 0.5), ("priority", 0.5),
    ("priority", 1 << 40), ("max_tokens", 10**30), ("stop_token_ids", [1 << 31]), ("stop", "a\ud800"),
    ("deadline", 0), ("deadline", math.inf), ("deadline", 10**400), ("ttft_deadline", 0), ("ttft_deadline", "soon"),
    ("ignore_eos", 1), ("skip_special_tokens", "no"),
    ("json_schema", {}), ("regex", "a*"), ("ebnf", "root ::= x"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: repr(value)[:20])
def test_wrong_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ")


def test_message_says_what_is_accepted() -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature: must be a finite number >= 0 and <= 100, got -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(InvalidRequestError, match="structured output is not built yet"):
        SamplingParams(regex="a")


def test_values_are_normalised_and_frozen() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], top_k=-1, logit_bias={5: -math.inf})
    assert params.stop == ("x",) and params.stop_token_ids == (3,) and params.top_k == 0
    with pytest.raises(AttributeError):
        params.temperature = 0  # type: ignore[misc]


def test_changes_are_checked_too() -> None:
    params = SamplingParams(temperature=0)
    assert params.with_changes(top_p=0.5).temperature == 0
    with pytest.raises(InvalidRequestError, match="top_q: is not a sampling parameter"):
        params.with_changes(top_q=1)
    with pytest.raises(InvalidRequestError, match="top_p"):
        params.with_changes(top_p=7)
