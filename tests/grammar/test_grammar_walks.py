"""Whatever a model picks among the tokens that are allowed, the answer is what was asked for."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from grammar import cases as measured_cases
from grammar_cases import CHOICES, GRAMMARS, REGEXES, SCHEMAS, TOOLS
from walks import EOS, MARK, allows, check_ends, encoded, matches_schema, nano, parse_block, prototype, rendered, walk

from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar

WALKS = 6


def walks(structure: Structure, count: int = WALKS, most: int = 300):  # type: ignore[no-untyped-def]
    start = prototype(structure).start()
    found = [walk(start, random.Random(seed), most) for seed in range(count)]
    assert sum(walked.ended for walked in found) >= count // 5, "walks that never end prove nothing"
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_allowed_tokens_make_json_of_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    most = 800 if name == "wide" else 300
    for walked in walks(Structure(content=Grammar("json_schema", json.dumps(schema))), most=most):
        check_ends(walked, matches_schema(schema))


def test_a_json_object_is_any_object_and_nothing_behind_it() -> None:
    for walked in walks(Structure(content=Grammar("json_object"))):
        check_ends(walked, matches_schema({"type": "object"}))
        if walked.ended:
            assert not any(walked.ends[:-1]), "an object ends at its brace, and then the answer ends"


def test_a_model_that_likes_spaces_cannot_fill_the_budget_with_them() -> None:
    matcher = prototype(Structure(content=Grammar("json_object"))).start()
    matcher.accept(nano().tokenize("{"))
    blank = [token for token in range(8192) if nano().token_bytes(token) and not nano().token_bytes(token).strip()]
    spaces = 0
    while allowed := [token for token in blank if allows(matcher.masks([])[0], token)]:
        token = min(allowed, key=lambda t: len(nano().token_bytes(t)))
        spaces += len(nano().token_bytes(token))
        matcher.accept([token])
        assert spaces <= 66
    assert spaces > 0


@pytest.mark.parametrize("name", REGEXES)
def test_any_allowed_tokens_match_the_regex(name: str) -> None:
    pattern = re.compile(REGEXES[name])
    for walked in walks(Structure(content=Grammar("regex", REGEXES[name]))):
        check_ends(walked, lambda text: pattern.fullmatch(text) is not None)


def test_any_allowed_tokens_are_one_of_the_choices() -> None:
    seen = set()
    for walked in walks(Structure(content=Grammar("choice", json.dumps(CHOICES))), count=40):
        check_ends(walked, lambda text: text in CHOICES)
        seen.add(rendered(walked.ids))
    assert seen == set(CHOICES)


def is_arithmetic(text: str) -> bool:
    if not re.fullmatch(r"[-+*/()0-9]+", text) or re.search(
        r"(^|[-+*/(])[-+*/)]|\)[0-9(]|[0-9]\(|(?<!\d)0|\d{5}", text
    ):
        return False
    try:
        eval(text.replace("/", "*"))
    except (SyntaxError, ValueError):
        return False
    return True


def is_nested_list(text: str) -> bool:
    while (shorter := re.sub(r"\[a(,a)*\]", "a", text)) != text:
        text = shorter
    return re.fullmatch(r"a(,a)*", text) is not None


PARSERS = {
    "select": lambda text: re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", text) is not None,
    "arithmetic": is_arithmetic,
    "left recursive": is_nested_list,
    "palindrome": lambda text: re.fullmatch("[ab]*c[ab]*", text) is not None and text == text[::-1],
    "json": matches_schema({"type": "object"}),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_any_allowed_tokens_are_a_sentence_of_the_grammar(name: str) -> None:
    for walked in walks(Structure(content=Grammar("ebnf", GRAMMARS[name]))):
        check_ends(walked, PARSERS[name])


LARK = """
start: pair ("," pair)*
pair: KEY "=" value
value: /[0-9]+/ | "(" pair ")"
KEY: /[a-z]+/
"""


def test_a_grammar_may_be_written_as_lark_too() -> None:
    def is_pairs(text: str) -> bool:
        while (shorter := re.sub(r"\([a-z]+=[0-9]+\)", "0", text)) != text:
            text = shorter
        return re.fullmatch(r"[a-z]+=[0-9]+(,[a-z]+=[0-9]+)*", text) is not None

    for walked in walks(Structure(content=Grammar("ebnf", LARK))):
        check_ends(walked, is_pairs)


# -- tools -----------------------------------------------------------------------------------------------------------


def tools(strict: bool) -> tuple[ToolGrammar, ...]:
    return tuple(ToolGrammar(name, json.dumps(schema), strict) for name, schema in TOOLS.items())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_any_allowed_tokens_are_calls_of_declared_tools(strict: bool, parallel: bool) -> None:
    structure = Structure(tools=tools(strict), tool_mode="required", parallel_calls=parallel)
    called = set()
    for walked in walks(structure, count=20, most=300):
        assert not any(walked.ends[:-1]), "a required block is followed by the end and by nothing else"
        if not walked.ended:
            continue
        calls = parse_block(rendered(walked.ids))
        assert len(calls) == 1 or (parallel and calls)
        for name, arguments in calls:
            called.add(name)
            assert name in TOOLS
            if strict:
                jsonschema.validate(arguments, TOOLS[name])
    assert called == set(TOOLS)


def test_the_values_of_arguments_are_written_as_the_prompt_writes_them() -> None:
    """Else a call that comes back as history would not render to the tokens that the cache holds."""
    structure = Structure(tools=tools(True), tool_mode="required")
    values = []
    for walked in walks(structure, count=20, most=300):
        values += re.findall(rf'string="false">(.*?)</{MARK}', rendered(walked.ids), re.DOTALL)
    nested = [value for value in values if value.startswith("[")]
    assert nested
    for value in nested:
        again = json.dumps(json.loads(value), ensure_ascii=False)
        assert re.sub(r'"(\\.|[^"\\])*"', '""', value) == re.sub(r'"(\\.|[^"\\])*"', '""', again)


def test_content_or_a_call_but_not_one_in_the_other() -> None:
    structure = Structure(
        content=Grammar("json_schema", json.dumps(SCHEMAS["person"])), tools=tools(True), tool_mode="auto"
    )
    is_person = matches_schema(SCHEMAS["person"])
    kinds = set()
    for walked in walks(structure, count=24, most=300):
        if not walked.ended:
            continue
        text = rendered(walked.ids)
        kinds.add(MARK in text)
        assert parse_block(text) if MARK in text else is_person(text)
    assert kinds == {True, False}


def test_the_answers_that_the_benchmark_follows_are_answers() -> None:
    for name, (structure, text) in measured_cases().items():
        matcher = prototype(structure).start()
        matcher.accept([*encoded(text), EOS])
        assert matcher.error is None and matcher.ended, name
