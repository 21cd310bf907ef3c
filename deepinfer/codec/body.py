"""Bodies of requests: the pydantic base of all models, and how what is wrong with a body is told to its sender."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from deepinfer.codec.errors import RequestError

MAX_DEPTH = 128  # objects and lists inside each other; twice the depth that a schema may have
MAX_IGNORED = 32  # names in the header that lists ignored fields


def _fail_fast(schema: Any) -> None:
    """Sets the mark in every list's schema, in place."""
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if value.get("type") == "list":
                value["fail_fast"] = True
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)


class Part(pydantic.BaseModel):
    """An object inside a request. Strict: a number is a number, not a text that holds one. Unknown keys are kept, so
    that `ignored_fields` can name them."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Every list ends at its first wrong entry: a body of millions of them would cost minutes and gigabytes of
        errors, of which one is told."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


class Body(Part):
    """A request's body. All of it can be written as JSON in UTF-8 again: JSON's \\u escapes can spell half of a
    surrogate pair, and Python reads numbers that JSON does not have, which is refused here, once for all fields."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _values(cls, data: Any) -> Any:
        check_values(data)
        return data


def check_values(data: Any) -> None:
    """RequestError naming the place in `data` (decoded JSON) of a text or key that holds a lone surrogate, of a number
    that is infinite or none at all, or of what lies deeper than anything that is asked for: what comes later may
    recurse.

    Linear in the size of the body: a place is a chain of links until somebody wants to read it.
    """
    stack: list[tuple[_Link, int, Any]] = [(None, 0, {"": data})]
    while stack:
        link, depth, value = stack.pop()
        if depth > MAX_DEPTH + 1:
            raise _error_at(link, f"is nested too deeply; a body may have {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and not _writable(key):
                    raise _error_at((ascii(key)[1:-1], link), "the key holds half of a surrogate pair")
        for step, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            kind = type(item)
            if kind is str:
                if not _writable(item):
                    raise _error_at((step, link), "holds half of a surrogate pair; send valid Unicode text")
            elif kind is float:
                if not math.isfinite(item):
                    raise _error_at((step, link), "must be a finite number")
            elif kind not in _HARMLESS and isinstance(item, list | Mapping):
                stack.append(((step, link), depth + 1, item))


_HARMLESS = frozenset((int, bool, type(None)))  # a prompt of a million ids costs no time
_Link = tuple[Any, "_Link"] | None  # the last step of a place, and those before


def _error_at(link: _Link, what: str) -> RequestError:
    steps: list[str] = []
    while link is not None:
        step, link = link
        steps.append(str(step)[:64])
    param = ".".join(reversed(steps[:-1]))  # without the frame around the body
    return RequestError(f"{param or 'the body'}: {what}", param=param or None)


def _writable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def ignored_fields(body: Part, names: Iterable[str] = (), *, honoured: Iterable[str] = ()) -> list[str]:
    """Names of the fields that were given and have no effect: of `names`, those that are set, and all unknown keys,
    also inside of objects (without the places in lists: `messages.name`), but none of the `honoured`, whose only
    accepted values ask for what happens anyway. ASCII without blanks and commas, at most 32, so that they fit in a
    header.
    """
    found = dict.fromkeys(name for name in names if getattr(body, name, None) is not None)
    _unknown_keys(body, "", found, frozenset(honoured))
    safe = dict.fromkeys(re.sub(r"[^!-~]|,", "?", name)[:64] for name in found)
    return list(safe)[:MAX_IGNORED]


def _unknown_keys(part: Part, path: str, found: dict[str, None], honoured: frozenset[str] = frozenset()) -> None:
    declared = type(part).model_fields
    for key, value in (part.model_extra or {}).items():
        if value is not None and key not in honoured and len(found) <= MAX_IGNORED:
            found.setdefault(path + key)
    for name in part.model_fields_set:
        if name in declared:
            value = getattr(part, name)
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, Part):
                    _unknown_keys(item, f"{path}{declared[name].alias or name}.", found)


def short(value: Any) -> str:
    """A value for an error message: a beginning of a text, only the kind of what could be long and deep."""
    if isinstance(value, str):
        text = repr(value[:81]).encode("utf-8", "backslashreplace").decode()
        return text if len(value) <= 80 else f"{text[:77]}..."
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool | None):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**70:
        return "a number of many digits"  # Python refuses to print those of more than 4,300
    return ascii(value)[:80]


B = TypeVar("B", bound=Body)


def parse(model: type[B], data: Any) -> B:
    """The body of a request from decoded JSON. Raises RequestError."""
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise validation_error(error.errors(include_url=False), data) from None


def validation_error(errors: Sequence[Mapping[str, Any]], data: Any) -> RequestError:
    """The RequestError for pydantic's list of errors (FastAPI's too: their places begin with "body").

    data: the decoded body, which tells the client's own keys in a place from the names that pydantic gives to branches
    of a union. Of the first field that is wrong the deepest place is reported: it belongs to the branch that fitted
    best.
    """
    for error in errors:
        if isinstance(cause := error.get("ctx", {}).get("error"), RequestError):
            return cause
    places = [(_place(error, data), error) for error in errors]
    first = [item for item in places if item[0][:1] == places[0][0][:1]]
    deepest = max((place for place, _ in first), key=len)
    phrases = dict.fromkeys(_phrase(error) for place, error in first if place == deepest)
    if len(phrases) > 1:
        phrases.pop("must be null", None)
    what = " or ".join(phrases)
    got = next(error for place, error in first if place == deepest)
    suffix = "" if got["type"] in ("missing", "json_invalid") else f", got {short(got.get('input'))}"
    param = ".".join(deepest) or None
    return RequestError(f"{param or 'the body'}: {what}{suffix}", param=param)


def _place(error: Mapping[str, Any], data: Any) -> tuple[str, ...]:
    """The error's place as keys and indices that lead through `data`."""
    loc = error["loc"]
    if loc[:1] == ("body",):
        loc = loc[1:]
    place: list[str] = []
    for step in loc:
        # a text is looked for in a range by going through all of it: only numbers are asked for
        by_index = isinstance(data, list) and isinstance(step, int)
        inside = step in range(len(data)) if by_index else isinstance(data, Mapping) and step in data
        if inside:
            data = data[step]
        elif not (error["type"] == "missing" and step == loc[-1]):
            continue
        place.append(str(step))
    return tuple(place)


_PHRASES = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "must be null",
    "json_invalid": "is not valid JSON ({error})",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_long": "may have at most {max_length} entries",
    "too_short": "needs {min_length} or more entries",
    "string_too_long": "may have at most {max_length} characters",
}


def _phrase(error: Mapping[str, Any]) -> str:
    phrase = _PHRASES.get(error["type"])
    if phrase is None:
        return f"is not acceptable: {error['msg']}"
    return phrase.format(**error.get("ctx", {}))
