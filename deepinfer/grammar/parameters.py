"""The parameters of one call: each is `<DSML parameter name="KEY" string="true|false">VALUE</DSML parameter>`."""

from __future__ import annotations

from typing import Any

from deepinfer.grammar.sources import json_rule
from deepinfer.grammar.structure import ToolGrammar

# A value in JSON is written as the prompt's template would write it, so that a call which comes back as history renders
# to the same text.
SEPARATORS: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
NOT_TEXT = ["object", "array", "number", "boolean", "null"]


def any_parameters(mark: str) -> list[str]:
    """Rules for a tool whose arguments are not enforced: any keys, a text as it is or another value in JSON. They reach
    from behind the call's opening line to the "/" of its closing token. mark: the DSML token.

    A call without arguments has an empty line, as the prompt's template writes it.
    """
    value = json_rule({"type": NOT_TEXT}, SEPARATORS)
    return [
        'any_parameters: "\\n</" | "<" any_parameter+ "/"',
        f'any_parameter: {mark} ANY_KEY ("true\\">" ANY_TEXT | "false\\">" {value} "</") {mark} " parameter>\\n<"',
        'ANY_KEY: " parameter name=\\"" /[^"\\r\\n]{1,256}/ "\\" string=\\""',
        "ANY_TEXT: /(?s:.*)<\\//",  # the closing token follows, and no text spells it
    ]


def declared_parameters(tool: ToolGrammar, mark: str, name: str) -> tuple[str, list[str]]:
    return "any_parameters", []
