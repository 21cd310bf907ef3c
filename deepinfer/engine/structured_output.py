"""What a caller asks of the output's form, as the one thing that is enforced (grammar/structure.py)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from deepinfer.engine.errors import InvalidRequestError
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.limits import check_limits
from deepinfer.grammar.structure import Grammar, Structure

if TYPE_CHECKING:
    from deepinfer.engine.sampling_params import SamplingParams

FIELDS = ("json_schema", "regex", "ebnf", "structure")


def schema_text(schema: Any) -> Any:
    """A JSON schema as its text, so that it travels and compares as it was given; what is no schema stays."""
    if not isinstance(schema, dict | bool):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError("json_schema", f"is no JSON: {error}") from None


def asked_field(params: SamplingParams) -> str | None:
    """The field that asks for something, None if none does. InvalidRequestError where several do."""
    given = [name for name in FIELDS if getattr(params, name) is not None]
    if len(given) > 1:
        raise InvalidRequestError(given[1], f"cannot be used together with {given[0]}; drop one of the two")
    return given[0] if given else None


def enforced(params: SamplingParams) -> Structure | None:
    """What all of the output must be, None = anything."""
    name = asked_field(params)
    if name is None:
        return None
    value = getattr(params, name)
    if name == "structure":
        return None if value.is_empty else value
    return Structure(content=Grammar(name, value))  # type: ignore[arg-type]  # the other fields are kinds of grammars


def check_structure(params: SamplingParams) -> None:
    """Types, sizes, and what cannot be had together. Whether a grammar makes sense shows when it is compiled."""
    name = asked_field(params)
    if name is None:
        return
    value = getattr(params, name)
    kind, accepted = (str, "a text") if name != "structure" else (Structure, "a Structure")
    if not isinstance(value, kind):
        accepted = "a dict, a bool or the text of a schema" if name == "json_schema" else accepted
        raise InvalidRequestError(name, f"must be {accepted}, got {value!r:.80}")
    structure = enforced(params)
    if structure is None:
        return
    if params.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos", f"conflicts with {name}: where the structure ends nothing but the end token may follow"
        )
    try:
        check_limits(structure)
    except GrammarError as error:
        raise InvalidRequestError(name, error.message) from None
