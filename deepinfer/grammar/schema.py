"""JSON schemas as the matcher takes them: what it would refuse and others can say is said otherwise, and what cannot be
enforced is refused by name and place. Nothing is passed over in silence.

The matcher knows most of draft 2020-12. Said otherwise here, each with the same meaning (or a part of it): formats that
nobody tests (annotations), propertyNames, dependentRequired, dependentSchemas, dependencies, unevaluatedItems and
unevaluatedProperties where nothing else evaluates, oneOf with an OpenAPI discriminator, and uniqueItems of at most one.
"""

from __future__ import annotations

import json
from typing import Any

from deepinfer.grammar.errors import GrammarError

Schema = dict[str, Any]

# Formats that the matcher enforces; any other is an annotation, as the standard has it by default.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)  # fmt: skip
UNSUPPORTED = ("not", "if", "contains", "minContains", "maxContains", "$dynamicRef", "$dynamicAnchor", "$recursiveRef")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalItems", "additionalProperties")
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TEXTS = ("pattern", "format", "$ref", "$id", "$anchor", "$schema")


def parse_schema(source: str, what: str = "the JSON schema") -> Schema:
    """A JSON schema from its text; `true` is the empty schema. GrammarError."""
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError(f"{what} is `false`, which allows nothing")
    if not isinstance(schema, dict):
        raise GrammarError(f"{what} must be an object, true or false")
    return schema


def enforceable(schema: Any, place: str = "#") -> Any:
    """The schema for the matcher. GrammarError naming the place of what cannot be enforced."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(f"{place}: a schema must be an object, true or false")
    for key in UNSUPPORTED:
        if key in schema:
            raise GrammarError(f"{place}: {key!r} cannot be enforced")
    _check_shape(schema, place)
    schema = {key: value for key, value in schema.items() if key != "x-guidance"}  # the matcher's options: ours to set
    for key in SCHEMA_MAPS:
        if key in schema:
            members = _mapping(schema[key], f"{place}/{key}").items()
            schema[key] = {name: enforceable(value, f"{place}/{key}/{name}") for name, value in members}
    for key in SCHEMA_LISTS:
        if key in schema:
            schema[key] = _each(schema[key], f"{place}/{key}")
    for key in SCHEMAS:
        if isinstance(schema.get(key), list) and key == "items":
            schema[key] = _each(schema[key], f"{place}/{key}")
        elif key in schema:
            schema[key] = enforceable(schema[key], f"{place}/{key}")
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)
    for rewrite in (_unique_items, _unevaluated, _property_names, _dependencies, _discriminator):
        rewrite(schema, place)
    return schema


def _check_shape(schema: Schema, place: str) -> None:
    """Keywords hold what the standard has them hold, so that nobody below has to ask."""
    for key, value in schema.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in COUNTS and not (number and value >= 0 and float(value).is_integer()):
            wanted = "a count"
        elif key in NUMBERS and not number:  # draft 4 has true and false as exclusive bounds
            wanted = "a number"
        elif key in TEXTS and not isinstance(value, str):
            wanted = "a text"
        elif key == "uniqueItems" and not isinstance(value, bool):
            wanted = "true or false"
        elif key == "enum" and not isinstance(value, list):
            wanted = "a list"
        elif key == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            wanted = "a list of names"
        elif key == "type" and not all(
            isinstance(kind, str) for kind in (value if isinstance(value, list) else [value])
        ):
            wanted = "a name or a list of names"
        else:
            continue
        raise GrammarError(f"{place}/{key}: must be {wanted}, got {json.dumps(value)[:80]}")


def _unique_items(schema: Schema, place: str) -> None:
    if schema.pop("uniqueItems", False) and not (_count(schema.get("maxItems")) <= 1):
        raise GrammarError(f"{place}: 'uniqueItems' cannot be enforced")


def _unevaluated(schema: Schema, place: str) -> None:
    """Where no other keyword evaluates anything, what is unevaluated is what is additional."""
    for key, plain in (("unevaluatedItems", "items"), ("unevaluatedProperties", "additionalProperties")):
        if key not in schema:
            continue
        value = enforceable(schema.pop(key), f"{place}/{key}")
        if value is True or value == {} or plain in schema:
            continue  # with the plain keyword nothing is left unevaluated
        if any(applicator in schema for applicator in APPLICATORS):
            raise GrammarError(f"{place}: {key!r} beside $ref, allOf, anyOf or oneOf cannot be enforced")
        schema[plain] = value


def _property_names(schema: Schema, place: str) -> None:
    """Names of a pattern or a list: then only such names may stand there."""
    if "propertyNames" not in schema:
        return
    names = schema.pop("propertyNames")
    if names is True or (isinstance(names, dict) and not set(names) - {"type", "title", "description"}):
        return  # every name is a string
    where = f"{place}/propertyNames"
    rest = schema.get("additionalProperties", True)
    declared = schema.get("properties", {})
    known = {"type", "title", "description", "pattern", "enum", "const", "minLength", "maxLength"}
    if not isinstance(names, dict) or set(names) - known or "patternProperties" in schema:
        raise GrammarError(f"{where}: nothing but pattern, enum, const, minLength and maxLength can be enforced")
    patterns = []
    if "pattern" in names:
        patterns.append(names["pattern"])
    if "minLength" in names or "maxLength" in names:
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        patterns.append(f"^(?s:.{{{low},{high}}})$")
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if len(patterns) + (listed is not None) > 1 or (patterns and declared):
        raise GrammarError(f"{where}: a pattern or a length beside others, or beside 'properties', cannot be enforced")
    if listed is not None:
        allowed = {name: declared.get(name, rest) for name in listed if isinstance(name, str)}
        schema["properties"] = allowed | {name: False for name in declared if name not in allowed}
    else:
        schema["patternProperties"] = {patterns[0]: rest}
    schema["additionalProperties"] = False


def _dependencies(schema: Schema, place: str) -> None:
    """If a property is there, more must hold: either it is not there, or both."""
    cases: list[tuple[str, Any]] = []
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in _mapping(schema.pop(key, {}), f"{place}/{key}").items():
            if isinstance(needed, list):
                cases.append((name, {"required": [name, *needed]}))
            else:
                more = enforceable(needed, f"{place}/{key}/{name}")
                cases.append((name, {"allOf": [{"required": [name]}, more]}))
    if cases:
        schema["allOf"] = [
            *schema.get("allOf", []),
            *({"anyOf": [{"properties": {name: False}}, needed]} for name, needed in cases),
        ]


def _discriminator(schema: Schema, place: str) -> None:
    """OpenAPI's discriminator says which property tells the branches of oneOf apart; it is then required there."""
    discriminator = schema.pop("discriminator", None)
    if isinstance(discriminator, dict) and isinstance(name := discriminator.get("propertyName"), str):
        for key in ("oneOf", "anyOf"):
            if key in schema:
                schema[key] = [{"allOf": [branch, {"required": [name]}]} for branch in schema[key]]


def _each(schemas: Any, place: str) -> list[Any]:
    if not isinstance(schemas, list):
        raise GrammarError(f"{place}: must be a list of schemas")
    return [enforceable(schema, f"{place}/{number}") for number, schema in enumerate(schemas)]


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(f"{place}: must be an object")
    return value


def _count(value: Any) -> float:
    return value if isinstance(value, int | float) else float("inf")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
