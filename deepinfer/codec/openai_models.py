"""Objects inside of requests that Chat and Completions share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from deepinfer.codec.conversation import Format
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import Part, json_schema_format, short
from deepinfer.codec.structural_tag import TagStructure, structural_tag_grammar


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: str
    json_schema: JsonSchema | None = None
    regex: str | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None


def response_format(given: ResponseFormat | None, param: str = "response_format") -> Format | None:
    """The content's form, None for free text. Raises RequestError.

    A regex is enforced but not shown to the model: the prompt format has no place for it (spec/codec.md 1.3).
    """
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Format("json_object", None, True, param)
    if given.type == "json_schema":
        if given.json_schema is None:
            raise RequestError(f"{param}.json_schema: is required", param=f"{param}.json_schema")
        return json_schema_format(given.json_schema.schema_, f"{param}.json_schema.schema")
    if given.type == "regex":
        if given.regex is None:
            raise RequestError(f"{param}.regex: is required", param=f"{param}.regex")
        return Format("regex", given.regex, False, f"{param}.regex")
    if given.type == "structural_tag":
        return Format("ebnf", structural_tag_grammar(given.structures, given.triggers, param), False, param)
    kinds = "text, json_object, json_schema, regex or structural_tag"
    raise RequestError(f"{param}.type: must be {kinds}, got {short(given.type)}", param=f"{param}.type")
