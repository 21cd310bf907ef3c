# ruff: noqa: E501  (a table)
"""Arguments of strict tools: enforced from the schema that the client wrote, however it says it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from walks import EOS, block, encoded, nano, prototype

from deepinfer.grammar.compiler import build_parts
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Structure, ToolGrammar


def structure(schema: Any) -> Structure:
    return Structure(tools=(ToolGrammar("f", json.dumps(schema), True),), tool_mode="required")


def obj(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
NODE = obj(kids={"type": "array", "items": {"$ref": "#/$defs/node"}}) | {"additionalProperties": False}
LONG_WAY = {
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/definitions/c~1d"}},
    "definitions": {"c/d": TEXT | {"maxLength": 2}},
}

# schema, arguments that satisfy it, arguments that do not
CASES: dict[str, tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "optional": (obj(a=TEXT, b=WHOLE), [{}, {"a": "x"}, {"b": 1}, {"a": "", "b": -3}], [{"c": "x"}, {"a": 1}, {"b": "1"}]),
    "required": (obj(("b",), a=TEXT, b=WHOLE, c=TEXT), [{"b": 1}, {"a": "x", "b": 1, "c": "y"}], [{}, {"a": "x"}]),
    "nothing declared": ({"type": "object"}, [{}, {"x": 1}, {"y": "z", "w": [None]}], []),
    "nothing at all": ({}, [{}, {"x": {"y": "z"}}], []),
    "declared nothing": (obj(), [{}], [{"x": 1}]),
    "extras allowed": (obj(("a",), a=WHOLE) | {"additionalProperties": True}, [{"a": 1}, {"a": 1, "b": "x", "c": 2}], [{"b": 1}]),
    "extras of a kind": (obj(a=WHOLE) | {"additionalProperties": TEXT}, [{}, {"x": "y"}, {"a": 1, "x": "y"}], [{"x": 1}]),
    "extras by name": (
        {"type": "object", "patternProperties": {"^x_": WHOLE}, "additionalProperties": False},
        [{}, {"x_a": 1}],
        [{"y": 1}, {"x_a": "1"}],
    ),
    "enum": (obj(("a",), a={"enum": ["x", "y z", 3, None, True, [1]]}), [{"a": v} for v in ("x", "y z", 3, None, True, [1])], [{"a": "3"}, {"a": 4}, {"a": "xx"}]),
    "const": (obj(("a",), a={"const": "only \"this\"\n"}), [{"a": "only \"this\"\n"}], [{"a": "only"}]),
    "pattern": (obj(("a",), a=TEXT | {"pattern": "^a|z$"}), [{"a": "abc"}, {"a": "xyz"}], [{"a": "bcd"}, {"a": ""}]),
    "pattern with slashes": (obj(("a",), a=TEXT | {"pattern": r"^/usr(/\w+)*$"}), [{"a": "/usr/lib_x"}], [{"a": "usr"}, {"a": "/usr/ü"}]),
    "length": (obj(("a",), a=TEXT | {"minLength": 2, "maxLength": 3}), [{"a": "ab"}, {"a": "é北京"}, {"a": "</x"}], [{"a": "a"}, {"a": "abcd"}]),
    "pattern and length": (obj(("a",), a=TEXT | {"pattern": "b", "maxLength": 3}), [{"a": "abc"}], [{"a": "acc"}, {"a": "abcd"}]),
    "format": (obj(("a",), a=TEXT | {"format": "date"}), [{"a": "2026-11-30"}], [{"a": "2026-11-31"}, {"a": "today"}]),
    "several types": (obj(("a",), a={"type": ["string", "null", "integer"], "maxLength": 2, "minimum": 5}), [{"a": "ab"}, {"a": None}, {"a": 5}], [{"a": "abc"}, {"a": 4}, {"a": True}]),
    "no type": (obj(("a",), a={"minLength": 2}), [{"a": "ab"}, {"a": 1}, {"a": {"b": []}}], [{"a": "a"}]),
    "anything": (obj(("a",), a={}), [{"a": "text"}, {"a": [1, "x"]}], [{}]),
    "anything, as true": (obj(("a",), a=True), [{"a": "text"}, {"a": None}], [{}]),
    "never": (obj(("a",), a=WHOLE, b=False), [{"a": 1}], [{"a": 1, "b": 1}]),
    "any of": (obj(("a",), a={"anyOf": [TEXT | {"pattern": "^x"}, {"type": "array", "items": WHOLE}]}), [{"a": "xy"}, {"a": [1, 2]}], [{"a": "y"}, {"a": ["x"]}]),
    "one of": (obj(("a",), a={"oneOf": [TEXT | {"minLength": 2}, TEXT | {"maxLength": 3}]}), [{"a": "a"}, {"a": "abcd"}], [{"a": "ab"}]),
    "all of": (obj(("a",), a={"allOf": [TEXT | {"minLength": 2}, {"maxLength": 3}]}), [{"a": "ab"}], [{"a": "a"}, {"a": "abcd"}, {"a": 1}]),
    "reference": (obj(("a",), a={"$ref": "#/$defs/a"}) | LONG_WAY, [{"a": "xy"}], [{"a": "xyz"}, {"a": 1}]),
    "reference and more": (obj(("a",), a={"$ref": "#/$defs/a", "minLength": 1}) | LONG_WAY, [{"a": "x"}], [{"a": ""}, {"a": "xyz"}]),
    "reference to another parameter": (obj(("a", "b"), a=WHOLE | {"minimum": 5}, b={"$ref": "#/properties/a"}), [{"a": 5, "b": 6}], [{"a": 5, "b": 4}]),
    "recursive": (obj(("a",), a={"$ref": "#/$defs/node"}) | {"$defs": {"node": NODE}}, [{"a": {}}, {"a": {"kids": [{}, {"kids": []}]}}], [{"a": {"kid": 1}}, {"a": "x"}]),
    "the whole schema again": (obj(("a",), a=TEXT, b={"$ref": "#"}) | {"additionalProperties": False}, [{"a": "x"}, {"a": "x", "b": {"a": "y"}}], [{"a": "x", "b": {}}]),
    "behind a reference": ({"$ref": "#/$defs/args", "$defs": {"args": obj(("a",), a=WHOLE)}}, [{"a": 1}], [{}, {"a": "x"}]),
    "cases": ({"anyOf": [obj(("a",), a=WHOLE), obj(("b",), b=TEXT)]}, [{"a": 1}, {"b": "x"}], [{}, {"a": "x"}]),
    "joined": ({"allOf": [obj(("a",), a=WHOLE), obj(("b",), b=TEXT)]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}]),
    "odd names": (obj(("a b", "ü<>", "c'd"), **{"a b": TEXT, "ü<>": WHOLE, "c'd": TEXT}), [{"a b": "x", "ü<>": 1, "c'd": "y"}], []),
}  # fmt: skip


def accepts(schema: Any, arguments: dict[str, Any]) -> bool:
    matcher = prototype(structure(schema)).start()
    matcher.accept([*encoded(block(("f", arguments))), EOS])
    return matcher.error is None and matcher.ended


@pytest.mark.parametrize("name", CASES)
def test_strict_arguments_satisfy_the_schema(name: str) -> None:
    schema, valid, invalid = CASES[name]
    for arguments in valid:
        assert accepts(schema, arguments), arguments
    for arguments in invalid:
        assert not accepts(schema, arguments), arguments


def test_a_text_is_bare_and_everything_else_is_json() -> None:
    schema = obj(("a", "b"), a=TEXT, b=WHOLE)
    good = block(("f", {"a": "x", "b": 1}))
    for wrong in (
        good.replace(">x<", '>"x"<').replace('string="true"', 'string="false"', 1),
        good.replace('string="false"', 'string="true"'),
    ):
        matcher = prototype(structure(schema)).start()
        matcher.accept([*encoded(wrong), EOS])
        assert matcher.error is not None


def test_a_parameter_stands_at_most_once() -> None:
    once = block(("f", {"a": "x"}))
    line = once[once.index("\n", 20) + 1 : once.rindex("\n<", 0, once.rindex("\n<")) + 1]
    begin, end = once.index('">\n') + 3, once.rindex("</", 0, once.rindex("\n</"))
    line = once[begin:end]
    twice = once[:begin] + line + line + once[end:]
    assert twice.count("parameter name") == 2
    matcher = prototype(structure(obj(a=TEXT))).start()
    matcher.accept([*encoded(twice), EOS])
    assert matcher.error is not None


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array"}, "must be of type object"),
        (obj(("z",), a=TEXT), "'z' is required and not allowed"),
        (obj(("a",), a=TEXT | {"minLength": 3, "maxLength": 2}), 'nothing satisfies .*"a"'),
        (obj(("a",), a={"not": TEXT}), "#/properties/a: 'not'"),
        (obj(("a",), a={"$ref": "#/$defs/missing"}), "leads nowhere"),
        (obj(("a",), a={"$ref": "#/properties/a"}), "circle"),
        (obj(("a",), a={"$ref": "http://example.com/x"}), "within the schema"),
        (obj(a=TEXT) | {"maxProperties": 0}, "maxProperties"),
        (obj(a=TEXT) | {"oneOf": [{}]}, "oneOf"),
        (obj(('a"b',), **{'a"b': TEXT}), "cannot be called"),
        (
            {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}}, **obj(("a",), a={"$ref": "#/$defs/a"})},
            "for ever",
        ),
        ([], "must be an object"),
        ("x", "must be an object"),
    ],
)
def test_a_schema_that_cannot_be_enforced_says_why(schema: Any, word: str) -> None:
    with pytest.raises(GrammarError, match=word.replace("$", r"\$")):
        build_parts(structure(schema), nano())


def test_the_tool_that_is_wrong_is_named() -> None:
    tools = (ToolGrammar("good", "{}", True), ToolGrammar("bad", "[1", True))
    with pytest.raises(GrammarError, match="'bad'"):
        build_parts(Structure(tools=tools, tool_mode="auto"), nano())
