"""Every keyword of JSON schema is enforced, or refused by name: none is passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from schema_features import FEATURES
from walks import EOS, nano, prototype

from deepinfer.grammar.compiler import build_parts
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Grammar, Structure

# What cannot be enforced, and a word of the reason that the client reads.
REFUSED = {
    "pattern lookahead": "look-around",
    "pattern negative lookahead": "look-around",
    "pattern backreference": "backreferences",
    "pattern word boundary": "lookarounds",
    "uniqueItems": "'uniqueItems'",
    "contains": "'contains'",
    "oneOf overlapping": "oneOf",
    "not": "'not'",
    "if/then/else": "'if'",
    "$dynamicRef": "'$dynamicAnchor'",
}


def structure(schema: Any) -> Structure:
    return Structure(content=Grammar("json_schema", json.dumps(schema)))


def texts(value: Any) -> list[str]:
    """Two ways to write it."""
    return [json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))]


@pytest.mark.parametrize("name", sorted(FEATURES.keys() - REFUSED.keys()))
def test_an_answer_can_be_what_the_schema_allows_and_nothing_else(name: str) -> None:
    feature = FEATURES[name]
    start = prototype(structure(feature.schema)).start()

    def allowed(text: str) -> bool:
        matcher = start.copy()
        matcher.accept([*nano().tokenize(text), EOS])
        return matcher.error is None and matcher.ended

    for value in feature.valid:
        assert all(map(allowed, texts(value))), f"{value} is valid and cannot be said"
    for value in feature.invalid:
        assert not any(map(allowed, texts(value))), f"{value} is not valid and can be said"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    with pytest.raises(GrammarError, match=REFUSED[name].replace("$", r"\$")) as caught:
        build_parts(structure(FEATURES[name].schema), nano())
    assert caught.value.kind == "invalid"


def test_the_table_itself_is_right() -> None:
    """As another implementation of the standard sees it (formats that it does not know are not tested there either)."""
    for name, (schema, valid, invalid) in FEATURES.items():
        if name in (
            "items list (draft 4)",
            "nullable (OpenAPI)",
            "pattern unicode class",
            "format time",
        ) or name.startswith("$id"):
            continue
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for value in valid:
            assert validator.is_valid(value), (name, value)
        for value in invalid:
            assert name.startswith("format") or not validator.is_valid(value), (name, value)


def test_the_place_of_what_cannot_be_enforced_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"type": "null"}}}}}
    with pytest.raises(GrammarError, match="#/properties/a/items"):
        build_parts(structure(schema), nano())


def test_oneof_with_a_discriminator_is_told_apart_by_it() -> None:
    """As pydantic writes unions of models: the kind has a default, so it is not required there."""
    schema = {
        "$defs": {
            kind: {
                "type": "object",
                "properties": {"kind": {"const": kind, "default": kind}, kind: {"type": "integer"}},
            }
            for kind in ("cat", "dog")
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
    }
    start = prototype(structure(schema)).start()
    for value, fits in (
        ({"kind": "cat", "cat": 3}, True),
        ({"kind": "dog"}, True),
        ({"kind": "cow"}, False),
        ({}, False),
    ):
        matcher = start.copy()
        matcher.accept([*nano().tokenize(json.dumps(value)), EOS])
        assert (matcher.error is None) == fits, value


@pytest.mark.parametrize(
    "schema", [{"type": "object"}, {"type": "object", "x-guidance": {"whitespace_flexible": False}}]
)
def test_a_schema_cannot_set_options_of_the_matcher(schema: Any) -> None:
    matcher = prototype(structure(schema)).start()
    matcher.accept([*nano().tokenize('{ "a": 1}'), EOS])
    assert matcher.error is None


# -- the second backend ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def xgrammar_accepts() -> Callable[[Any], Callable[[str], bool]]:
    xgrammar = pytest.importorskip("xgrammar")
    tokens = [nano().token_bytes(token) for token in range(8192)]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[EOS], vocab_size=8192)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def of_schema(schema: Any) -> Callable[[str], bool]:
        compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)

        def accepts(text: str) -> bool:
            matcher = xgrammar.GrammarMatcher(compiled)
            return all(map(matcher.accept_token, nano().tokenize(text))) and matcher.accept_token(EOS)

        return accepts

    return of_schema


@pytest.mark.parametrize("name", REFUSED)
def test_xgrammar_enforces_no_schema_that_we_refuse(name: str, xgrammar_accepts: Callable[..., Any]) -> None:
    """So there is no fallback to it for JSON schemas. It may learn to: then this fails, and a fallback is worth it."""
    feature = FEATURES[name]
    try:
        accepts = xgrammar_accepts(feature.schema)
    except RuntimeError:
        return
    wrong = [value for value in feature.invalid if any(map(accepts, texts(value)))]
    missing = [value for value in feature.valid if not any(map(accepts, texts(value)))]
    assert wrong or missing
