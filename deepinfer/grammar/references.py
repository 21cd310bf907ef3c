"""`$ref` of JSON schemas that are taken apart: what a part refers to must go with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.schema import Schema

WHOLE = "@whole"  # the name under which the schema itself goes with a part that refers to it
HOMES = ("$defs", "definitions")
VALUES = ("const", "enum", "default", "examples")  # what stands there is no schema


def resolve(schema: Any, root: Schema) -> Any:
    """The schema that a lone `$ref` into `root` means, and with other keywords beside it the list of all as allOf.
    GrammarError for one that leads nowhere, or in a circle."""
    seen = set()
    while isinstance(schema, dict) and "$ref" in schema:
        reference = schema["$ref"]
        if not isinstance(reference, str) or reference in seen:
            raise GrammarError(f"$ref {reference!r} leads in a circle, or is no text")
        seen.add(reference)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        target = _target(reference, root)
        schema = {"allOf": [target, rest]} if rest else target
    return schema


def with_references(part: Schema, root: Schema) -> Schema:
    """A part of `root` as a schema of its own: the definitions that it needs stand beside it."""
    homes: dict[str, dict[str, Any]] = {}
    part = _moved(part)
    todo = list(_references(part))
    done = set()
    while todo:
        reference = todo.pop()
        steps = _steps(reference)
        if reference in done or len(steps) < 2 or steps[0] not in HOMES:
            continue
        done.add(reference)
        home, name = steps[:2]
        if name in homes.get(home, {}):
            continue
        needed = _without_homes(root) if name == WHOLE else _target(f"#/{home}/{_escaped(name)}", root)
        homes.setdefault(home, {})[name] = needed = _moved(needed)
        todo += _references(needed)
    return part | homes


def _target(reference: str, root: Schema) -> Any:
    target: Any = root
    for step in _steps(reference):
        if isinstance(target, dict) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        else:
            raise GrammarError(f"$ref {reference!r} leads nowhere in the schema")
    return target


def _steps(reference: str) -> list[str]:
    if reference in ("#", "#/"):
        return []
    if not reference.startswith("#/"):
        raise GrammarError(
            f"$ref {reference!r}: only references within the schema, beginning with '#/', can be followed"
        )
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/")]


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1").replace("%", "%25")


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key, value in schema.items():
            if key not in VALUES:
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _moved(schema: Any) -> Any:
    """References to anything but definitions, pointed to the copy of the whole schema."""
    if isinstance(schema, list):
        return [_moved(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: value if key in VALUES else _moved(value) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str):
        steps = _steps(reference)
        if len(steps) < 2 or steps[0] not in HOMES:
            moved["$ref"] = "/".join([f"#/$defs/{WHOLE}", *map(_escaped, steps)])
    return moved


def _without_homes(root: Schema) -> Schema:
    return {key: value for key, value in root.items() if key not in (*HOMES, "$id")}
