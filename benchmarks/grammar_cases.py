# ruff: noqa: E501  (texts, easier to read unwrapped)
"""Grammars of every kind, of the size that clients send; the tests walk along the same ones that are measured here."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def _object(required: list[str], **properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT: Json = {"type": "string"}
WHOLE: Json = {"type": "integer"}

SCHEMAS: dict[str, Json] = {
    "person": _object(
        ["name", "age", "email"],
        name={"type": "string", "minLength": 1, "maxLength": 40},
        age={"type": "integer", "minimum": 0, "maximum": 130},
        email={"type": ["string", "null"]},
        tags={"type": "array", "items": {"enum": ["new", "vip", "spam"]}, "maxItems": 3},
    ),
    "free text": _object(["answer", "confidence"], answer=TEXT, confidence={"enum": ["low", "medium", "high"]}),
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": -10, "maximum": 10},
        "minItems": 2,
        "maxItems": 5,
    },
    "tree": {
        "$defs": {
            "node": _object(
                ["value", "children"], value=WHOLE, children={"type": "array", "items": {"$ref": "#/$defs/node"}}
            )
        },
        "$ref": "#/$defs/node",
    },
    "union": {
        "anyOf": [
            _object(["kind", "radius"], kind={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
            _object(["kind", "side"], kind={"const": "square"}, side={"type": "integer", "multipleOf": 5}),
            {"type": "null"},
        ]
    },
    "patterns": _object(
        ["phone", "day", "id"],
        phone={"type": "string", "pattern": "^\\+[1-9][0-9]{6,14}$"},
        day={"type": "string", "format": "date"},
        id={"type": "string", "format": "uuid"},
        note={"type": "string", "pattern": "x+y"},
    ),
    "map": {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "boolean"}},
        "maxProperties": 3,
    },
    "named": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{2,8}$"},
        "additionalProperties": {"type": ["integer", "null"]},
        "minProperties": 1,
    },
    "dependent": _object(["total"], total=WHOLE, card=TEXT, billing=TEXT)
    | {"dependentRequired": {"card": ["billing"]}},
    "merged": {
        "allOf": [
            {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]},
            {"properties": {"b": {"type": "string", "maxLength": 5}}, "required": ["b"]},
        ]
    },
    "tuple": {"type": "array", "prefixItems": [WHOLE, TEXT, {"type": "boolean"}], "items": False, "minItems": 2},
    "anything": {},
    "records": {
        "type": "array",
        "minItems": 1,
        "items": _object(
            ["id", "name", "address", "orders"],
            id=WHOLE,
            name=TEXT,
            address=_object(
                ["street", "city", "zip"], street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^\\d{5}$"}
            ),
            orders={
                "type": "array",
                "items": _object(
                    ["sku", "quantity", "price"], sku=TEXT, quantity={**WHOLE, "minimum": 1}, price={"type": "number"}
                ),
            },
        ),
    },
    "wide": _object(
        [f"field_{n}" for n in range(0, 24, 2)],
        **{f"field_{n}": [TEXT, WHOLE, {"type": "boolean"}][n % 3] for n in range(24)},
    ),
}

REGEXES = {
    "date": r"\d{4}-[01]\d-[0-3]\d",
    "email": r"[a-z0-9._]+@[a-z0-9]+(\.[a-z]{2,5})+",
    "anchored": r"^(yes|no)( [a-z]+)?$|^maybe$",
    "free": r"(?s:.)*",
    "not ascii": r"[α-ω]+[^a-z\n]?",
    "slashes": r"/usr/(bin|lib)(/[a-z]+){0,3}",
    "long": r"([a-z]{1,12} ){3,40}end",
}

# GBNF: `root` begins.
GRAMMARS = {
    "select": """root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
""",
    "arithmetic": """# sums and products
root ::= sum
sum ::= product ([-+] product)*
product ::= atom ([*/] atom)*
atom ::= [1-9] [0-9]{0,3} | "(" sum ")"
""",
    "left recursive": """root ::= root "," item | item
item ::= "a" | "[" root "]"
""",
    "palindrome": 'root ::= "a" root "a" | "b" root "b" | "c"',
    "json": r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
""",
}

CHOICES = ["yes", "no", "yes, but", 'a "quoted"\nline', "Zürich", "北京"]

WEATHER = _object(
    ["city"],
    city=TEXT,
    days={"type": "integer", "minimum": 1, "maximum": 14},
    unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
)
BOOK = {
    "$defs": {"guest": _object(["name"], name=TEXT, age=WHOLE)},
    **_object(
        ["hotel", "from", "guests"],
        hotel={"type": "string", "minLength": 2, "maxLength": 30},
        **{"from": {"type": "string", "pattern": "^\\d{4}-\\d\\d-\\d\\d$"}},
        guests={"type": "array", "items": {"$ref": "#/$defs/guest"}, "minItems": 1, "maxItems": 3},
        remark={"type": ["string", "null"], "maxLength": 20},
        vip={"type": "boolean"},
        code={"anyOf": [{"type": "string", "pattern": "^[A-Z]{3}$"}, {"type": "integer", "minimum": 100}]},
    ),
}
TOOLS: dict[str, Json] = {"get_weather": WEATHER, "book": BOOK, "now": _object([])}

# Answers as models write them, for what is measured along real texts.
ANSWERS: dict[str, str] = {
    "person": '{"name": "Grace Hopper", "age": 85, "email": "grace@navy.example", "tags": ["vip", "new"]}',
    "free text": '{"answer": "The capital of France is Paris. It has been the seat of government, with interruptions, '
    'since the tenth century, and it lies on the Seine.", "confidence": "high"}',
    "numbers": "[1.5, -3, 0.25, 10]",
    "tree": '{"value": 1, "children": [{"value": 2, "children": []}, {"value": 33, "children": [{"value": 4, "children": []}]}]}',
    "union": '{"kind": "circle", "radius": 2.5}',
    "patterns": '{"phone": "+4930123456", "day": "2026-11-30", "id": "123e4567-e89b-12d3-a456-426614174000", "note": "a xxy b"}',
    "map": '{"monday": [true, false], "tuesday": [], "every other day": [true]}',
    "named": '{"apples": 3, "pears": null, "plums": 12}',
    "dependent": '{"total": 30, "card": "4111 1111", "billing": "1 Main Street, Springfield"}',
    "merged": '{"a": 7, "b": "short"}',
    "tuple": '[7, "seven", true]',
    "anything": '{"nested": [{"list": [1, 2, 3]}, "text with \\"quotes\\" and é", null, true, -1.5e10]}',
    "records": '[{"id": 1, "name": "Ada Lovelace", "address": {"street": "12 St James Square", "city": "London", "zip": "10115"}, '
    '"orders": [{"sku": "B-100", "quantity": 2, "price": 19.99}, {"sku": "C-7", "quantity": 1, "price": 5}]}]',
    "wide": "{" + ", ".join(f'"field_{n}": ' + ['"some words here"', "123", "true"][n % 3] for n in range(24)) + "}",
}
MATCHES = {
    "date": "2026-11-30",
    "email": "grace.hopper@navy.mil.org",
    "anchored": "yes indeed",
    "free": 'Anything at all, over\nseveral lines: {not} [even] "JSON".',
    "not ascii": "αβγδε!",
    "slashes": "/usr/lib/python/site/packages",
    "long": "the quick brown fox jumps over the lazy dog and runs away to the end",
}
SENTENCES = {
    "select": "SELECT col_1  from table_2  where col_2 = 1 ",
    "arithmetic": "12*(3+45)/(6-7*(8+9))-1234",
    "left recursive": "a,[a,a,[a]],a,[[a]]",
    "palindrome": "abbacabba",
    "json": ANSWERS["person"],
}
CALL_VALUES: list[tuple[str, Json]] = [
    ("get_weather", {"city": "Paris, the one in Texas", "days": 3, "unit": "celsius"}),
    (
        "book",
        {
            "hotel": "Grand Budapest",
            "from": "2026-12-24",
            "guests": [{"name": "Gustave", "age": 45}, {"name": "Zero"}],
            "remark": "late arrival",
            "vip": True,
            "code": "ABC",
        },
    ),
    ("now", {}),
]
