"""corpus/: bodies whose very bytes are wrong, and for every route a body that has nearly all of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
BROKEN = {path.stem: path.read_bytes() for path in sorted((CORPUS / "broken").glob("*.body"))}
VALID: dict[str, Any] = {
    "/" + path.stem.replace(".", "/"): json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((CORPUS / "valid").glob("*.json"))
}
Place = tuple[Any, ...]
"""Keys and indices that lead to a value."""


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every place in decoded JSON and what stands there, but for the whole."""
    if place:
        yield place, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


def replaced(value: Any, place: Place, new: Any) -> Any:
    """`value` with something else at a place."""
    if not place:
        return new
    if isinstance(value, dict):
        return {**value, place[0]: replaced(value[place[0]], place[1:], new)}
    return [replaced(item, place[1:], new) if i == place[0] else item for i, item in enumerate(value)]


def renamed(value: Any, place: Place, key: str) -> Any:
    """`value` with another key at a place."""
    if len(place) > 1:
        rest = value[place[0]]
        return replaced(value, place[:1], renamed(rest, place[1:], key))
    return {key if name == place[0] else name: item for name, item in value.items()}
