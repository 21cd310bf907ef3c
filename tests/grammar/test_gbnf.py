"""EBNF as clients of other engines send it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import EOS, nano, prototype

from deepinfer.grammar import gbnf
from deepinfer.grammar.compiler import build_parts
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.gbnf import Chars, Choice, Expression, Name, Repeat, Sequence, Text
from deepinfer.grammar.gbnf_lark import bottom_up, productive
from deepinfer.grammar.lexing import loses_sentences
from deepinfer.grammar.structure import Grammar, Structure


def sentences(source: str, texts: list[str]) -> list[bool]:
    start = prototype(Structure(content=Grammar("ebnf", source))).start()
    found = []
    for text in texts:
        matcher = start.copy()
        matcher.accept([*nano().tokenize(text), EOS])
        found.append(matcher.error is None and matcher.ended)
    return found


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        ('root ::= "a" | "b" "c"', ["a", "bc"], ["", "ac", "b"]),
        ('root ::= "a"\n       | "b" # or this\n\n       | "c"\n', ["a", "b", "c"], ["d"]),
        ('root::=x y\nx::="a"?\ny::=[0-9]+', ["a1", "12"], ["a", ""]),
        ('root ::= ("a" | "b"){2,3} "c"*', ["ab", "aba", "bbccc"], ["a", "abab", "c"]),
        ('root ::= [a-c]{2} [^a-c\\n]{1,} .', ["ababde"[2:], "aaxyé", "aax\n"], ["aa", "aax", "aa\nx"]),
        (r'root ::= "\"q\"\\\n\t" "\x41\u00e9\U0001F600"', ['"q"\\\n\tAé😀'], ["x"]),
        (r"root ::= [\]\[\-^]+ [-x] [x-]", ["][-^--", "^xx"], ["a--"]),
        ("root ::= a-b\na-b ::= A_b\nA_b ::= \"c\"", ["c"], ["C"]),
        ('root ::= "" | "a"', ["", "a"], ["aa"]),
        ('root ::= "(" root ")" | "x" # nested', ["x", "((x))"], ["((x)", "x)"]),
        ('root ::= root "," "a" | "a"', ["a", "a,a,a"], ["a,", ",a"]),
        ('root ::= "a" root "a" | "a"', ["a", "aaa", "aaaaa"], ["aa", "aaaa"]),
        ('root ::= item ("," " "? item)*\nitem ::= "[" root "]" | [a-z]+', ["a, b,[c,[d]]"], ["a,,b", "[a"]),
        ('root ::= "#" | "::=" | "//"', ["#", "::=", "//"], [""]),
        ("root ::= [^\"]", ["a", "\n", "é"], ['"', "ab"]),
        ('root ::= "a"{0,2}', ["", "a", "aa"], ["aaa"]),
    ],
)  # fmt: skip
def test_a_grammar_means_what_llama_cpp_means_by_it(source: str, yes: list[str], no: list[str]) -> None:
    assert sentences(source, yes) == [True] * len(yes)
    assert sentences(source, no) == [False] * len(no)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('start ::= "a"', "no rule 'root'"),
        ("root ::= missing", "'missing'"),
        ('root ::= "a"\nroot ::= "b"', "a second rule"),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\nx ::= ("b"', "ends before"),
        ('root ::= "a"\n\nx ::= )', "line 3"),
        ('root ::= "a" *+{', "line 1"),
        ("root ::= *", "nothing to repeat"),
        ("root ::= [z-a]", "backwards"),
        ("root ::= []", "empty class"),
        ('root ::= "\\q"', "no escape"),
        ('root ::= "\\uD800"', "no character"),
        ('root ::= "a"{3,2}', "ends before it begins"),
        ('root ::= "a"{}', "no number"),
        ("root ::= root", "never ends"),
        ('root ::= x "a"\nx ::= y\ny ::= "b" x', "never ends"),
        ('root ::= "a"' + "?" * 20, "repeated more than"),
    ],
)
def test_a_mistake_is_told_where_it_stands(source: str, word: str) -> None:
    with pytest.raises(GrammarError, match=word):
        build_parts(Structure(content=Grammar("ebnf", source)), nano())


@pytest.mark.parametrize(
    "source",
    [
        'start: <[8174]> "a"',
        "start: <think> /.*/",
        'start: x\nx: /a\n/ <[3]> /b/ "c"',
        '%llguidance {"no_forcing": false}\nstart: "a"',
    ],
)
def test_a_clients_lark_names_no_tokens_and_sets_no_options(source: str) -> None:
    with pytest.raises(GrammarError):
        build_parts(Structure(content=Grammar("ebnf", source)), nano())


def test_a_mistake_in_lark_is_told_where_it_stands() -> None:
    with pytest.raises(GrammarError, match=r"line 3, column"):
        build_parts(Structure(content=Grammar("ebnf", '# two\n# lines\nstart: "a" |* b')), nano())


def test_a_grammar_that_goes_on_for_ever_keeps_nobody_busy() -> None:
    """The matcher looks ahead for forced text by default, and finds no end of this one."""
    for source in ('start: "a" start', "start: A B\nA: /a*/\nB: /ab/"):
        matcher = prototype(Structure(content=Grammar("ebnf", source))).start()
        for _ in range(5):
            matcher.masks([])
            matcher.accept(nano().tokenize("a"))
        assert matcher.error is None and not matcher.may_end


def test_rules_that_never_end_are_left_out() -> None:
    rules = gbnf.parse('root ::= "a" | loop | root "b"\nloop ::= "x" loop\nunused ::= "u"')
    kept = productive(rules)
    assert kept == {"root": Choice((Text("a"), Sequence((Name("root"), Text("b")))))}


def test_rules_come_behind_those_that_they_use() -> None:
    rules = gbnf.parse('root ::= a b | root\na ::= c c\nb ::= "x"\nc ::= b')
    assert bottom_up(rules) == ["b", "c", "a"]


# -- any grammar -----------------------------------------------------------------------------------------------------

NAMES = ("root", "s", "t")


def expressions(names: tuple[str, ...]) -> st.SearchStrategy[Expression]:
    leaves: st.SearchStrategy[Expression] = st.one_of(
        st.sampled_from([Text("a"), Text("b"), Text("ab"), Text("ba"), Chars(((97, 98),))]),
        st.sampled_from([Name(name) for name in names]) if names else st.nothing(),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda parts: Sequence(tuple(parts))),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: Choice(tuple(parts))),
            st.tuples(inner, st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3)])).map(
                lambda pair: Repeat(pair[0], *pair[1])
            ),
        ),
        max_leaves=6,
    )


def derives(rules: dict[str, Expression], text: str) -> bool:
    """By definition: the smallest sets of spans that the rules make, found by repetition until nothing is added."""
    spans: dict[str, set[tuple[int, int]]] = {name: set() for name in rules}
    everywhere = {(at, at) for at in range(len(text) + 1)}

    def of(part: Expression) -> set[tuple[int, int]]:
        match part:
            case Text(literal):
                return {(at, at + len(literal)) for at in range(len(text) + 1) if text.startswith(literal, at)}
            case Chars(ranges, _):
                return {(at, at + 1) for at, char in enumerate(text) if any(a <= ord(char) <= b for a, b in ranges)}
            case Name(name):
                return spans[name]
            case Sequence(parts):
                found = everywhere
                for inner in parts:
                    found = joined(found, of(inner))
                return found
            case Choice(parts):
                return set().union(*(of(inner) for inner in parts))
            case Repeat(inner, low, high):
                one = of(inner)
                found = everywhere
                for _ in range(low):
                    found = joined(found, one)
                for _ in itertools.count() if high is None else range(high - low):
                    more = found | joined(found, one)
                    if more == found:
                        break
                    found = more
                return found
        raise AssertionError(part)

    while True:
        fresh = {name: of(rule) for name, rule in rules.items()}
        if fresh == spans:
            return (0, len(text)) in spans["root"]
        spans = fresh


def joined(left: set[tuple[int, int]], right: set[tuple[int, int]]) -> set[tuple[int, int]]:
    return {(a, d) for a, b in left for c, d in right if b == c}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_without_recursion_a_grammar_is_matched_exactly(data: st.DataObject) -> None:
    rules = {
        "root": data.draw(expressions(("s",))),
        "s": data.draw(expressions(("t",))),
        "t": data.draw(expressions(())),
    }
    check(rules, exactly=True)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_with_recursion_nothing_else_is_matched_and_nothing_lost_unknowingly(data: st.DataObject) -> None:
    """The matcher's lexer may lose sentences where a terminal can go on with what follows it. We know where; it adds
    none anywhere."""
    rules = {name: data.draw(expressions(NAMES)) for name in NAMES}
    try:
        lost = loses_sentences(rules)
    except GrammarError:
        lost = True  # nothing satisfies it
    check(rules, exactly=not lost)


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ('root ::= str x | "."\nstr ::= [a-z]*\nx ::= "abc" root', True),
        ('root ::= "ab" root | "a" x\nx ::= "b" root | "c"', True),
        ('root ::= "(" root ")" | [a-z]+', False),
        ('root ::= [a-z]+ "," root | "end"', False),
        ('root ::= sum\nsum ::= atom ("+" atom)*\natom ::= [0-9]+ | "(" sum ")"', False),
        ("root ::= [a-z]* [a-z]*", False),
    ],
)
def test_it_is_known_where_the_lexer_loses_sentences(source: str, lost: bool) -> None:
    assert loses_sentences(gbnf.parse(source)) == lost


def check(rules: dict[str, Expression], exactly: bool) -> None:
    source = "\n".join(f"{name} ::= {written(rule)}" for name, rule in rules.items())
    assert gbnf.parse(source).keys() == rules.keys()
    chance = random.Random(source)
    texts = [""] + ["".join(text) for size in range(1, 5) for text in itertools.product("ab", repeat=size)]
    texts += ["".join(chance.choice("ab") for _ in range(7)) for _ in range(10)]
    expected = [derives(rules, text) for text in texts]
    try:
        got = sentences(source, texts)
    except GrammarError as error:
        assert not any(expected), f"{error}: {source}"
        return
    wrong = [
        text for text, one, other in zip(texts, expected, got, strict=True) if other > one or (exactly and one != other)
    ]
    assert not wrong, f"{wrong} of {source}"


def written(part: Expression) -> str:
    match part:
        case Text(text):
            return f'"{text}"'
        case Chars(_, _):
            return "[a-b]"
        case Name(name):
            return name
        case Sequence(parts):
            return "(" + " ".join(map(written, parts)) + ")" if parts else '""'
        case Choice(parts):
            return "(" + " | ".join(map(written, parts)) + ")"
        case Repeat(inner, low, high):
            return f"({written(inner)}){{{low},{'' if high is None else high}}}"
    raise AssertionError(part)
