"""Schemas that nobody wrote: whatever they say together, walks along their masks satisfy them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from walks import check_ends, matches_schema, parse_block, prototype, rendered, walk

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar

SEEDS = 48


def any_schema(chance: random.Random, depth: int = 0) -> Any:
    kinds = ["text", "number", "integer", "enum", "several", "plain", "const", "ref"]
    if depth < 3:
        kinds += ["object", "object", "array", "tuple", "any", "all", "map"]
    below = lambda: any_schema(chance, depth + 1)  # noqa: E731
    low, high = sorted((chance.randint(-20, 20), chance.randint(-20, 40)))
    match chance.choice(kinds):
        case "text":
            said = [
                {},
                {"minLength": 1, "maxLength": chance.randint(1, 12)},
                {"pattern": chance.choice(["^[a-f]{1,4}$", "x", "^$|^a"])},
            ]
            return {"type": "string"} | chance.choice(said)
        case "number":
            return {"type": "number"} | chance.choice(
                [{}, {"minimum": low, "maximum": high}, {"exclusiveMinimum": low}]
            )
        case "integer":
            return {"type": "integer"} | chance.choice(
                [{}, {"minimum": low, "maximum": high}, {"multipleOf": chance.randint(2, 9)}]
            )
        case "enum":
            return {
                "enum": chance.sample(
                    ["a", "b c", 'd"e', 1, 2.5, None, True, [1, "x"], {"y": 1}, ""], chance.randint(1, 4)
                )
            }
        case "several":
            return {
                "type": chance.sample(["string", "integer", "null", "boolean", "array"], 2),
                "minLength": 1,
                "maxItems": 2,
                "minimum": low,
            }
        case "const":
            return {"const": chance.choice(["only", 7, None, [], {"z": [None]}])}
        case "ref":
            return {"$ref": f"#/$defs/{chance.choice('ab')}"}
        case "object":
            names = chance.sample(["alpha", "beta", "gamma", "delta"], chance.randint(0, 3))
            body: dict[str, Any] = {"type": "object", "properties": {name: below() for name in names}}
            body["required"] = [name for name in names if chance.random() < 0.5]
            return body | chance.choice(
                [{"additionalProperties": False}, {}, {"additionalProperties": {"type": "integer"}}]
            )
        case "array":
            return {"type": "array", "items": below()} | chance.choice([{}, {"minItems": 1, "maxItems": 3}])
        case "tuple":
            return {
                "type": "array",
                "prefixItems": [below(), below()],
                "items": False,
                "minItems": chance.randint(0, 2),
            }
        case "any":
            return {"anyOf": [below() for _ in range(chance.randint(2, 3))]}
        case "all":
            return {
                "allOf": [
                    {"type": "object", "properties": {"one": below()}, "required": ["one"]},
                    {"properties": {"two": below()}},
                ]
            }
        case "map":
            return {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,5}$"}, "additionalProperties": below()}
    return chance.choice([{"type": "boolean"}, {"type": "null"}, {}, True])


def rooted(schema: Any, chance: random.Random) -> Any:
    """With the definitions that it may refer to; one of them refers to itself."""
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/b"}, "n": any_schema(chance, 3)},
        "additionalProperties": False,
    }
    definitions = {"a": {"type": "string", "maxLength": 4}, "b": node}
    return {"$defs": definitions} | (schema if isinstance(schema, dict) else {})


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_satisfy_any_schema(seed: int) -> None:
    chance = random.Random(seed)
    schema = rooted(any_schema(chance), chance)
    try:
        start = prototype(Structure(content=Grammar("json_schema", json.dumps(schema)))).start()
    except GrammarError as error:
        assert "nsatisfiable" in error.message or "no text" in error.message, error
        return
    for _ in range(2):
        check_ends(walk(start, chance, 160), matches_schema(schema))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_arguments_satisfy_any_schema(seed: int) -> None:
    chance = random.Random(seed)
    names = ["city", "count", "either", "more"][: chance.randint(1, 4)]
    body = {
        "type": "object",
        "properties": {name: any_schema(chance, 1) for name in names},
        "required": [name for name in names if chance.random() < 0.5],
        "additionalProperties": chance.choice([False, False, True]),
    }
    schema = rooted(body, chance)
    tools = (ToolGrammar("f", json.dumps(schema), True),)
    try:
        start = prototype(Structure(tools=tools, tool_mode="required", parallel_calls=False)).start()
    except GrammarError as error:
        assert "satisf" in error.message, error
        return
    for _ in range(2):
        walked = walk(start, chance, 260)
        if walked.ended:
            ((_, arguments),) = parse_block(rendered(walked.ids))
            jsonschema.validate(arguments, schema, cls=jsonschema.Draft202012Validator)
