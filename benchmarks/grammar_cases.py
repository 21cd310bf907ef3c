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
