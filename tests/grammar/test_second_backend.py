"""xgrammar behind the same interface: it takes over where llguidance would lose sentences, and nowhere else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from grammar_cases import GRAMMARS
from walks import EOS, check_ends, nano, walk

from deepinfer.grammar.compiler import Compiler, build_parts
from deepinfer.grammar.fill import MaskFiller
from deepinfer.grammar.llguidance_automaton import LLAutomaton
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.prototype import Prototype
from deepinfer.grammar.structure import Grammar, Structure
from deepinfer.grammar.xgrammar_automaton import XGrammarAutomaton, compile_gbnf

pytest.importorskip("xgrammar")

LOST = 'root ::= word tail | "."\nword ::= [a-z]*\ntail ::= "abc" root'


def lost(structure: Structure | None = None) -> Prototype:
    structure = structure or Structure(content=Grammar("ebnf", LOST))
    return Prototype(structure, nano(), build_parts(structure, nano(), fallback=True))


def reaches(matcher: Matcher, text: str) -> bool:
    matcher.accept([*nano().tokenize(text), EOS])
    return matcher.error is None and matcher.ended


def test_sentences_that_one_backend_loses_the_other_says() -> None:
    without = Prototype(
        Structure(content=Grammar("ebnf", LOST)), nano(), build_parts(Structure(content=Grammar("ebnf", LOST)), nano())
    )
    for text in (".", "xabc.", "abcabc.", "xyzabcabc."):
        assert reaches(lost().start(), text)
    assert not reaches(without.start(), "xabc.")
    for text in ("", "x.", "xabc", "xabc.."):
        assert not reaches(lost().start(), text)


def test_it_takes_over_only_where_something_is_gained() -> None:
    for name, source in GRAMMARS.items():
        content = build_parts(Structure(content=Grammar("ebnf", source)), nano(), fallback=True).content
        assert isinstance(content, LLAutomaton), name
    assert isinstance(lost().content, XGrammarAutomaton)


def test_without_being_asked_for_it_does_nothing() -> None:
    compiler = Compiler(nano())
    assert isinstance(compiler.compile(Structure(content=Grammar("ebnf", LOST))).result().content, LLAutomaton)
    compiler.close()


def test_its_walks_end_in_sentences() -> None:
    for seed in range(6):
        walked = walk(lost().start(), random.Random(seed), 60)
        check_ends(
            walked,
            lambda text: text == "." or (text.endswith("abc.") and set(text) <= set("abcdefghijklmnopqrstuvwxyz.")),
        )


def test_its_drafts_copies_and_steps_are_those_of_the_other() -> None:
    structure = Structure(content=Grammar("ebnf", LOST), thinking=True)
    prototype = lost(structure)
    ids = [nano().end_think, *nano().tokenize("xyzabcab"), *nano().tokenize("c.")]
    stepwise = prototype.start()
    rows = []
    for token in ids:
        rows.append(stepwise.masks([])[0])
        stepwise.accept([token])
    rows.append(stepwise.masks([])[0])
    assert np.array_equal(prototype.start().masks(ids), np.stack(rows))
    assert np.array_equal(prototype.start(ids[:4]).masks(ids[4:]), np.stack(rows[4:]))
    wrong = prototype.start(ids[:3]).masks([ids[3], nano().dsml, ids[4]])
    assert np.array_equal(wrong[:2], np.stack(rows[3:5])) and (wrong[2:] == -1).all()
    filler = MaskFiller(nano())
    copied = prototype.start(ids[:2]).copy()
    plain = Prototype(
        Structure(content=Grammar("json_object")),
        nano(),
        build_parts(Structure(content=Grammar("json_object")), nano()),
    )
    got = filler.begin([(copied, ids[2:5]), (plain.start(), []), (prototype.start(ids), [])]).result()
    assert np.array_equal(got, np.concatenate([rows[2:6], plain.start().masks([]), rows[-1:]]))
    filler.close()


def test_it_allows_nothing_that_the_other_does_not_where_nothing_is_lost() -> None:
    """At every token of random sentences. (It allows less: it forgets "ca" behind "ba" of a palindrome.)"""
    for name in ("select", "arithmetic", "left recursive", "palindrome"):
        ours = build_parts(Structure(content=Grammar("ebnf", GRAMMARS[name])), nano()).content
        theirs = compile_gbnf(GRAMMARS[name], nano())
        assert ours is not None
        for seed in range(3):
            structure = Structure(content=Grammar("ebnf", GRAMMARS[name]))
            walked = walk(Prototype(structure, nano(), build_parts(structure, nano())).start(), random.Random(seed), 60)
            one, other = ours.copy(), theirs.copy()
            rows = np.empty((2, nano().words), np.int32)
            for token in walked.ids:
                one.fill(rows, 0, [])
                other.fill(rows, 1, [])
                assert not (rows[1] & ~rows[0]).any(), name
                assert one.accepting == other.accepting
                assert one.consume([token]) and other.consume([token])
