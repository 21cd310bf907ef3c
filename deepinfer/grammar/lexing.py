"""Does splitting text into terminals lose sentences of a grammar?

The lexer of llguidance takes the longest terminal and does not go back. A sentence is lost if one terminal could end
where it, or another, could also go on with the character that comes next: `[a-z]*` in front of a rule that begins with
"abc". Here that is found out from the rules, before anything is matched: terminals as automata over positions
(Glushkov), and FIRST and FOLLOW sets of characters for the rules around them. An answer of "lost" may be wrong, since
any two terminals are taken to compete; an answer of "exact" is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deepinfer.grammar.gbnf import ROOT, Chars, Choice, Expression, Name, Repeat, Sequence, Text, names
from deepinfer.grammar.gbnf_lark import bottom_up, productive

MAX_POSITIONS = 2_000  # characters in all terminals, written out; beyond that nobody looks
LAST = 0x10FFFF
Ranges = frozenset[tuple[int, int]]


def loses_sentences(rules: dict[str, Expression]) -> bool:
    """For rules of gbnf.parse. True also for grammars that are too large to look at."""
    rules = productive(rules)
    regular = {name: rules[name] for name in bottom_up(rules)}
    if ROOT in regular:
        return False  # one terminal is the whole grammar
    try:
        analysis = _Analysis({name: rule for name, rule in rules.items() if name not in regular}, regular)
        return analysis.conflict()
    except OverflowError:
        return True


@dataclass(slots=True)
class _Automaton:
    """States are positions in a terminal; state 0 is before it."""

    chars: list[Ranges] = field(default_factory=lambda: [frozenset()])
    nexts: list[set[int]] = field(default_factory=lambda: [set()])
    finals: set[int] = field(default_factory=set)


class _Part:
    """Glushkov's sets of a part: may it be empty, its first and last positions."""

    __slots__ = ("empty", "first", "last")

    def __init__(self, empty: bool, first: set[int], last: set[int]) -> None:
        self.empty, self.first, self.last = empty, first, last


class _Analysis:
    def __init__(self, rules: dict[str, Expression], regular: dict[str, Expression]) -> None:
        self._rules = rules
        self._regular = regular
        self._positions = 0
        self._terminals: dict[Expression, _Automaton] = {}
        self._empty: dict[str, bool] = dict.fromkeys(rules, False)
        self._first: dict[str, Ranges] = dict.fromkeys(rules, frozenset())
        self._follow: dict[str, Ranges] = dict.fromkeys(rules, frozenset())
        self._behind: dict[Expression, Ranges] = {}

    def conflict(self) -> bool:
        self._until_stable(self._update_first)
        self._until_stable(self._update_follow)
        return any(
            behind and _goes_on(self._automaton(one), self._automaton(other), behind)
            for one, behind in self._behind.items()
            for other in self._behind
        )

    # -- FIRST and FOLLOW --------------------------------------------------------------------------------------------

    def _until_stable(self, update: Callable[[], bool]) -> None:
        while update():
            pass

    def _update_first(self) -> bool:
        changed = False
        for name, rule in self._rules.items():
            empty, first = self._first_of(rule)
            if (empty, first) != (self._empty[name], self._first[name]):
                self._empty[name], self._first[name] = empty, first
                changed = True
        return changed

    def _first_of(self, part: Expression) -> tuple[bool, Ranges]:
        """(may it be empty, the characters that it may begin with)."""
        if self._is_regular(part):
            automaton = self._automaton(part)
            return 0 in automaton.finals, _union(automaton.chars[at] for at in automaton.nexts[0])
        match part:
            case Name(name):
                return self._empty[name], self._first[name]
            case Choice(parts):
                found = [self._first_of(inner) for inner in parts]
                return any(empty for empty, _ in found), _union(first for _, first in found)
            case Sequence(_):
                return self._first_of_all(self._steps(part))
            case Repeat(inner, low, _):
                empty, first = self._first_of(inner)
                return empty or low == 0, first
        raise AssertionError(part)

    def _first_of_all(self, parts: list[Expression]) -> tuple[bool, Ranges]:
        found: Ranges = frozenset()
        for part in parts:
            empty, first = self._first_of(part)
            found |= first
            if not empty:
                return False, found
        return True, found

    def _update_follow(self) -> bool:
        before = sum(map(len, self._follow.values())) + sum(map(len, self._behind.values())) + len(self._behind)
        for name, rule in self._rules.items():
            self._place(rule, self._follow[name])
        return sum(map(len, self._follow.values())) + sum(map(len, self._behind.values())) + len(self._behind) > before

    def _place(self, part: Expression, behind: Ranges) -> None:
        """`part` stands somewhere in front of the characters `behind`."""
        if self._is_regular(part):
            self._behind[part] = self._behind.get(part, frozenset()) | behind
            return
        match part:
            case Name(name):
                self._follow[name] |= behind
            case Choice(parts):
                regular = tuple(inner for inner in parts if self._is_regular(inner))
                if regular:  # as they are written: one terminal
                    self._place(Choice(regular), behind)
                for inner in parts:
                    if not self._is_regular(inner):
                        self._place(inner, behind)
            case Sequence(_):
                steps = self._steps(part)
                for at, inner in enumerate(steps):
                    empty, first = self._first_of_all(steps[at + 1 :])
                    self._place(inner, first | behind if empty else first)
            case Repeat(inner, _, high):
                self._place(inner, behind if high == 1 else behind | self._first_of(inner)[1])

    def _steps(self, part: Sequence) -> list[Expression]:
        """Parts of a sequence, runs of regular ones as the one terminal that they are written as."""
        steps: list[Expression] = []
        run: list[Expression] = []
        for inner in part.parts:
            if self._is_regular(inner):
                run.append(inner)
                continue
            steps += ([run[0] if len(run) == 1 else Sequence(tuple(run))] if run else []) + [inner]
            run = []
        return steps + ([run[0] if len(run) == 1 else Sequence(tuple(run))] if run else [])

    def _is_regular(self, part: Expression) -> bool:
        return not any(name in self._rules for name in names(part))

    # -- terminals ---------------------------------------------------------------------------------------------------

    def _automaton(self, part: Expression) -> _Automaton:
        if part not in self._terminals:
            automaton = _Automaton()
            whole = self._build(part, automaton)
            automaton.nexts[0] = whole.first
            automaton.finals = whole.last | ({0} if whole.empty else set())
            self._terminals[part] = automaton
        return self._terminals[part]

    def _build(self, part: Expression, automaton: _Automaton) -> _Part:
        match part:
            case Text(text):
                whole = _Part(True, set(), set())
                for char in text:
                    whole = self._joined(whole, self._char(frozenset([(ord(char), ord(char))]), automaton), automaton)
                return whole
            case Chars(ranges, negated):
                return self._char(_complement(ranges) if negated else frozenset(ranges), automaton)
            case Name(name):
                return self._build(self._regular[name], automaton)
            case Sequence(parts):
                whole = _Part(True, set(), set())
                for inner in parts:
                    whole = self._joined(whole, self._build(inner, automaton), automaton)
                return whole
            case Choice(parts):
                built = [self._build(inner, automaton) for inner in parts]
                return _Part(
                    any(one.empty for one in built),
                    set().union(*(one.first for one in built)),
                    set().union(*(one.last for one in built)),
                )
            case Repeat(inner, low, high):
                whole = _Part(True, set(), set())
                for number in range(low if high is None else high):
                    one = self._build(inner, automaton)
                    one.empty = one.empty or number >= low
                    whole = self._joined(whole, one, automaton)
                if high is None:
                    loop = self._build(inner, automaton)
                    for at in loop.last:
                        automaton.nexts[at] |= loop.first
                    loop.empty = True
                    whole = self._joined(whole, loop, automaton)
                return whole
        raise AssertionError(part)

    def _char(self, chars: Ranges, automaton: _Automaton) -> _Part:
        self._positions += 1
        if self._positions > MAX_POSITIONS:
            raise OverflowError
        automaton.chars.append(chars)
        automaton.nexts.append(set())
        at = len(automaton.chars) - 1
        return _Part(False, {at}, {at})

    def _joined(self, left: _Part, right: _Part, automaton: _Automaton) -> _Part:
        for at in left.last:
            automaton.nexts[at] |= right.first
        return _Part(
            left.empty and right.empty,
            left.first | (right.first if left.empty else set()),
            right.last | (left.last if right.empty else set()),
        )


def _goes_on(one: _Automaton, other: _Automaton, behind: Ranges) -> bool:
    """Is there a text of `one` behind which `other`, having read the same text, can read one of `behind`?"""
    seen = {(0, 0)}
    todo = [(0, 0)]
    for mine, yours in todo:  # grows
        if mine in one.finals and any(_overlap(other.chars[at], behind) for at in other.nexts[yours]):
            return True
        for at in one.nexts[mine]:
            for there in other.nexts[yours]:
                if (at, there) not in seen and _overlap(one.chars[at], other.chars[there]):
                    seen.add((at, there))
                    todo.append((at, there))
    return False


def _union(sets: Iterable[Ranges]) -> Ranges:
    return frozenset().union(*sets)


def _overlap(left: Ranges, right: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in left for c, d in right)


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found = []
    begin = 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return frozenset([*found, (begin, LAST)] if begin <= LAST else found)
