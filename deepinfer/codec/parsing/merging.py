"""Pieces of the same text that follow each other are one event."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments


def merged(events: Sequence[Event]) -> list[Event]:
    """The same output in as few events as can be: what any two cuttings of it have in common."""
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
