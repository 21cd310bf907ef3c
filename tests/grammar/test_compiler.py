"""Structures are compiled once, in threads, and a bad one harms nobody else."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from grammar_cases import SCHEMAS, TOOLS
from walks import EOS, NANO, nano

from deepinfer.grammar.compiler import Compiler
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar
from deepinfer.grammar.vocabulary import Vocabulary

PERSON = Grammar("json_schema", json.dumps(SCHEMAS["person"]))


def test_a_structure_is_compiled_once() -> None:
    seen: list[str] = []
    compiler = Compiler(nano(), observe=lambda result, seconds: seen.append(result) if seconds >= 0 else None)
    for _ in range(3):
        matcher = compiler.compile(Structure(content=PERSON)).result().start()
        matcher.accept(nano().tokenize('{"name": "A'))
        assert matcher.error is None
    compiler.compile(Structure(content=PERSON, thinking=True, thinking_budget=9)).result()
    compiler.compile(Structure(content=PERSON, prefix='{"')).result()
    compiler.compile(Structure(content=Grammar("json_object"))).result()
    with pytest.raises(GrammarError):
        compiler.compile(Structure(content=Grammar("regex", "("))).result()
    compiler.close()
    assert seen == ["miss", "hit", "hit", "hit", "hit", "miss", "error"]


def test_the_oldest_structures_are_forgotten() -> None:
    seen: list[str] = []
    compiler = Compiler(nano(), cache_size=2, observe=lambda result, _: seen.append(result))
    for pattern in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(Structure(content=Grammar("regex", pattern))).result()
    compiler.close()
    assert seen == ["miss", "miss", "hit", "miss", "hit", "miss"]


def test_whoever_gives_up_does_not_take_the_structure_from_the_others() -> None:
    compiler = Compiler(nano())
    entered, leave = threading.Event(), threading.Event()
    compiler._pool.submit(lambda: (entered.set(), leave.wait()))  # the only thread is busy
    entered.wait()
    first, second = compiler.compile(Structure(content=PERSON)), compiler.compile(Structure(content=PERSON))
    assert first.cancel()
    leave.set()
    assert second.result().start().error is None
    compiler.close()


def test_many_structures_at_once_come_out_as_alone() -> None:
    compiler = Compiler(nano(), threads=3)
    structures = [Structure(content=Grammar("regex", f"x{n % 7}")) for n in range(40)]
    futures = [compiler.compile(structure) for structure in structures]
    for n, future in enumerate(futures):
        matcher = future.result().start()
        matcher.accept([*nano().tokenize(f"x{n % 7}"), EOS])
        assert matcher.ended and matcher.error is None
    compiler.close()


def test_limits_hold_without_a_door_too() -> None:
    compiler = Compiler(nano())
    with pytest.raises(GrammarError) as caught:
        compiler.compile(Structure(content=Grammar("json_schema", "[" * 100))).result()
    assert caught.value.kind == "too_large"
    compiler.close()


@pytest.mark.parametrize("pattern", [r"a[^\s\S]", "(?-u:\\xff)"])
def test_what_nothing_satisfies_is_refused_when_it_is_compiled(pattern: str) -> None:
    compiler = Compiler(nano())
    with pytest.raises(GrammarError):
        compiler.compile(Structure(content=Grammar("regex", pattern))).result()
    compiler.close()


# -- tokenizers ------------------------------------------------------------------------------------------------------


def without(spelling: str) -> Vocabulary:
    definition = json.loads((NANO / "tokenizer.json").read_bytes())
    for token in definition["added_tokens"]:
        if token["content"] == spelling:
            token["content"] = "<｜something▁else｜>"
    definition["model"]["vocab"] = {
        "<｜something▁else｜>" if token == spelling else token: i for token, i in definition["model"]["vocab"].items()
    }
    return Vocabulary(json.dumps(definition).encode(), 8192, EOS)


def test_a_tokenizer_without_the_needed_control_tokens_is_refused_by_reason() -> None:
    tools = (ToolGrammar("now", json.dumps(TOOLS["now"])),)
    for vocabulary, structure, word in (
        (without("</think>"), Structure(content=PERSON, thinking=True), "</think>"),
        (without("｜DSML｜"), Structure(tools=tools, tool_mode="auto"), "DSML"),
    ):
        compiler = Compiler(vocabulary)
        with pytest.raises(GrammarError, match=word):
            compiler.compile(structure).result()
        compiler.compile(Structure(content=PERSON)).result()
        compiler.close()


def test_text_never_spells_a_control_token() -> None:
    """Also where the tokenizer's file does not mark it as special."""
    matcher = Compiler(nano()).compile(Structure(content=Grammar("regex", "(?s:.)*"))).result().start()
    row = matcher.masks([])[0]
    control = [t["id"] for t in json.loads(nano().definition)["added_tokens"]]
    assert control
    allowed = {token for token in control if int(row[token // 32]) >> token % 32 & 1}
    assert allowed == {EOS}
    matcher.accept([*nano().tokenize("｜DSML｜ <think> </think>"), EOS])
    assert matcher.error is None


def test_a_vocabulary_is_known_by_its_content(tmp_path: Path) -> None:
    copy = tmp_path / "other.json"
    copy.write_bytes((NANO / "tokenizer.json").read_bytes())
    assert Vocabulary.from_tokenizer_file(copy, 8192, EOS).digest == nano().digest
    assert Vocabulary.from_tokenizer_file(copy, 8200, EOS).digest != nano().digest


@pytest.mark.parametrize("text", ["", "[]", '{"added_tokens": [{}]}', "\xff"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Vocabulary.from_tokenizer_file(path, 8192, EOS)


def test_rows_beyond_the_tokenizer_are_never_allowed() -> None:
    vocabulary = Vocabulary(nano().definition, 8200, EOS)
    compiler = Compiler(vocabulary)
    row = compiler.compile(Structure(content=Grammar("regex", "(?s:.)*"))).result().start().masks([])[0]
    assert row.shape == (257,)
    assert not any(int(row[token // 32]) >> token % 32 & 1 for token in range(8192, 8224))
    compiler.close()
