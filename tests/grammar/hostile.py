"""Grammars that somebody sends to break a server: by seed, of every kind that was thought of."""

# ruff: noqa: E501  (grammars, easier to read unwrapped)
from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from grammar_cases import GRAMMARS, REGEXES, SCHEMAS, TOOLS

from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar

Maker = Callable[[random.Random], Structure]


def hostile(seed: int) -> Structure:
    chance = random.Random(seed)
    return MAKERS[seed % len(MAKERS)](chance)


def _content(kind: Any, source: str) -> Structure:
    return Structure(content=Grammar(kind, source))


def _schema(value: Any) -> Structure:
    return _content("json_schema", json.dumps(value))


def mutated(text: str, chance: random.Random) -> str:
    """A text with some of its characters gone, doubled, swapped or replaced."""
    chars = list(text)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(chars) + 1)
        match chance.randrange(4):
            case 0:
                del chars[place : place + chance.randint(1, 8)]
            case 1:
                chars[place:place] = chars[place : place + chance.randint(1, 20)] * chance.randint(1, 3)
            case 2:
                chars[place:place] = chance.choice(
                    ['"', "\\", "{", "}", "(", ")", "[", "|", "\x00", "\ud800", "é", "/", "<", "%"]
                )
            case 3:
                chars[place : place + 1] = chance.choice(
                    ["0", "-1", "1e999", "null", "true", "[]", "{}", "99999999999999999999"]
                )
    return "".join(chars)


def mutated_schema(chance: random.Random) -> Structure:
    return _content("json_schema", mutated(json.dumps(chance.choice(list(SCHEMAS.values()))), chance))


def mutated_regex(chance: random.Random) -> Structure:
    return _content("regex", mutated(chance.choice(list(REGEXES.values())), chance))


def mutated_gbnf(chance: random.Random) -> Structure:
    return _content("ebnf", mutated(chance.choice(list(GRAMMARS.values())), chance))


def wrong_types(chance: random.Random) -> Structure:
    """A schema whose keywords hold what they may not."""
    keywords = [
        "type", "properties", "required", "additionalProperties", "patternProperties", "enum", "const", "minLength",
        "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf", "items", "prefixItems", "minItems",
        "maxItems", "uniqueItems", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$defs", "$id", "$anchor",
        "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
        "discriminator", "minProperties", "x-guidance", "contains", "definitions",
    ]  # fmt: skip
    values = [
        None,
        True,
        False,
        -1,
        0,
        1.5,
        10**30,
        "",
        "string",
        "#",
        [],
        {},
        ["a"],
        [1],
        [{}],
        {"a": 1},
        {"": {}},
        [None],
        [[]],
        {"$ref": "#"},
    ]
    body = {chance.choice(keywords): chance.choice(values) for _ in range(chance.randint(1, 4))}
    if chance.random() < 0.5:
        body = {"type": "object", "properties": {"a": body}, "required": ["a"]}
    if chance.random() < 0.4:
        return Structure(tools=(ToolGrammar("f", json.dumps(body), True),), tool_mode="required")
    return _schema(body)


def huge(chance: random.Random) -> Structure:
    n = chance.choice([100, 2_000, 20_000])
    text = {"type": "string"}
    return chance.choice(
        [
            lambda: _schema({"type": "object", "properties": {f"p{i}": text for i in range(n)}, "required": [f"p{i}" for i in range(n)]}),
            lambda: _schema({"enum": [f"value {i} {chance.random()}" for i in range(n)]}),
            lambda: _schema({"anyOf": [{"type": "object", "properties": {f"p{i}": text}, "required": [f"p{i}"]} for i in range(n)]}),
            lambda: _schema({"type": "array", "minItems": n * 100, "maxItems": n * 1000}),
            lambda: _schema({"type": "string", "minLength": n * 10, "maxLength": n * 1000}),
            lambda: _schema({"const": "x" * (n * 20)}),
            lambda: _schema({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(min(n, 40))], "type": "integer"}),
            lambda: _content("choice", json.dumps([f"{chance.random()}" for _ in range(n)])),
            lambda: _content("regex", "|".join(f"{chance.random()}" for _ in range(n))),
            lambda: _content("regex", "[a-z]" * n),
            lambda: _content("ebnf", "root ::= " + " | ".join(f'"{chance.random()}"' for _ in range(n))),
            lambda: _content("ebnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(min(n, 900))) + f"r{min(n, 900)} ::= [a-z]"),
            lambda: _content("ebnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | r{i + 2}\n" for i in range(min(n, 900))) + f'r{min(n, 900)} ::= "a"\nr{min(n, 900) + 1} ::= "b" root'),
            lambda: Structure(tools=tuple(ToolGrammar(f"tool_{i}", json.dumps(TOOLS["book"]), True) for i in range(n // 20)), tool_mode="auto"),
            lambda: Structure(tools=(ToolGrammar("f", json.dumps({"type": "object", "properties": {f"p{i}": text for i in range(n)}}), True),), tool_mode="required"),
        ]
    )()  # fmt: skip


def explosive_regex(chance: random.Random) -> Structure:
    n = chance.choice([5, 30, 200, 1000])
    return _content(
        "regex",
        chance.choice(
            [
                f"(a|b)*a(a|b){{{n}}}",
                f"(?s:.*)a(?s:.{{{n}}})b(?s:.*)",
                f"((a{{1,{n}}}){{1,{n}}}){{1,{n}}}",
                "(" * n + "a" + ")*" * n,
                "((a+)+)+$",
                f"(.*){{{n}}}x",
                "|".join(f"(?s:.*)x{i}(?s:.*)y" for i in range(n)),
                f"(a?){{{n}}}(a){{{n}}}",
                f"\\p{{L}}{{{n}}}[^\\p{{Lu}}]*",
                f"([a-z]{{1,{n}}}[0-9]{{1,{n}}}){{1,{n}}}",
                "".join(f"(?:{chr(97 + i % 26)}|(?s:.*))" for i in range(n)),
                r"(?i:" + "straße" * min(n, 100) + ")",
                "a{1000000}",
                "(?x) a # comment (\n b",
                r"(a)\1",
                r"(?<=a)b",
                r"[^\x{0}-\x{10FFFF}]",
                "a\\",
            ]
        ),
    )


def circular(chance: random.Random) -> Structure:
    """References that lead in circles, and texts that can never end."""
    inner = chance.choice(
        [
            {"$ref": "#/$defs/a"},
            {"$ref": "#/$defs/b"},
            {"allOf": [{"$ref": "#/$defs/a"}]},
            {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
            {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/a"}},
                "required": ["x"],
                "additionalProperties": False,
            },
            {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
            {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2, "maxItems": 2},
            {"$ref": "#/$defs/a/$defs/a"},
            {"$ref": "#"},
            {"$ref": "#/properties/p"},
            {"$ref": "http://example.com/schema"},
            {"$ref": "#/$defs/missing"},
            {"$ref": "#/%"},
        ]
    )
    root = {
        "$defs": {"a": inner, "b": {"$ref": "#/$defs/a"}},
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/b"}},
        "required": ["p"],
    }
    if chance.random() < 0.3:
        root = {"$defs": root["$defs"], "$ref": "#/$defs/a"}
    if chance.random() < 0.4:
        return Structure(tools=(ToolGrammar("f", json.dumps(root), True),), tool_mode="auto")
    return _schema(root)


def deep(chance: random.Random) -> Structure:
    n = chance.choice([30, 60, 70, 1_000, 60_000])
    return chance.choice(
        [
            lambda: _content("json_schema", '{"items":' * n + "{}" + "}" * n),
            lambda: _content("json_schema", '{"type":"object","required":["a"],"properties":{"a":' * min(n, 30) + "{}" + "}}" * min(n, 30)),
            lambda: _content("json_schema", "[" * n),
            lambda: _content("json_schema", '{"anyOf":[' * (n // 2) + "{}" + "]}" * (n // 2)),
            lambda: _content("json_schema", '{"const":' + "[" * n + "]" * n + "}"),
            lambda: _content("regex", "(" * n + "a" + ")" * n),
            lambda: _content("regex", "(?:a|" * n + "a" + ")*" * n),
            lambda: _content("ebnf", "root ::= " + "(" * n + '"a"' + ")" * n),
            lambda: _content("ebnf", "start: " + "(" * n + '"a"' + ")" * n),
            lambda: _content("ebnf", "start: " + "[" * n + '"a"' + "]" * n),
            lambda: _content("ebnf", "root ::= " + '"a"' + "*" * n),
            lambda: _content("ebnf", 'start: "a"' + "?" * n),
            lambda: Structure(tools=(ToolGrammar("f", '{"properties":{"a":' + '{"allOf":[' * (n // 3) + "{}" + "]}" * (n // 3) + "}}", True),), tool_mode="required"),
        ]
    )()  # fmt: skip


def contradictory(chance: random.Random) -> Structure:
    return _schema(
        chance.choice(
            [
                {"type": "integer", "minimum": 5, "maximum": 3},
                {"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7},
                {"type": "string", "minLength": 5, "maxLength": 3},
                {"type": "string", "pattern": "^a{3}$", "maxLength": 2},
                {"type": "string", "enum": ["abc"], "pattern": "^x"},
                {"type": "string", "format": "date", "maxLength": 3},
                {"type": "array", "minItems": 3, "maxItems": 1},
                {"type": "array", "items": False, "minItems": 1},
                {"type": "object", "properties": {"a": False}, "required": ["a"]},
                {"type": "object", "additionalProperties": False, "required": ["a"]},
                {"type": "object", "minProperties": 2, "maxProperties": 1},
                {"type": "integer", "enum": ["a"]},
                {"const": 1, "enum": [2]},
                {"allOf": [{"type": "integer"}, {"type": "string"}]},
                {"anyOf": []},
                {"anyOf": [False]},
                {"oneOf": [{}, {}]},
                {"not": {}},
                {"type": []},
                {"enum": []},
                {"type": "number", "multipleOf": 0},
                {"type": "number", "minimum": 1e308, "exclusiveMinimum": 1e309},
            ]
        )
    )


def endless_grammar(chance: random.Random) -> Structure:
    return _content(
        "ebnf",
        chance.choice(
            [
                "root ::= root",
                'root ::= "a" root',
                'root ::= root "a"',
                'root ::= a\na ::= b\nb ::= a | "x"',
                'root ::= ("")* "a"',
                'root ::= (("a"?)*)* "b"',
                'root ::= "a"{1000000}',
                'root ::= ("a"{1000}){1000}',
                'root ::= ([a-z]{0,500} ","){0,500}',
                'root ::= str tail\nstr ::= [a-z]*\ntail ::= "abc" root | "."',
                'start: "a" start',
                'start: start "a"',
                "start: A B\nA: /a*/\nB: /ab/",
                "start: a\na: b\nb: a",
                "start: A\nA: B\nB: A",
                "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60)) + "A60: /[a-z]/",
                'root ::= "a"' + "*" * 5 + " | root root root",
                'start: <[5]> "a"',
                "start: <think>",
                '%llguidance {"no_forcing": false, "allow_invalid_utf8": true}\nstart: "a"',
                'start: %json {"type": "object", "x-guidance": {"whitespace_flexible": 5}}',
                "start: %regex {}",
                "start: /(?s:.)*/ & ~/(?s:.)*/",
                'start: "a"~1..1000000',
                "%import common.WS\n%ignore WS\nstart: WS*",
                "start: x\nx[max_tokens=0]: /.*/",
                "start: /a*/ /a*/ /a*/ /a*/ /a*/ /a*/ /a*/ /b/",
                'start: (a | a a | a a a)* "x"\na: "y" | a a',
                "",
                "\x00",
                "root ::=",
                "::=",
                "start:",
                'start: "\\ud800"',
                'root ::= "\\uD800"',
                "root ::= [z-a]",
                "root ::= []",
            ]
        ),
    )


def odd_text(chance: random.Random) -> Structure:
    text = "".join(
        chr(chance.choice([0, 7, 10, 34, 92, 0x7F, 0x80, 0xD800, 0xDFFF, 0xFFFE, 0x10FFFF, 97, 47, 123]))
        for _ in range(chance.randint(0, 40))
    )
    return chance.choice(
        [
            lambda: _content(chance.choice(["json_schema", "regex", "ebnf", "choice"]), text),
            lambda: _schema({"const": text, "description": text}),
            lambda: _schema({"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}),
            lambda: _schema({"type": "string", "pattern": text}),
            lambda: _content("choice", json.dumps([text, text + "x"])),
            lambda: Structure(tools=(ToolGrammar(text),), tool_mode="auto"),
            lambda: Structure(
                tools=(ToolGrammar("f", json.dumps({"properties": {text: {"enum": [text]}}}), True),),
                tool_mode="required",
            ),
            lambda: Structure(content=Grammar("json_object"), prefix=text),
            lambda: Structure(content=Grammar("regex", "(?s:.)*"), prefix=text),
        ]
    )()


def mutated_tools(chance: random.Random) -> Structure:
    name = chance.choice(list(TOOLS))
    schema = mutated(json.dumps(TOOLS[name]), chance)
    mode = chance.choice(["auto", "required"])
    return Structure(tools=(ToolGrammar(name, schema, True), ToolGrammar("g", schema)), tool_mode=mode)  # type: ignore[arg-type]


MAKERS: list[Maker] = [
    mutated_schema, wrong_types, huge, explosive_regex, circular, deep, contradictory, endless_grammar, odd_text,
    mutated_regex, mutated_gbnf, mutated_tools,
]  # fmt: skip
