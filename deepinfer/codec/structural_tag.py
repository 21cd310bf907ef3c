"""Structural tags, a response format of other engines' clients: free text, but behind a trigger comes one of the
declared tags, JSON of its schema inside. Written as a grammar in Lark's dialect of llguidance."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from deepinfer.codec.body import Part, short
from deepinfer.codec.errors import RequestError


class TagStructure(Part):
    begin: str
    schema_: dict[str, Any] = Field(alias="schema")
    end: str = ""


def structural_tag_grammar(structures: list[TagStructure] | None, triggers: list[str] | None, param: str) -> str:
    """The grammar's text; its rule `start` begins. RequestError where triggers and tags do not fit.

    The free text in front of a trigger is a lazy token: it ends with the trigger's first occurrence, so a trigger is
    never left in the text without its tag.
    """
    for name, given in (("structures", structures), ("triggers", triggers)):
        if not given:
            raise RequestError(f"{param}.{name}: needs at least one entry", param=f"{param}.{name}")
    assert structures and triggers
    triggers = list(dict.fromkeys(triggers))
    for i, trigger in enumerate(triggers):
        if not trigger or any(other in trigger for other in triggers if other != trigger):
            place = f"{param}.triggers.{i}"
            message = f"{place}: {short(trigger)} is empty or contains another trigger, which comes first"
            raise RequestError(message, param=place)
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for i, tag in enumerate(structures):
        trigger = next((one for one in triggers if tag.begin.startswith(one)), "")
        if not trigger:
            place = f"{param}.structures.{i}.begin"
            raise RequestError(f"{place}: {short(tag.begin)} begins with none of the triggers", param=place)
        bodies[trigger].append(_body(tag, tag.begin[len(trigger) :]))
    for i, trigger in enumerate(triggers):
        if not bodies[trigger]:
            place = f"{param}.triggers.{i}"
            raise RequestError(f"{place}: no structure begins with {short(trigger)}", param=place)
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(triggers)))})* TEXT"]
    for i, trigger in enumerate(triggers):
        rules.append(f"tag_{i}: lead_{i} ({' | '.join(bodies[trigger])})")
        rules.append(f"lead_{i}[lazy]: TEXT {_literal(trigger)}")
    rules.append("TEXT: /(?s:.*)/")
    return "\n".join(rules) + "\n"


def _body(tag: TagStructure, rest: str) -> str:
    schema = f"%json {json.dumps(tag.schema_, ensure_ascii=False)}"
    return " ".join([*([_literal(rest)] if rest else []), schema, *([_literal(tag.end)] if tag.end else [])])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
