"""The reasoning effort in the prompt: any number from 1 to 100, where the format's reference knows three (spec/codec.md
2)."""

from __future__ import annotations

import re

from deepinfer.codec.errors import RequestError

REFERENCE = "high"  # the reference's name for the effort that is rendered, and replaced
_NUMBER = re.compile(r"(Reasoning Effort: )[0-9]+(?= )")


def check_effort(effort: int) -> None:
    """RequestError unless it is a whole number from 1 to 100."""
    if not 1 <= effort <= 100:
        raise RequestError(f"reasoning effort must be 1 to 100, got {effort}", param="reasoning_effort")


def with_effort(lead: str, effort: int) -> str:
    """The text behind the leading system token, with this effort in its first line.

    Raises RuntimeError if the line is not there: another release of the reference renders something else.
    """
    replaced, found = _NUMBER.subn(rf"\g<1>{effort}", lead, count=1)
    if not found or not lead.startswith("Reasoning Effort: "):
        raise RuntimeError(f"no reasoning effort at the beginning of {lead[:60]!r}; see deepseek_recipe's version")
    return replaced
