"""Sizes are tested before anything parses: no text of a client reaches a parser that it could exhaust."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from deepinfer.grammar import limits
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.limits import check_limits
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar


def refused(structure: Structure) -> str:
    with pytest.raises(GrammarError) as caught:
        check_limits(structure)
    return caught.value.kind


TOO_LARGE = {
    "schema": Structure(content=Grammar("json_schema", '{"const": "' + "x" * limits.SCHEMA_BYTES + '"}')),
    "schema of two-byte characters": Structure(
        content=Grammar("json_schema", '"' + "é" * (limits.SCHEMA_BYTES // 2) + '"')
    ),
    "deep schema": Structure(content=Grammar("json_schema", "[" * 65 + "]" * 65)),
    "deep schema behind a text": Structure(content=Grammar("json_schema", '{"\\"": ' + "{" * 64)),
    "regex": Structure(content=Grammar("regex", "a" * (limits.REGEX_BYTES + 1))),
    "deep regex": Structure(content=Grammar("regex", "(" * 65 + ")" * 65)),
    "deep regex behind a class": Structure(content=Grammar("regex", "[)]" + "(?:[)]" * 65)),
    "ebnf": Structure(content=Grammar("ebnf", 'root ::= "' + "a" * limits.EBNF_BYTES + '"')),
    "deep ebnf": Structure(content=Grammar("ebnf", "root ::= " + "(" * 65 + ")" * 65)),
    "deep ebnf behind a text": Structure(content=Grammar("ebnf", 'start: ")" /\\)/ ' + '(")" ' * 65)),
    "many rules": Structure(content=Grammar("ebnf", "a: b\n" * (limits.EBNF_RULES + 1))),
    "many choices": Structure(content=Grammar("choice", json.dumps(["a" * 100] * 4000))),
    "many tools": Structure(tools=tuple(ToolGrammar(f"f{n}") for n in range(129)), tool_mode="auto"),
    "long name": Structure(tools=(ToolGrammar("f" * 129),), tool_mode="auto"),
    "tools together": Structure(
        tools=tuple(ToolGrammar(f"f{n}", json.dumps({"const": "x" * 200_000})) for n in range(6)), tool_mode="auto"
    ),
    "prefix": Structure(content=Grammar("json_object"), prefix=" " * (limits.PREFIX_BYTES + 1)),
}
SENSELESS = {
    "lone surrogate": Structure(content=Grammar("regex", "a\ud800")),
    "required without tools": Structure(tool_mode="required"),
    "required behind a prefix": Structure(tools=(ToolGrammar("f"),), tool_mode="required", prefix="a"),
    "negative budget": Structure(thinking=True, thinking_budget=-1),
    "name with a quote": Structure(tools=(ToolGrammar('a"b'),), tool_mode="auto"),
    "name with markup": Structure(tools=(ToolGrammar("a>b"),), tool_mode="auto"),
    "no name": Structure(tools=(ToolGrammar(""),), tool_mode="auto"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_refused_as_such(name: str) -> None:
    assert refused(TOO_LARGE[name]) == "too_large"


@pytest.mark.parametrize("name", SENSELESS)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    assert refused(SENSELESS[name]) == "invalid"


@pytest.mark.parametrize(
    "structure",
    [
        Structure(content=Grammar("json_schema", "[" * 64 + "]" * 64)),
        Structure(content=Grammar("json_schema", json.dumps({"const": "[" * 1000}))),
        Structure(content=Grammar("regex", r"\(" * 100 + "[(]" * 100)),
        Structure(content=Grammar("ebnf", 'root ::= "(((((" ' * 20 + "# " + "(" * 100)),
        Structure(tools=(ToolGrammar("ns::get_weather-2.0"),), tool_mode="required", thinking=True, thinking_budget=0),
        Structure(),
    ],
)
def test_brackets_that_nest_nothing_do_not_count(structure: Structure) -> None:
    check_limits(structure)


def test_the_test_of_the_largest_text_takes_no_time_to_speak_of() -> None:
    """Linear whatever the text: quotes without an end, escapes, brackets. Steps are counted by the size alone."""
    for unit in ('"', "\\", '\\"', "[", "(", "'", "/", '"\n', "[^]", "{", "#", "a"):
        for kind, size in (
            ("json_schema", limits.SCHEMA_BYTES),
            ("regex", limits.REGEX_BYTES),
            ("ebnf", limits.EBNF_BYTES),
        ):
            text = unit * (size // len(unit))
            start = time.process_time()
            with contextlib.suppress(GrammarError):
                check_limits(Structure(content=Grammar(kind, text)))  # type: ignore[arg-type]
            assert time.process_time() - start < 20, f"{kind} of {unit!r}"  # quadratic would be minutes
