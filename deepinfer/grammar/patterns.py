"""Regular expressions as the matcher takes them: it matches whole texts and knows no anchors inside a pattern."""

from __future__ import annotations

import re

from llguidance import regex_to_lark

from deepinfer.grammar.errors import GrammarError

ANY = "(?s:.*)"
# One thing of a pattern: an escape, a class (whose first character may be "]"), or any other character.
_PART = re.compile(r"\\x\{[^}]*\}|\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*+\]|\(\?[a-zA-Z-]*\)|.", re.DOTALL)


def whole(pattern: str) -> str:
    """The pattern for texts that it must match from end to end: anchors at the ends of its branches say nothing."""
    return "|".join(branch for branch, _, _ in _branches(pattern))


def found_in(pattern: str) -> str:
    """The pattern for texts in which it must be found, as JSON schema means it (ECMA-262: \\d and \\w are ASCII); in
    turn to be matched from end to end."""
    branches = [
        ("" if begins else ANY) + f"(?:{branch})" + ("" if ends else ANY) for branch, begins, ends in _branches(pattern)
    ]
    return regex_to_lark("|".join(branches), "dw")


def term(pattern: str) -> str:
    """The pattern as a terminal of the matcher's grammars."""
    return "/" + re.sub(r"\\.|/", lambda part: "\\/" if part[0] == "/" else part[0], pattern, flags=re.DOTALL) + "/"


def _branches(pattern: str) -> list[tuple[str, bool, bool]]:
    """(branch without its anchors, whether it is anchored at the beginning, and at the end) for each of the outermost
    alternatives. GrammarError for a pattern whose brackets do not pair: joined with other text it would mean another
    thing."""
    branches: list[list[str]] = [[]]
    depth = 0
    parts = _PART.findall(pattern)
    for part in parts:
        if part == "\\" or part == "[":
            raise GrammarError(f"the regex ends inside {part!r}: {pattern[:200]!r}")
        depth += (part == "(") - (part == ")")
        if depth < 0:
            raise GrammarError(f"the regex closes a group that it has not opened: {pattern[:200]!r}")
        if part == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(part)
    if depth:
        raise GrammarError(f"the regex opens a group that it does not close: {pattern[:200]!r}")
    if len(branches) > 1 and any(re.fullmatch(r"\(\?[a-zA-Z-]+\)", part) for part in parts):
        raise GrammarError("flags that apply to several branches of a regex: write (?i:...) around them")
    return [_anchors(branch) for branch in branches]


def _anchors(branch: list[str]) -> tuple[str, bool, bool]:
    begin, end = 0, len(branch)
    while begin < end and re.fullmatch(r"\(\?[a-zA-Z-]+\)", branch[begin]):
        begin += 1  # flags in front
    flags = "".join(branch[:begin])
    first = begin
    while begin < end and branch[begin] in ("^", "\\A"):
        begin += 1
    last = end
    while begin < end and branch[end - 1] in ("$", "\\z", "\\Z"):
        end -= 1
    return flags + "".join(branch[begin:end]), begin > first, end < last
