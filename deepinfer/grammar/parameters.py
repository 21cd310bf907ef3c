"""The parameters of one call: each is `<DSML parameter name="KEY" string="true|false">VALUE</DSML parameter>`, a text
as it is or another value in JSON. Rules here reach from behind the call's opening line to the "/" of its closing token.

A call without arguments has an empty line, as the prompt's template writes it.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.patterns import found_in, term
from deepinfer.grammar.raw_text import ANY_TEXT, text_terminal
from deepinfer.grammar.references import resolve, with_references
from deepinfer.grammar.schema import Schema, enforceable, parse_schema
from deepinfer.grammar.sources import json_rule, literal
from deepinfer.grammar.structure import ToolGrammar

# A value in JSON is written as the prompt's template would write it, so that a call which comes back as history renders
# to the same text.
SEPARATORS: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
NOT_TEXT = ["object", "array", "number", "boolean", "null"]
KEY_PATTERN = r'[^"\r\n]{1,256}'
# What may stand in the schema of all arguments. Values of parameters may use all that the matcher knows.
TOP_KEYS = {
    "type", "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    "title", "description", "$schema", "$id", "$comment", "$defs", "definitions", "default", "examples", "anyOf",
    "allOf", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
DECLARING = {"properties", "required", "patternProperties", "allOf", "anyOf"}


def any_parameters(mark: str) -> list[str]:
    """Rules for tools whose arguments are not enforced: any keys, any values. mark: the DSML token."""
    value = json_rule({"type": NOT_TEXT}, SEPARATORS)
    return [
        'any_parameters: "\\n</" | "<" any_parameter+ "/"',
        f'any_parameter: {mark} ANY_KEY ("true\\">" ANY_TEXT | "false\\">" {value} "</") {mark} " parameter>\\n<"',
        f'ANY_KEY: " parameter name=\\"" {term(KEY_PATTERN)} "\\" string=\\""',
        f'ANY_TEXT: {ANY_TEXT} "</"',  # the closing token follows, and no text spells it
    ]


def declared_parameters(tool: ToolGrammar, mark: str, name: str) -> tuple[str, list[str]]:
    """(name of a rule, the rules that it needs) for a tool whose arguments must satisfy its schema, in the order in
    which the schema declares them; others only where the schema says so itself. Names of rules begin with `name`.

    GrammarError for a schema that cannot be enforced.
    """
    what = f"the parameters of tool {tool.name!r}"
    root = enforceable(parse_schema(tool.schema, what) if tool.schema else {}, f"{what}, #")
    builder = _Builder(root, mark, name, what)
    return builder.arguments(root), builder.rules


class _Builder:
    """Collects the rules of one tool."""

    def __init__(self, root: Schema, mark: str, name: str, what: str) -> None:
        self.root = root
        self.mark = mark
        self.name = name
        self.what = what
        self.rules: list[str] = []

    def arguments(self, schema: Schema) -> str:
        cases = _merged(schema, self.root, self.what)
        return self._rule("case", " | ".join(self._sequence(case) for case in cases))

    def _sequence(self, case: Schema) -> str:
        """All parameters of one case, each at most once."""
        properties: dict[str, Any] = {key: value for key, value in case["properties"].items() if value is not False}
        required = set(case["required"])
        extra = case["additionalProperties"]
        undeclared = required - set(properties)
        if undeclared and extra in (None, False):
            raise GrammarError(f"{self.what}: {sorted(undeclared)[0]!r} is required and not allowed")
        properties |= dict.fromkeys(sorted(undeclared), extra)
        steps = [
            (self._parameter(literal_key(key, self.what), value), key in required) for key, value in properties.items()
        ]
        others = self._others(case, list(properties))
        rest = self._rule("rest", f"({' | '.join(others)})*") if others else ""
        if not any(needed for _, needed in steps):
            # At least one, or the empty line: "first" has met none so far, "more" has.
            first = self._rule("first", f"({' | '.join(others)})+") if others else None
            more = rest
            for step, _ in reversed(steps):
                first = self._rule("first", f"{step} {more}" + (f" | {first}" if first else ""))
                more = self._rule("more", f"{step}? {more}")
            return self._rule("some", '"\\n</"' + (f' | "<" {first} "/"' if first else ""))
        sequence = " ".join(step if needed else f"{step}?" for step, needed in steps)
        return self._rule("some", f'"<" {sequence} {rest} "/"')

    def _others(self, case: Schema, declared: list[str]) -> list[str]:
        """Parameters that are allowed without being declared."""
        fresh = f"{term(KEY_PATTERN)} & ~({' | '.join(map(literal, declared))})" if declared else term(KEY_PATTERN)
        others = []
        patterns = [term(found_in(pattern)) for pattern in case["patternProperties"]]
        for pattern, value in zip(patterns, case["patternProperties"].values(), strict=True):
            if len(patterns) > 1:
                raise GrammarError(f"{self.what}: several patternProperties cannot be enforced")
            others.append(self._parameter(f"({fresh} & {pattern})", value))
        if case["additionalProperties"] not in (None, False):
            fresh += "".join(f" & ~({pattern})" for pattern in patterns)
            others.append(self._parameter(f"({fresh})", case["additionalProperties"]))
        return [other for other in others if other]

    def _parameter(self, key: str, schema: Any) -> str:
        """Rule of one parameter with any of the keys that a terminal allows."""
        values = []
        text = text_terminal(schema, self.root)
        if text is not None:
            terminal = self._rule("TEXT", f'({text}) "</"')
            values.append(f'"true\\">" {terminal}')
        if (value := self._json(schema)) is not None:
            values.append(f'"false\\">" {value} "</"')
        if not values:
            raise GrammarError(f"{self.what}: nothing satisfies the schema of parameter {key}")
        terminal = self._rule("KEY", f'" parameter name=\\"" {key} "\\" string=\\""')
        return self._rule("parameter", f'{self.mark} {terminal} ({" | ".join(values)}) {self.mark} " parameter>\\n<"')

    def _json(self, schema: Any) -> str | None:
        """Values other than texts; None if the schema allows only texts."""
        if schema is True:
            return json_rule({"type": NOT_TEXT}, SEPARATORS)
        if schema.get("type") == "string":
            return None
        part = with_references({"allOf": [schema, {"type": NOT_TEXT}]}, self.root)
        rule = json_rule(part, SEPARATORS)
        if "type" not in schema or isinstance(schema["type"], list):
            failed, reasons = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(f"start: {rule}"))
            if failed and "nsatisfiable" in reasons[0]:
                return None
        return rule

    def _rule(self, kind: str, body: str) -> str:
        name = f"{self.name}_{kind}_{len(self.rules)}"
        name = name.upper() if kind.isupper() else name
        self.rules.append(f"{name}: {body}")
        return name


def literal_key(key: str, what: str) -> str:
    if not key or any(char in key for char in '"\r\n'):
        raise GrammarError(f"{what}: a parameter cannot be called {key!r}")
    return literal(key)


def _merged(schema: Any, root: Schema, what: str) -> list[Schema]:
    """The cases of a schema of all arguments: each with properties, required, patternProperties and
    additionalProperties (None = nothing said), references followed and allOf joined. A schema that declares nothing
    allows everything."""
    schema = resolve(schema, root)
    if schema is True:
        schema = {"additionalProperties": True}
    if not isinstance(schema, dict):
        raise GrammarError(f"{what}: nothing satisfies the schema")
    if unknown := sorted(set(schema) - TOP_KEYS):
        raise GrammarError(f"{what}: {unknown[0]!r} cannot be enforced for all arguments together")
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise GrammarError(f"{what}: must be of type object")
    own: Schema = {
        "properties": schema.get("properties", {}),
        "required": list(schema.get("required", [])),
        "patternProperties": schema.get("patternProperties", {}),
        "additionalProperties": schema.get("additionalProperties", None if set(schema) & DECLARING else True),
    }
    if schema.get("minProperties", 0) > len(own["required"]) or "maxProperties" in schema:
        raise GrammarError(f"{what}: minProperties and maxProperties cannot be enforced for all arguments together")
    cases = [own]
    for part in schema.get("allOf", []):
        cases = [_both(one, other, what) for one in cases for other in _merged(part, root, what)]
    if "anyOf" in schema:
        branches = [case for part in schema["anyOf"] for case in _merged(part, root, what)]
        cases = [_both(one, other, what) for one in cases for other in branches]
    if len(cases) > 64:
        raise GrammarError(f"{what}: anyOf has more than 64 cases", "too_large")
    return cases


def _both(one: Schema, other: Schema, what: str) -> Schema:
    """What satisfies two schemas of all arguments."""
    properties = dict(one["properties"])
    for key, value in other["properties"].items():
        properties[key] = {"allOf": [properties[key], value]} if key in properties else value
    for mine, yours in ((one, other), (other, one)):
        closed = mine["additionalProperties"]
        if closed is False and any(key not in mine["properties"] for key in yours["properties"]):
            raise GrammarError(f"{what}: additionalProperties false beside properties of another part of the schema")
    if one["patternProperties"] or other["patternProperties"]:
        raise GrammarError(f"{what}: patternProperties in a part of the schema cannot be enforced")
    said = [case["additionalProperties"] for case in (one, other) if case["additionalProperties"] is not None]
    if len(said) > 1 and said[0] != said[1]:
        raise GrammarError(f"{what}: additionalProperties in several parts of the schema cannot be enforced")
    required = list(dict.fromkeys([*one["required"], *other["required"]]))
    return {
        "properties": properties,
        "required": required,
        "patternProperties": {},
        "additionalProperties": said[0] if said else None,
    }
