"""The models that a server offers."""

from __future__ import annotations

import json

from deepinfer.client.chat import refusal
from deepinfer.client.http import Connection, ServerUnreachable


async def model_names(connection: Connection) -> list[str]:
    """Those that requests may use, the model's own first. ServerRefusal, ServerUnreachable."""
    async with connection.request("GET", "/v1/models") as answer:
        if answer.status != 200:
            raise await refusal(answer)
        try:
            return [str(model["id"]) for model in json.loads(await answer.body())["data"]]
        except (ValueError, LookupError, TypeError):
            raise ServerUnreachable(f"{connection.address}: what answers is no model server") from None
