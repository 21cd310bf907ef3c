"""What an output says, free of any protocol: the parser makes these, the protocols' writers render them.

`tokens` are the places (0 = first generated token) of the tokens whose text is in the event, each listed once in all
events of an output, with the event that releases the last of its text. Tokens of markup are in no event.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple


class Reasoning(NamedTuple):
    text: str
    tokens: tuple[int, ...] = ()


class Content(NamedTuple):
    text: str
    tokens: tuple[int, ...] = ()


class ToolStart(NamedTuple):
    call: int  # its number in the answer
    id: str
    name: str


class ToolArguments(NamedTuple):
    call: int
    text: str  # the next piece of the arguments' JSON


class ToolEnd(NamedTuple):
    call: int
    arguments: str  # whole: a JSON object if `complete`
    complete: bool  # False: the output ended inside the call, or a part of it cannot be read


Event = Reasoning | Content | ToolStart | ToolArguments | ToolEnd


def merged(events: Sequence[Event]) -> list[Event]:
    """The same output in as few events as can be: neighbours that continue each other become one."""
    if len(events) < 2:
        return list(events)
    return [event for _, run in groupby(events, _kind) for event in _joined(list(run))]


def _kind(event: Event) -> tuple[type, int]:
    return type(event), event.call if isinstance(event, ToolArguments) else 0


def _joined(run: list[Event]) -> list[Event]:
    """run: of one kind."""
    first = run[0]
    if len(run) == 1 or not isinstance(first, Reasoning | Content | ToolArguments):
        return run
    text = "".join(event.text for event in run)  # type: ignore[union-attr]
    if isinstance(first, ToolArguments):
        return [ToolArguments(first.call, text)]
    return [type(first)(text, tuple(chain.from_iterable(event.tokens for event in run)))]  # type: ignore[union-attr]
