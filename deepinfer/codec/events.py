"""What an output says, free of any protocol: the parser makes these, the protocols' writers render them.

`tokens` are the places (0 = first generated token) of the tokens whose text is in the event, each listed once in all
events of an output, with the event that releases the last of its text. Tokens of markup are in no event.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    complete: bool  # False: the output ended inside the call


Event = Reasoning | Content | ToolStart | ToolArguments | ToolEnd


def merged(events: Sequence[Event]) -> list[Event]:
    """The same output in fewer events: neighbours that continue each other become one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(last, Content) and isinstance(event, Content):
            result[-1] = Content(last.text + event.text, last.tokens + event.tokens)
        elif isinstance(last, Reasoning) and isinstance(event, Reasoning):
            result[-1] = Reasoning(last.text + event.text, last.tokens + event.tokens)
        elif isinstance(last, ToolArguments) and isinstance(event, ToolArguments) and last.call == event.call:
            result[-1] = ToolArguments(last.call, last.text + event.text)
        else:
            result.append(event)
    return result
