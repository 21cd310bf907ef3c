"""OpenAI's Responses: requests in (spec/codec.md 7.2), streams and complete answers out."""

from __future__ import annotations

import secrets

from deepinfer.codec.openai_errors import error_body as error_body
from deepinfer.codec.responses.request import ResponsesRequest as ResponsesRequest
from deepinfer.codec.responses.request import items_of_input as items_of_input
from deepinfer.codec.responses.request import output_items as output_items
from deepinfer.codec.responses.request import to_generation as to_generation
from deepinfer.codec.responses.request import with_history as with_history
from deepinfer.codec.responses.writer import ResponsesWriter as ResponsesWriter
from deepinfer.codec.responses.writer import writer as writer


def make_call_id() -> str:
    """The id of a call, which its output must repeat."""
    return f"call_{secrets.token_hex(12)}"
