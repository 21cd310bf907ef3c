"""Texts as tool calls write them: bare, without quotes and escapes. What a JSON schema says of a text becomes a
terminal of the matcher's grammars, which know "and" (&), "or" (|) and "not" (~)."""

from __future__ import annotations

from typing import Any

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.patterns import ANY, found_in, term
from deepinfer.grammar.references import resolve
from deepinfer.grammar.schema import Schema
from deepinfer.grammar.sources import literal

MAX_DEPTH = 32  # of schemas inside schemas, references followed
ANY_TEXT = term(ANY)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_DATE = (
    r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# RFC 3339, 4122, 5321, 1123: the common part of each, so that every checker agrees. Others are annotations here.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,8}}",
    "email": rf"[a-zA-Z0-9_+-]{{1,32}}(?:\.[a-zA-Z0-9_+-]{{1,32}}){{0,4}}@{_LABEL}(?:\.{_LABEL}){{1,8}}",
}


def text_terminal(schema: Any, root: Schema, depth: int = 0) -> str | None:
    """The texts that satisfy the schema; None if there are none. `root` is what its references point into."""
    if depth > MAX_DEPTH:
        raise GrammarError(f"schemas are nested more than {MAX_DEPTH} deep, or for ever")
    schema = resolve(schema, root)
    if schema is True:
        return ANY_TEXT
    if schema is False or "string" not in _types(schema):
        return None
    terms: list[str | None] = []
    for key in ("enum", "const"):
        if key in schema:
            terms.append(_listed(schema["enum"] if key == "enum" else [schema[key]]))
    if "minLength" in schema or "maxLength" in schema:
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        if high is not None and low > high:
            return None
        terms.append(term(f"(?s:.{{{low},{'' if high is None else int(high)}}})"))
    if "pattern" in schema:
        terms.append(term(found_in(schema["pattern"])))
    if schema.get("format") in FORMATS:
        terms.append(term(FORMATS[schema["format"]].replace(r"\d", "[0-9]")))
    terms += [text_terminal(part, root, depth + 1) for part in schema.get("allOf", ())]
    if "anyOf" in schema:
        terms.append(_any_of([text_terminal(part, root, depth + 1) for part in schema["anyOf"]]))
    if "oneOf" in schema:
        terms.append(_one_of([text_terminal(part, root, depth + 1) for part in schema["oneOf"]]))
    if None in terms:
        return None
    needed = list(dict.fromkeys(text for text in terms if text is not None and text != ANY_TEXT))
    return " & ".join(f"({text})" for text in needed) if needed else ANY_TEXT


def _types(schema: Schema) -> tuple[str, ...] | list[str]:
    types = schema.get("type", ["string"])
    return [types] if isinstance(types, str) else types


def _listed(values: list[Any]) -> str | None:
    return " | ".join(literal(value) for value in values if isinstance(value, str)) or None


def _any_of(terms: list[str | None]) -> str | None:
    return " | ".join(f"({text})" for text in dict.fromkeys(terms) if text is not None) or None


def _one_of(terms: list[str | None]) -> str | None:
    some = [text for text in terms if text is not None]
    if len(some) < 2:
        return some[0] if some else None
    alone = []
    for number, text in enumerate(some):
        others = " & ".join(f"~({other})" for other in some[:number] + some[number + 1 :])
        alone.append(f"(({text}) & {others})")
    return " | ".join(alone)
