"""Grammars of content, written in the one language that the matcher takes: its dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import Any

from deepinfer.grammar import gbnf, gbnf_lark, patterns
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.limits import EBNF_TEXT
from deepinfer.grammar.schema import enforceable, parse_schema
from deepinfer.grammar.structure import Grammar

# The matcher would otherwise look for text that is forced, and pin its tokenization: a grammar that goes on for ever
# ("a" and again "a") would keep it busy for ever, and drafts that split a forced text otherwise would be refused.
HEADER = '%llguidance {"no_forcing": true}\n'
# Whitespace between the parts of a JSON text: a space or two, or a line break with its indentation. Without a cap a
# model can write spaces until its budget ends.
WHITESPACE = r"[ ]{1,2}|\r?\n[ \t]{0,64}"
FLEXIBLE: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
OBJECT = {"type": "object"}


def content_lark(grammar: Grammar) -> str:
    """GrammarError for a source that does not parse as what it should be."""
    match grammar.kind:
        case "json_object":
            return f"{HEADER}start: {json_rule(OBJECT)}\n"
        case "json_schema":
            return f"{HEADER}start: {json_rule(enforceable(parse_schema(grammar.source)))}\n"
        case "regex":
            return f"{HEADER}start: TEXT\nTEXT: {patterns.term(patterns.whole(grammar.source))}\n"
        case "choice":
            return f"{HEADER}start: TEXT\nTEXT: {' | '.join(map(literal, parse_choices(grammar.source)))}\n"
        case "ebnf":
            return ebnf_lark(grammar.source)


def parse_choices(source: str) -> list[str]:
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the choices are not a JSON list: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise GrammarError("the choices must be a list of texts, none of them empty")
    return list(dict.fromkeys(choices))


def json_rule(schema: dict[str, Any], options: dict[str, Any] = FLEXIBLE) -> str:
    """A place in a rule where a JSON text of this schema stands. options: of the matcher's "x-guidance"."""
    return "%json " + json.dumps({**schema, "x-guidance": options})


def literal(text: str) -> str:
    """A place in a rule where exactly this text stands."""
    return json.dumps(text)


def ebnf_lark(source: str) -> str:
    """GBNF or Lark. A client's Lark may neither name control tokens nor set the matcher's options; our options stand
    behind it, so that errors name the client's own lines."""
    if gbnf.is_gbnf(source):
        return HEADER + gbnf_lark.lark(gbnf.parse(source))
    bare = EBNF_TEXT.sub('""', source)
    if "<" in bare:
        raise GrammarError("a grammar cannot name tokens: texts and patterns only")
    if re.search(r"%llguidance(?!\s*\{\s*\})", bare):
        raise GrammarError("options of %llguidance cannot be set")
    return re.sub(r"(?m)^[ \t]*%llguidance\s*\{\s*\}", "", source) + "\n" + HEADER
