"""JSON as text: what a model wrote is checked and kept in its own spelling."""

from __future__ import annotations

from typing import Any

import msgspec


def inside_string(text: str) -> str:
    """The text as it stands between the quotes of a JSON string; pieces of a text give pieces of the string."""
    return msgspec.json.encode(text)[1:-1].decode()


def string(text: str) -> str:
    """The text as a JSON string."""
    return msgspec.json.encode(text).decode()


def value(text: str) -> tuple[bool, Any]:
    """(is the text one JSON value that readers of JSON can hold, that value). Not one: NaN, half of a surrogate pair,
    numbers beyond a double, thousands of brackets in each other."""
    try:
        return True, msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False, None
