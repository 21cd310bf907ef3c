"""Structural tags: free text, but behind a trigger a declared tag with JSON of its schema."""

from __future__ import annotations

from typing import Any

import pytest
from chat_bodies import generation, refused

TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=weather>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "<f=time>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": '["', "schema": {"enum": ["é", 'q"']}},
    ],
    "triggers": ["<f=", '["'],
}


def fits(text: str) -> tuple[bool, bool]:
    """(the text may be written, it may end there)"""
    llguidance = pytest.importorskip("llguidance")
    form = generation(response_format=TAGS).format
    assert form is not None and form.kind == "ebnf" and not form.shown
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), form.value)
    assert not matcher.get_error()
    data = list(text.encode())
    fitted = matcher.try_consume_tokens(data) == len(data)
    return fitted, fitted and matcher.is_accepting()


@pytest.mark.parametrize(
    "text",
    ["", "free text with < and [ in it", 'a <f=weather>{"b": 1}</f> c', "<f=time>5</f><f=weather>{}</f>", '[""q\\""!'],
)
def test_free_text_and_declared_tags_may_be_written(text: str) -> None:
    assert fits(text) == (True, True)
    assert fits(text + " and more") == (True, True)


def test_a_trigger_begins_a_declared_tag_or_is_not_written() -> None:
    assert not fits("a <f=other")[0]
    assert not fits("a <f=time>5.5")[0]
    assert not fits('a <f=time>"x"')[0]
    assert fits("a <f=time>5</") == (True, False)  # cannot end inside the tag
    assert not fits('["x')[0]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"triggers": []}, "response_format.triggers"),
        ({"structures": None}, "response_format.structures"),
        ({"triggers": ["<f=", '["', "unused"]}, "response_format.triggers.2"),
        ({"triggers": ["<f="]}, "response_format.structures.2.begin"),
        ({"triggers": ["<f=", '["', "x<f=y"]}, "response_format.triggers.2"),
        ({"triggers": [""]}, "response_format.triggers.0"),
        ({"structures": [{"begin": "<f=", "schema": []}]}, "response_format.structures.0.schema"),
    ],
)
def test_tags_that_do_not_fit_their_triggers_are_refused(changes: dict[str, Any], param: str) -> None:
    assert refused(response_format=TAGS | changes).param == param
