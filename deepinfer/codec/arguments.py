"""A call's arguments as the parameters of the V4.1 tool markup (spec/codec.md 1.3, rule 9).

What a client sends back is JSON text. Its values are rendered as the model would write them: texts as they are, all
else as JSON with ", " and ": " between. The reference reads numbers as float64 and so changes long ones (an id of 20
digits); here whole numbers stay exact. And where the text's outermost level is separated as in our own answers, its
values are kept to the letter, so that a call that comes back renders to the very tokens that the model generated.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple


class Parameter(NamedTuple):
    key: str
    text: str
    is_string: bool  # `text` is the value itself; else its JSON


def parameters(arguments: str) -> list[Parameter]:
    """The parameters of one call, in order. What is no JSON object becomes a single text parameter `arguments`.

    A text that cannot be written as UTF-8 (half of a surrogate pair behind an escape) counts as no JSON.
    """
    found = _as_spelled(arguments)
    if found is None:
        found = _normalised(arguments)
    if found is None or not all(_is_unicode(text) for parameter in found for text in parameter[:2]):
        return [Parameter("arguments", arguments, True)]
    return found


def _normalised(arguments: str) -> list[Parameter] | None:
    try:
        value = json.loads(arguments, parse_constant=_refuse, parse_float=_finite)
        if not isinstance(value, dict):
            return None
        return [
            Parameter(key, item, True)
            if isinstance(item, str)
            else Parameter(key, json.dumps(item, ensure_ascii=False), False)
            for key, item in value.items()
        ]
    except (ValueError, RecursionError):
        return None


def _as_spelled(arguments: str) -> list[Parameter] | None:
    """The parameters with their values' own spelling, if exactly ", " and ": " separate the outermost level."""
    if arguments[:2] != '{"' or arguments[-1:] != "}":
        return None  # also for "{}", which has no value to keep
    found = []
    at = 1
    try:
        while arguments[at] == '"':
            key, at = _DECODER.raw_decode(arguments, at)
            if arguments[at : at + 2] != ": ":
                return None
            start = at + 2
            value, at = _DECODER.raw_decode(arguments, start)
            is_string = isinstance(value, str)
            found.append(Parameter(key, value if is_string else arguments[start:at], is_string))
            if arguments[at : at + 2] != ", ":
                return found if at == len(arguments) - 1 else None
            at += 2
    except (ValueError, IndexError, RecursionError):
        pass
    return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond float64")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# Numbers are left as they stand; int() would refuse one of 4,301 digits.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=lambda text: 0.0, parse_int=lambda text: 0)
