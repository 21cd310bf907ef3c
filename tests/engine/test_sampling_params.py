"""Every wrong parameter is refused when the object is made, and the message names the field."""

from __future__ import annotations

import math

import pytest

from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.grammar.structure import Grammar, Structure

WRONG = [
    ("n", 0), ("n", 1.5), ("n", True),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
    ("top_k", -2), ("top_k", 2.5), ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 2),
    ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0.001),
    ("repetition_penalty", math.nan), ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.0),
    ("min_tokens", -1), ("min_tokens", 129),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [3]), ("stop", 7), ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
    ("logit_bias", {-1: 0.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101}), ("logit_bias", [1]),
    ("logprobs", -1), ("logprobs", 1001), ("prompt_logprobs", -1),
    ("seq_seed", -1), ("seq_seed", 1 << 64), ("seq_seed", 0.5), ("priority", 0.5),
    ("priority", 1 << 40), ("max_tokens", 10**30), ("stop_token_ids", [1 << 31]), ("stop", "a\ud800"),
    ("deadline", 0), ("deadline", math.inf), ("deadline", 10**400), ("ttft_deadline", 0), ("ttft_deadline", "soon"),
    ("ignore_eos", 1), ("skip_special_tokens", "no"),
    ("json_schema", 5), ("json_schema", {"enum": [math.nan]}), ("json_schema", {"enum": [{1}]}),
    ("json_schema", {"pattern": "\ud800"}), ("json_schema", '"' * 300_000), ("json_schema", "[" * 100),
    ("regex", b"a*"), ("regex", "a" * 10_000), ("regex", "\ud800"), ("ebnf", ["root ::= x"]), ("ebnf", "(" * 100),
    ("structure", {"tool_mode": "auto"}), ("structure", Structure(tool_mode="required")),
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
    with pytest.raises(InvalidRequestError, match="json_schema: must be a dict, a bool or the text of a schema, got 5"):
        SamplingParams(json_schema=5)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict = {"type": "object"}
    schema["properties"] = {"self": schema}
    with pytest.raises(InvalidRequestError, match="json_schema"):
        SamplingParams(json_schema=schema)
    deep: dict = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(InvalidRequestError, match="json_schema"):
        SamplingParams(json_schema=deep)


def test_of_several_structures_none_is_taken_silently() -> None:
    with pytest.raises(InvalidRequestError, match="regex: cannot be used together with json_schema"):
        SamplingParams(json_schema=True, regex="a")
    with pytest.raises(InvalidRequestError, match="structure: cannot be used together with ebnf"):
        SamplingParams(ebnf='root ::= "a"', structure=Structure())
    with pytest.raises(InvalidRequestError, match="ignore_eos: conflicts with regex"):
        SamplingParams(regex="a", ignore_eos=True)
    assert SamplingParams(structure=Structure(), ignore_eos=True).enforced is None


def test_whatever_spells_a_schema_asks_for_the_same() -> None:
    schema = {"type": "object", "properties": {"name": {"const": "Ä"}, "age": {"type": "integer"}}}
    text = '{"type": "object", "properties": {"name": {"const": "Ä"}, "age": {"type": "integer"}}}'
    assert SamplingParams(json_schema=schema) == SamplingParams(json_schema=text)
    content = Grammar("json_schema", text)
    assert SamplingParams(json_schema=schema).enforced == Structure(content=content)
    assert SamplingParams(structure=Structure(content=content)).enforced == Structure(content=content)
    assert SamplingParams(regex="a|b").enforced == Structure(content=Grammar("regex", "a|b"))
    assert SamplingParams(json_schema=True).enforced == Structure(content=Grammar("json_schema", "true"))
    assert SamplingParams().enforced is None


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
