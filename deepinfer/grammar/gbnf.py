"""GBNF, the EBNF that clients of other engines send (`root ::= ...`), read into rules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.grammar.errors import GrammarError

ROOT = "root"
MAX_REPEATS = 8  # of one part, as in "a"*?{2}; each nests
_TOKEN = re.compile(
    r"""
    (?P<space> \s+ | \#[^\n]* )
  | (?P<begins> [A-Za-z_][\w-]* (?= \s* ::= ) )
  | (?P<name> [A-Za-z_][\w-]* )
  | (?P<is> ::= )
  | (?P<text> "(?:[^"\\\n]|\\.)*" )
  | (?P<class> \[(?:[^\]\\\n]|\\.)*\] )
  | (?P<repeat> \{\s*\d*\s*(?:,\s*\d*\s*)?\} )
  | (?P<sign> [|()*+?.] )
    """,
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    '"': '"',
    "'": "'",
    "\\": "\\",
    "[": "[",
    "]": "]",
    "-": "-",
    "^": "^",
    "/": "/",
}


class Text(NamedTuple):
    text: str


class Chars(NamedTuple):
    """One character: of one of the ranges, or of none if negated. Code points, ends included."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


class Name(NamedTuple):
    name: str


class Sequence(NamedTuple):
    parts: tuple[Expression, ...]  # () = the empty text


class Choice(NamedTuple):
    parts: tuple[Expression, ...]


class Repeat(NamedTuple):
    part: Expression
    low: int
    high: int | None  # None = no end


Expression = Text | Chars | Name | Sequence | Choice | Repeat


def is_gbnf(source: str) -> bool:
    """Whether a rule is written as GBNF writes it, outside of texts and comments."""
    return "::=" in re.sub(r'"(?:[^"\\\n]|\\.)*"|(?:#|//)[^\n]*', "", source)


def parse(source: str) -> dict[str, Expression]:
    """Rules by name. A rule ends where the next one begins, so alternatives may stand on lines of their own.
    GrammarError with the line of what is wrong; also for a name without a rule, and if no rule is called root."""
    rules = _Parser(_tokens(source)).rules()
    if ROOT not in rules:
        raise GrammarError(f"the grammar has no rule {ROOT!r}")
    for name, expression in rules.items():
        for used in names(expression):
            if used not in rules:
                raise GrammarError(f"rule {name!r} uses {used!r}, which has no rule")
    return rules


def names(expression: Expression) -> list[str]:
    """Names that occur in an expression."""
    match expression:
        case Name(name):
            return [name]
        case Sequence(parts) | Choice(parts):
            return [name for part in parts for name in names(part)]
        case Repeat(part, _, _):
            return names(part)
        case _:
            return []


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(source: str) -> list[_Token]:
    tokens = []
    place, line = 0, 1
    while place < len(source):
        match = _TOKEN.match(source, place)
        if match is None:
            raise GrammarError(f"line {line} of the grammar: {source[place : place + 20]!r} is no part of a rule")
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match[0], line))
        line += match[0].count("\n")
        place = match.end()
    return tokens


class _Parser:
    """Recursive descent; the depth of brackets was checked before (limits.py)."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._place = 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        while self._place < len(self._tokens):
            name = self._take("begins", "the name of a rule and ::=")
            self._take("is", "::=")
            if name.text in rules:
                raise GrammarError(f"line {name.line} of the grammar: a second rule {name.text!r}")
            rules[name.text] = self._choice()
        return rules

    def _choice(self) -> Expression:
        parts = [self._sequence()]
        while self._is("|"):
            self._place += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (part := self._part()) is not None:
            repeats = 0
            while (bounds := self._bounds()) is not None:
                part = Repeat(part, *bounds)
                repeats += 1
                if repeats > MAX_REPEATS:
                    raise GrammarError(f"a part of the grammar is repeated more than {MAX_REPEATS} times over")
            parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Expression | None:
        token = self._peek()
        if token is None or token.kind in ("begins", "is") or token.text in ("|", ")"):
            return None
        self._place += 1
        match token.kind:
            case "name":
                return Name(token.text)
            case "text":
                return Text("".join(chr(code) for code in _characters(token.text[1:-1], token.line)))
            case "class":
                return _char_class(token)
        if token.text == ".":
            return Chars((), negated=True)
        if token.text == "(":
            inside = self._choice()
            self._take(")", "the end of a group")
            return inside
        raise GrammarError(f"line {token.line} of the grammar: {token.text!r} has nothing to repeat")

    def _bounds(self) -> tuple[int, int | None] | None:
        token = self._peek()
        if token is None or (token.kind != "repeat" and token.text not in ("*", "+", "?")):
            return None
        self._place += 1
        match token.text:
            case "*":
                return 0, None
            case "+":
                return 1, None
            case "?":
                return 0, 1
        low, comma, high = token.text[1:-1].partition(",")
        if not comma and not low.strip():
            raise GrammarError(f"line {token.line} of the grammar: {token.text!r} says no number")
        least = int(low.strip() or 0)
        most = (int(high) if high.strip() else None) if comma else least
        if most is not None and most < least:
            raise GrammarError(f"line {token.line} of the grammar: {token.text!r} ends before it begins")
        return least, most

    def _peek(self) -> _Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _is(self, text: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == "sign" and token.text == text

    def _take(self, what: str, expected: str) -> _Token:
        token = self._peek()
        if token is None:
            raise GrammarError(f"the grammar ends before {expected}")
        if token.kind != what and not (token.kind == "sign" and token.text == what):
            raise GrammarError(f"line {token.line} of the grammar: {token.text[:40]!r} instead of {expected}")
        self._place += 1
        return token


def _characters(text: str, line: int) -> list[int]:
    """Code points of a text or a class whose brackets are off, escapes resolved."""
    return [code for code, _ in _coded(text, line)]


def _coded(text: str, line: int) -> list[tuple[int, bool]]:
    """(code point, whether it was escaped)."""
    codes = []
    place = 0
    while place < len(text):
        match = _ESCAPE.match(text, place)
        if match is None:
            codes.append((ord(text[place]), False))
            place += 1
            continue
        place = match.end()
        if match[4] is None:
            code = int(match[1] or match[2] or match[3], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise GrammarError(f"line {line} of the grammar: {match[0]!r} is no character")
            codes.append((code, True))
        elif match[4] in _SIMPLE:
            codes.append((ord(_SIMPLE[match[4]]), True))
        else:
            raise GrammarError(f"line {line} of the grammar: {match[0]!r} is no escape")
    return codes


def _char_class(token: _Token) -> Chars:
    codes = _coded(token.text[1:-1], token.line)
    negated = codes[:1] == [(ord("^"), False)]
    codes = codes[negated:]
    if not codes:
        raise GrammarError(f"line {token.line} of the grammar: an empty class of characters")
    ranges = []
    place = 0
    while place < len(codes):
        code = codes[place][0]
        # A bare "-" between two characters makes a range; at either end it is itself.
        if place + 2 < len(codes) and codes[place + 1] == (ord("-"), False):
            last = codes[place + 2][0]
            if last < code:
                raise GrammarError(
                    f"line {token.line} of the grammar: {token.text!r} holds a range that runs backwards"
                )
            ranges.append((code, last))
            place += 3
        else:
            ranges.append((code, code))
            place += 1
    return Chars(tuple(ranges), negated)
