"""Tags of DSML (spec/codec.md 3), found behind their control id.

`<｜DSML｜ invoke name="f">`: the bracket and all behind the control id are ordinary text, so a tag may be cut anywhere.
Until it is whole, or cannot become one any more, its pieces wait here. Which tags mean something where is the reader's
matter; here every well-formed tag is one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from deepinfer.codec.parsing.characters import Fragment
from deepinfer.codec.spellings import DSML

LONGEST_TAG = 1024  # characters behind the control id; a name or key that would be longer is text
LONGEST_WORD = 32  # "calls", "invoke", "parameter" and misspellings of them

_WORD = re.compile(r"\s*([A-Za-z_]*)")
_END = re.compile(r"\s*>")
# The shortest name such that only attributes follow it: names are not escaped, so one may hold quotes and brackets.
_ATTRIBUTES = re.compile(r'\s+name="(.*?)"((?:\s+\w+="[^"]*")*)\s*>', re.DOTALL)
_STRING = re.compile(r'\sstring="(true|false)"')
_NAME = 'name="'


class Tag(NamedTuple):
    """word: "calls", "invoke", "parameter" or another; "" for a tag that the end of the output cut off. name, string:
    attributes; string is None where it is missing. source: the tag as it came."""

    word: str
    closing: bool
    name: str | None
    string: bool | None
    source: tuple[Fragment, ...]

    def opens(self, word: str) -> bool:
        return self.word == word and not self.closing

    def closes(self, word: str) -> bool:
        return self.word == word and self.closing


Lexeme = Fragment | Tag


class _Found(NamedTuple):
    end: int
    word: str
    name: str | None = None
    string: bool | None = None


def _find(text: str, closing: bool) -> _Found | bool | None:
    """text: what follows the control id. The tag, or False if there is none, or None if more text decides. The answer
    for the first text that decides is also the answer for every longer one."""
    head = _WORD.match(text)
    assert head is not None  # it matches nothing, too
    word, at = head[1], head.end()
    undecided = None if len(text) < LONGEST_TAG else False
    if at == len(text):
        return undecided if len(word) <= LONGEST_WORD else False
    if not word or len(word) > LONGEST_WORD:
        return False
    if closing or word not in ("invoke", "parameter"):
        match = _END.match(text, at)
        if match is not None:
            return match.end() <= LONGEST_TAG and _Found(match.end(), word)
        return undecided if text[at:].isspace() else False
    match = _ATTRIBUTES.match(text, at)
    if match is not None:
        string = _STRING.search(match[2])
        found = _Found(match.end(), word, match[1], None if string is None else string[1] == "true")
        return found.end <= LONGEST_TAG and found
    name = text[at:].lstrip()[: len(_NAME)]
    return undecided if text[at].isspace() and _NAME.startswith(name) else False


class TagFinder:
    """Tells tags from text, for one output. What may still become a tag is held back: `<` and `</` at the end of a
    text for one token, what follows the control id as long as a tag can come of it."""

    def __init__(self) -> None:
        self._tail: list[Fragment] = []  # ends with the mark
        self._mark = ""  # "<" or "</"
        self._tag: list[Fragment] | None = None  # from the bracket on
        self._text = ""  # of the tag, behind the control id

    @property
    def idle(self) -> bool:
        """Nothing is held back."""
        return self._tag is None and not self._tail

    def text(self, fragment: Fragment) -> list[Lexeme]:
        if self._tag is not None:
            return self._tag_text(self._tag, fragment)
        if fragment.text == "/" and self._mark == "<":
            self._tail.append(fragment)
            self._mark = "</"
            return []
        released: list[Lexeme] = [*self._tail]
        self._mark = "<" if fragment.text.endswith("<") else "</" if fragment.text.endswith("</") else ""
        self._tail = [fragment] if self._mark else []
        return released if self._mark else [*released, fragment]

    def control(self, place: int) -> list[Lexeme]:
        """The control id of DSML."""
        released = self._give_up()
        dsml = Fragment(str(DSML), (place,))
        if not self._mark:
            return [*released, dsml]
        in_front, mark = self._split_tail()
        self._tag, self._text = [*mark, dsml], ""
        return [*released, *in_front]

    def interrupt(self) -> list[Lexeme]:
        """Another control id: no tag goes on behind it."""
        released = [*self._give_up(), *self._tail]
        self._tail, self._mark = [], ""
        return released

    def finish(self) -> list[Lexeme]:
        """The output has ended."""
        in_front, cut = ([], self._tag) if self._tag is not None else self._split_tail() if self._tail else ([], None)
        closing, self._mark, self._tag = self._mark == "</", "", None
        return [*in_front, Tag("", closing, None, None, tuple(cut))] if cut is not None else []

    def _split_tail(self) -> tuple[list[Fragment], list[Fragment]]:
        """(text in front of the mark, the mark): the tail, which is gone then."""
        (first, *rest), self._tail = self._tail, []
        at = len(first.text) - (1 if rest else len(self._mark))  # the mark's two characters may come from two tokens
        if at == 0:
            return [], [first, *rest]
        # The token counts for the text in front, which is surely text.
        return [Fragment(first.text[:at], first.places)], [Fragment(first.text[at:]), *rest]

    def _tag_text(self, tag: list[Fragment], fragment: Fragment) -> list[Lexeme]:
        self._text += fragment.text
        found = _find(self._text, self._mark == "</")
        if found is None:
            tag.append(fragment)
            return []
        if isinstance(found, bool):
            return self._give_up(fragment)
        rest = self._text[found.end :]
        tag.append(Fragment(fragment.text[: len(fragment.text) - len(rest)], () if rest else fragment.places))
        whole = Tag(found.word, self._mark == "</", found.name, found.string, tuple(tag))
        self._tag, self._mark = None, ""
        return [whole, *self.text(Fragment(rest, fragment.places))] if rest else [whole]

    def _give_up(self, *more: Fragment) -> list[Lexeme]:
        """What waits in a tag is text after all; its end may be the bracket of the next tag."""
        fragments, self._tag = [*(self._tag or ()), *more], None
        if not fragments:
            return []
        self._mark = ""
        return [lexeme for fragment in fragments for lexeme in self.text(fragment)]
