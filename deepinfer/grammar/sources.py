"""Grammars of content, written in the one language that the matcher takes: its dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Grammar

# The matcher would otherwise look for text that is forced, and pin its tokenization: a grammar that goes on for ever
# ("a" and again "a") would keep it busy for ever, and drafts that split a forced text otherwise would be refused.
HEADER = '%llguidance {"no_forcing": true}\n'
# Whitespace between the parts of a JSON text: a space or two, or a line break with its indentation. Without a cap a
# model can write spaces until its budget ends.
WHITESPACE = r"[ ]{1,2}|\r?\n[ \t]{0,64}"
FLEXIBLE: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}


def content_lark(grammar: Grammar) -> str:
    """GrammarError for a source that does not parse as what it should be."""
    match grammar.kind:
        case "json_object":
            return HEADER + "start: " + json_rule({"type": "object"})
        case "json_schema":
            return HEADER + "start: " + json_rule(parse_schema(grammar.source))
        case "regex":
            return HEADER + "start: " + regex_rule(parse_regex(grammar.source))
        case "choice":
            return HEADER + "start: CHOICE\nCHOICE: " + " | ".join(map(literal, parse_choices(grammar.source)))
        case "ebnf":
            return HEADER + ebnf_lark(grammar.source)


def parse_schema(source: str) -> dict[str, Any]:
    """A JSON schema from its text; `true` is the empty schema."""
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("the JSON schema `false` allows nothing")
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object, true or false")
    return schema


def parse_regex(source: str) -> str:
    """The pattern, if it ends where its text ends."""
    if re.fullmatch(r"(?:\\.|[^\\])*+", source, re.DOTALL) is None:
        raise GrammarError("the regex ends in a lone backslash")
    return source


def parse_choices(source: str) -> list[str]:
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the choices are not a JSON list: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise GrammarError("the choices must be a list of texts, none of them empty")
    return list(dict.fromkeys(choices))


def json_rule(schema: dict[str, Any], options: dict[str, Any] = FLEXIBLE) -> str:
    """A place in a rule where a JSON text of this schema stands. options: of the matcher's "x-guidance"; a caller's own
    would set limits that are not his to set."""
    return "%json " + json.dumps({**schema, "x-guidance": options})


def regex_rule(pattern: str) -> str:
    """A place in a rule where a text stands that all of this pattern matches."""
    return "/" + re.sub(r"\\.|/", _escape_slash, pattern, flags=re.DOTALL) + "/"


def literal(text: str) -> str:
    """A place in a rule where exactly this text stands."""
    return json.dumps(text)


def ebnf_lark(source: str) -> str:
    try:
        return any_to_lark(source).replace("%llguidance {}", "")
    except Exception as error:  # the converter raises bare Exception, and IndexError at the end of its input
        raise GrammarError(f"the grammar is neither GBNF nor Lark: {error}") from None


def _escape_slash(match: re.Match[str]) -> str:
    return "\\/" if match[0] == "/" else match[0]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
