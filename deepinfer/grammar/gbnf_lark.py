"""Rules of GBNF in the matcher's language.

The matcher splits text with a lexer before its parser sees it. So all that is regular becomes one terminal, within
which nothing is lost: rules that take no part in recursion, and in the others every run of such parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.gbnf import ROOT, Chars, Choice, Expression, Name, Repeat, Sequence, Text, names

MAX_SIZE = 1_000_000


def lark(rules: dict[str, Expression]) -> str:
    """Rules of the matcher, of which `start` begins. GrammarError for a grammar that no text satisfies."""
    rules = productive(rules)
    regular = bottom_up(rules)
    _check_size(rules, regular)
    return _Writer(rules, set(rules) - set(regular)).write()


def productive(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The rules that root needs, without alternatives that no text satisfies (rules that call themselves for ever)."""
    users = _users(rules)
    ends: set[str] = set()
    todo = list(rules)
    for name in todo:  # grows: when a rule is found to end, those that use it are looked at again
        if name not in ends and _ends(rules[name], ends):
            ends.add(name)
            todo += users[name]
    if ROOT not in ends:
        raise GrammarError(f"no text satisfies the grammar: rule {ROOT!r} never ends")
    pruned: dict[str, Expression] = {}
    needed = [ROOT]
    for name in needed:  # grows
        if name not in pruned:
            pruned[name] = _pruned(rules[name], ends)
            needed += names(pruned[name])
    return pruned


def bottom_up(rules: dict[str, Expression]) -> list[str]:
    """The rules that neither take part in recursion nor use one that does, each behind those that it uses."""
    users = _users(rules)
    missing = {name: len(set(names(rule))) for name, rule in rules.items()}
    order = [name for name, count in missing.items() if count == 0]
    for name in order:  # grows
        for user in users[name]:
            missing[user] -= 1
            if missing[user] == 0:
                order.append(user)
    return order


def _users(rules: dict[str, Expression]) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for used in set(names(rule)):
            users[used].append(name)
    return users


def _check_size(rules: dict[str, Expression], regular: list[str]) -> None:
    """Terminals are written out within each other: ten rules that double one another are a thousand times one."""
    sizes: dict[str, int] = {}
    for name in regular:
        sizes[name] = _size(rules[name], sizes)
    rest = sum(_size(rule, sizes) for name, rule in rules.items() if name not in sizes)
    if rest + max(sizes.values(), default=0) > MAX_SIZE:
        raise GrammarError(f"the grammar, its rules written out, has more than {MAX_SIZE} parts", "too_large")


def _size(part: Expression, sizes: dict[str, int]) -> int:
    match part:
        case Name(name):
            size = sizes.get(name, 1)
        case Sequence(parts) | Choice(parts):
            size = sum(_size(inner, sizes) for inner in parts)
        case Repeat(inner, low, high):
            size = _size(inner, sizes) * max(1, high or low)
        case Text(text):
            size = len(text)
        case Chars(ranges, _):
            size = len(ranges)
    return min(max(1, size), MAX_SIZE + 1)


def _ends(part: Expression, ends: set[str]) -> bool:
    match part:
        case Name(name):
            return name in ends
        case Sequence(parts):
            return all(_ends(inner, ends) for inner in parts)
        case Choice(parts):
            return any(_ends(inner, ends) for inner in parts)
        case Repeat(inner, low, _):
            return low == 0 or _ends(inner, ends)
        case _:
            return True


def _pruned(part: Expression, ends: set[str]) -> Expression:
    match part:
        case Sequence(parts):
            return Sequence(tuple(_pruned(inner, ends) for inner in parts))
        case Choice(parts):
            return Choice(tuple(_pruned(inner, ends) for inner in parts if _ends(inner, ends)))
        case Repeat(inner, low, high):
            return Repeat(_pruned(inner, ends), low, high) if _ends(inner, ends) else Sequence(())
        case _:
            return part


class _Writer:
    def __init__(self, rules: dict[str, Expression], recursive: set[str]) -> None:
        self._rules = rules
        self._recursive = recursive
        # Names of ours: GBNF's may be written in ways that the matcher reads otherwise.
        self._names = {name: f"r{number}" if name in recursive else f"T{number}" for number, name in enumerate(rules)}
        self._lines: list[str] = []

    def write(self) -> str:
        self._lines = [f"start: {self._names[ROOT]}"]
        for name, rule in self._rules.items():
            body = self._rule(rule) if name in self._recursive else self._terminal(rule)
            self._lines.append(f"{self._names[name]}: {body}")
        return "\n".join(self._lines) + "\n"

    def _is_regular(self, part: Expression) -> bool:
        return not any(name in self._recursive for name in names(part))

    def _rule(self, part: Expression) -> str:
        """An expression in a rule. Parts that are regular become terminals of their own."""
        if self._is_regular(part):
            return self._named_terminal(part)
        match part:
            case Name(name):
                return self._names[name]
            case Choice(parts):
                return "(" + " | ".join(self._alternatives(parts)) + ")"
            case Sequence(parts):
                return "(" + " ".join(self._runs(parts)) + ")"
            case Repeat(inner, low, high):
                return f"({self._rule(inner)}){_bounds(low, high)}"
        raise AssertionError(part)  # what is left is regular

    def _alternatives(self, parts: Iterable[Expression]) -> list[str]:
        """Regular alternatives joined in one terminal."""
        regular = tuple(part for part in parts if self._is_regular(part))
        rest = [self._rule(part) for part in parts if not self._is_regular(part)]
        return ([self._named_terminal(Choice(regular))] if regular else []) + rest

    def _runs(self, parts: Iterable[Expression]) -> list[str]:
        """Regular parts that stand together, joined in one terminal."""
        written = []
        run: list[Expression] = []
        for part in parts:
            if self._is_regular(part):
                run.append(part)
                continue
            if run:
                written.append(self._named_terminal(Sequence(tuple(run))))
                run = []
            written.append(self._rule(part))
        if run:
            written.append(self._named_terminal(Sequence(tuple(run))))
        return written

    def _named_terminal(self, part: Expression) -> str:
        if isinstance(part, Name):
            return self._names[part.name]
        name = f"L{len(self._lines)}"
        self._lines.append(f"{name}: {self._terminal(part)}")
        return name

    def _terminal(self, part: Expression) -> str:
        match part:
            case Text(text):
                return json.dumps(text)
            case Chars(ranges, negated):
                if not ranges:
                    return "/(?s:.)/"
                inside = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges)
                return f"/[{'^' if negated else ''}{inside}]/"
            case Name(name):
                return self._names[name]
            case Choice(parts):
                return "(" + " | ".join(self._terminal(inner) for inner in parts) + ")"
            case Sequence(parts):
                return "(" + " ".join(self._terminal(inner) for inner in parts) + ")" if parts else '""'
            case Repeat(inner, low, high):
                return f"({self._terminal(inner)}){_bounds(low, high)}"


def _bounds(low: int, high: int | None) -> str:
    match low, high:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    return f"{{{low},{'' if high is None else high}}}"
