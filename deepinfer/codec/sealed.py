"""Reasoning that travels through a client which must not see it, or drops what it can see.

Two protocols have a field for this: `signature` of an Anthropic thinking block, `encrypted_content` of an OpenAI
reasoning item. Ours hold the text itself, so that a history without visible reasoning renders to the same prompt. It is
packed, not hidden: who may read the answer may read it.
"""

from __future__ import annotations

import base64
import binascii

SIGNATURE = "deepinfer"
"""Of reasoning that stands beside it in full."""
_PREFIX = f"{SIGNATURE}:"


def seal(text: str) -> str:
    return _PREFIX + base64.b64encode(text.encode("utf-8")).decode("ascii")


def unseal(sealed: str) -> str | None:
    """The text, or None for what another server sealed. ValueError for a damaged one of ours."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("is damaged: send it back as it came, or leave it out") from None
