"""Anthropic's Messages: requests in (spec/codec.md 7.3), streams and complete answers out."""

from __future__ import annotations

import secrets
from typing import Any

from deepinfer.codec.anthropic.errors import ERROR_SCHEMA as ERROR_SCHEMA
from deepinfer.codec.anthropic.errors import OVERLOADED as OVERLOADED
from deepinfer.codec.anthropic.errors import error_body as error_body
from deepinfer.codec.anthropic.errors import error_status as error_status
from deepinfer.codec.anthropic.request import CountTokensRequest as CountTokensRequest
from deepinfer.codec.anthropic.request import MessagesRequest as MessagesRequest
from deepinfer.codec.anthropic.request import conversation_of as conversation_of
from deepinfer.codec.anthropic.request import to_generation as to_generation
from deepinfer.codec.anthropic.writer import MessagesWriter as MessagesWriter
from deepinfer.codec.anthropic.writer import writer as writer


def make_call_id() -> str:
    """The id of a call, which its result must repeat."""
    return f"toolu_{secrets.token_hex(12)}"


def count_body(num_tokens: int) -> dict[str, Any]:
    """The answer of /v1/messages/count_tokens."""
    return {"input_tokens": num_tokens}
