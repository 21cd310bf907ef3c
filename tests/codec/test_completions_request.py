"""Requests of the older Completions protocol."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.completions.request import CompletionRequest, to_generation
from deepinfer.codec.conversation import Format
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.openai_errors import error_body


def generation(**fields: Any) -> GenerationRequest:
    return to_generation(parse(CompletionRequest, {"model": "flash", "prompt": "Once"} | fields))


def test_a_bare_request() -> None:
    result = generation()
    assert result.prompts == ["Once"] and result.conversation is None
    assert (result.n, result.stream, result.max_tokens, result.top_logprobs) == (1, False, 16, None)
    assert result.sampling == {} and result.ignored == []


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_one_prompt_or_several_as_texts_or_ids(prompt: Any, prompts: list[Any]) -> None:
    assert generation(prompt=prompt).prompts == prompts


def test_fields_reach_the_generation() -> None:
    result = generation(
        n=3, max_tokens=5, temperature=0.5, seed=7, logprobs=2, stop=["a", "b"], stream=True, user="u", made_up=1,
        stream_options={"include_usage": True}, structured_outputs={"regex": "a+"}, best_of=3, suffix=None,
    )  # fmt: skip
    assert (result.n, result.max_tokens, result.top_logprobs, result.stop) == (3, 5, 2, ("a", "b"))
    assert result.sampling == {"temperature": 0.5, "seq_seed": 7} and result.stream
    assert result.format == Format("regex", "a+", False, "structured_outputs.regex")
    assert result.ignored == ["user", "made_up"]
    shown = generation(response_format={"type": "json_object"}).format
    assert shown == Format("json_object", None, False, "response_format")
    assert generation(logprobs=0).top_logprobs == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [[1], []]}, "prompt.1"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.0"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": ["a", "\udcff"]}, "prompt.1"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 9}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {}}, "stream_options"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        generation(**fields)
    assert caught.value.param == param and param in caught.value.message


WHOLE: dict[str, Any] = {
    "model": "m", "prompt": ["a", "b"], "n": 2, "logprobs": 3, "stop": "x", "echo": False, "best_of": 2,
    "response_format": {"type": "text"},
}  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8)
JSON = st.recursive(SCALARS, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=4), c, max_size=2))


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(list(WHOLE)), junk=JSON)
def test_no_broken_body_gets_further_than_an_error_that_can_be_sent(name: str, junk: Any) -> None:
    try:
        to_generation(parse(CompletionRequest, copy.deepcopy(WHOLE) | {name: junk}))
    except RequestError as error:
        assert error.status == 400 and json.dumps(error_body(error), ensure_ascii=False).encode()
