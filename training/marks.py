"""Marks on stored token ids: ids need 13 bits, the two bits above say how much a token counts in the loss."""

from __future__ import annotations

from collections.abc import Iterable

IDS = (1 << 13) - 1  # the id itself
SKIP = 1 << 13  # cannot be predicted (first showing of random tokens): does not count
ANSWER = 1 << 14  # can be worked out from what stands before: counts ANSWER_WEIGHT times
ANSWER_WEIGHT = 3.0


def skip(ids: Iterable[int]) -> list[int]:
    """The ids, marked as not counting."""
    return [i | SKIP for i in ids]


def answer(ids: Iterable[int]) -> list[int]:
    """The ids, marked as an answer."""
    return [i | ANSWER for i in ids]


def mark_turns(ids: list[int], opening: int, closing: int) -> list[int]:
    """A chat with everything behind an `opening` id up to and including `closing` marked as an answer."""
    out, inside = [], False
    for i in ids:
        out.append(i | ANSWER if inside else i)
        inside = i == opening or (inside and i != closing)
    return out
