"""What is wrong with a body is said in its sender's words; and the frames of a stream."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pydantic
import pytest
from pydantic import Field

from deepinfer.codec import sse
from deepinfer.codec.body import Body, Part, check_values, parse, short, validation_error
from deepinfer.codec.chat.request import ChatRequest
from deepinfer.codec.errors import RequestError
from deepinfer.codec.openai_errors import error_body


def error_of(data: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, data)
    return caught.value


def test_the_branch_that_fitted_best_is_the_one_that_is_explained() -> None:
    """A content may be a text or a list of parts; who sent parts wants to hear about the part."""
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]}
    error = error_of({"model": "m", "messages": [message]})
    assert (error.param, error.message) == (
        "messages.0.content.1.text",
        "messages.0.content.1.text: must be a string, got 5",
    )
    error = error_of({"model": "m", "messages": [{"role": "user", "content": 5}]})
    assert error.message == "messages.0.content: must be a string or must be a list, got 5"


def test_errors_say_what_may_be_sent_instead() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert error_of(body | {"temperature": 3}).message == "temperature: must be at most 2.0, got 3"
    assert "one of 'enabled', 'disabled' or 'adaptive'" in error_of(body | {"thinking": {"type": "x"}}).message
    empty = error_of(body | {"messages": []})
    assert empty.message == "messages: needs 1 or more entries, got an empty list"


def test_a_long_value_is_not_sent_back_whole() -> None:
    error = error_of({"model": "m", "messages": [{"role": "x" * 100_000, "content": "a"}]})
    assert error.param == "messages.0.role" and len(error.message) < 400
    assert len(short("y" * 1000)) == 80
    told = [short(value) for value in ("\ud800", ["\ud800"], [], {"a": 1}, {}, None, True, 5, 10**5000, float("nan"))]
    assert "".join(told).encode() and max(map(len, told)) <= 80


class Tagged(Part):
    type: str
    text: str


class Sample(Body):
    items: list[Tagged]


class Lists(Body):
    """Lists wherever a field may have them."""

    plain: list[int] | None = None
    either: str | list[Tagged] | list[list[int]] | None = None
    bounded: Annotated[list[str], Field(min_length=1, max_length=5000)] | None = None
    nested: list[Sample] | None = None


@pytest.mark.parametrize(
    ("field", "wrong", "param"),
    [
        ("plain", "x", "plain.0"),
        ("either", {}, "either.0.type"),
        ("either", [{}], "either.0.0"),
        ("bounded", 5, "bounded.0"),
        ("nested", {"items": [{}] * 1000}, "nested.0.items.0.type"),
    ],
)
def test_a_list_full_of_mistakes_costs_no_more_than_one_of_them(field: str, wrong: Any, param: str) -> None:
    """Each would cost a kilobyte and a tenth of a millisecond, and a body has room for millions."""
    data = {field: [wrong] * 5000}
    with pytest.raises(pydantic.ValidationError) as caught:
        Lists.model_validate(data)
    assert caught.value.error_count() < 10
    with pytest.raises(RequestError) as told:
        parse(Lists, data)
    assert told.value.param == param


def test_biases_full_of_mistakes_cost_no_more_than_one_of_them() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for wrong in ("1", None, True, [5]):
        biases: dict[str, Any] = {str(token): 1 for token in range(500)} | {"7": wrong, "9": wrong}
        with pytest.raises(pydantic.ValidationError) as caught:
            ChatRequest.model_validate(body | {"logit_bias": biases})
        assert caught.value.error_count() < 3
        assert error_of(body | {"logit_bias": biases}).message.startswith("logit_bias.7: must be a number")
    assert error_of(body | {"logit_bias": {"5": 101}}).param == "logit_bias.5"
    many = error_of(body | {"logit_bias": dict.fromkeys(map(str, range(300_000)), "x")})
    assert many.message == "logit_bias: may have at most 262144 entries"
    assert error_of(body | {"logit_bias": [1]}).message.startswith("logit_bias: must be an object")


def test_fastapi_places_of_errors_are_understood() -> None:
    """FastAPI puts "body" in front of every place."""
    data = {"items": [{"type": "text"}]}
    with pytest.raises(pydantic.ValidationError) as caught:
        Sample.model_validate(data)
    errors = [dict(error, loc=("body", *error["loc"])) for error in caught.value.errors()]
    error = validation_error(errors, data)
    assert (error.param, error.message) == ("items.0.text", "items.0.text: is required")


def test_half_a_surrogate_pair_is_found_wherever_it_is() -> None:
    good: dict[str, Any] = {"a": [1, None, "é😀", {"b": True}]}
    check_values(good)
    for data, param in [
        ({"a": [0, {"b": "x\ud83d"}]}, "a.1.b"),
        ({"a": {"k\udc00": 1}}, "a.k\\udc00"),
        ("\ud800", None),
    ]:
        with pytest.raises(RequestError) as caught:
            check_values(data)
        assert caught.value.param == param
        assert json.dumps(error_body(caught.value), ensure_ascii=False).encode()


def test_a_number_that_json_does_not_have_is_found_wherever_it_is() -> None:
    """A schema with it would be shown to the model, and no reader of JSON could read that."""
    check_values({"a": [0.5, -1e308, 10**400]})
    for text, param in [('{"a": [0, {"b": NaN}]}', "a.1.b"), ('{"a": -Infinity}', "a"), ('{"b": [1e999]}', "b.0")]:
        with pytest.raises(RequestError, match="must be a finite number") as caught:
            check_values(json.loads(text))
        assert caught.value.param == param


def test_a_deep_body_is_refused_without_recursion() -> None:
    data: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    deep: Any = 5
    for _ in range(100_000):
        deep = [deep]
    for field in ("metadata", "messages", "temperature"):
        error = error_of(data | {field: deep})
        assert error.param is not None and error.param.startswith(field)
        assert "too deeply" in error.message and len(error.message) < 1000
    while deep != 5:  # taken apart by hand: the interpreter would do it by recursion
        deep = deep.pop()
    nested: Any = "x"
    for _ in range(100):
        nested = {"properties": nested}
    check_values(nested)


def test_a_frame_is_one_event_whatever_the_text() -> None:
    hostile = "a\n\ndata: b\r\n\u2028\x00\x85\u2029\x0b\x0c\x1c\x1d\x1e’é\u2027"
    framed = sse.json_frame({"text": hostile}, "delta")
    assert framed.count(b"\n") == 3 and b"\r" not in framed
    assert len(framed.decode().splitlines()) == 3  # as Python and its HTTP clients read lines
    name, data, *rest = framed.decode().split("\n")
    assert name == "event: delta" and rest == ["", ""]
    assert json.loads(data.removeprefix("data: ")) == {"text": hostile}
    assert sse.frame(b"{}") == b"data: {}\n\n"
    assert sse.COMMENT.startswith(b":") and sse.COMMENT.endswith(b"\n\n")
