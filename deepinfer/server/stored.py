"""/v1/responses and what the server keeps of them: requests that go on from an earlier answer, and its routes."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request

from deepinfer.codec.errors import RequestError
from deepinfer.codec.generation import AnswerWriter
from deepinfer.codec.responses.request import ResponsesRequest, items_of_input, output_items, with_history
from deepinfer.codec.responses.writer import ResponsesWriter
from deepinfer.server.respond import Exchange
from deepinfer.server.response_store import StoreError
from deepinfer.server.state import ServerState

logger = logging.getLogger(__name__)


class ResponsesExchange(Exchange):
    """An exchange whose answer is kept, unless the request says otherwise."""

    _body: ResponsesRequest

    async def _resolve(self) -> None:
        previous = self._body.previous_response_id
        if previous is not None:
            kept = await find(self._state, self._tenant, previous, param="previous_response_id")
            self._body = with_history(self._body, kept["items"])

    async def _keep(self, writer: AnswerWriter) -> None:
        assert isinstance(writer, ResponsesWriter)
        answer = writer.answer
        self._record.response_id = None if answer is None else answer["id"]
        if answer is None or self._body.store is False:
            return
        value = {"response": answer, "items": [*items_of_input(self._body), *output_items(answer)]}
        try:
            if not await self._state.store.put(self._tenant, answer["id"], value):
                logger.warning("response %s is too large to be kept", answer["id"])
        except StoreError as error:
            logger.error("response %s is not kept: %s", answer["id"], error)

    @property
    def _tenant(self) -> str:
        return self._scope["state"]["principal"].tenant


async def find(state: ServerState, tenant: str, response_id: str, *, param: str | None = None) -> dict[str, Any]:
    """What is kept of a response. RequestError 404 if nothing is, for this tenant."""
    value = await state.store.get(tenant, response_id)
    if value is None:
        raise _unknown(response_id, param)
    return value


async def retrieve(state: ServerState, request: Request, response_id: str) -> dict[str, Any]:
    """GET /v1/responses/{response_id}. Whole: what a stream would say again is not kept."""
    if request.query_params.get("stream", "false").lower() != "false":
        raise RequestError("stream: stored responses are given whole; leave it out", param="stream")
    value = await find(state, request.scope["state"]["principal"].tenant, response_id)
    response: dict[str, Any] = value["response"]
    return response


async def delete(state: ServerState, request: Request, response_id: str) -> dict[str, Any]:
    """DELETE /v1/responses/{response_id}"""
    if not await state.store.delete(request.scope["state"]["principal"].tenant, response_id):
        raise _unknown(response_id, None)
    return {"id": response_id, "object": "response", "deleted": True}


def _unknown(response_id: str, param: str | None) -> RequestError:
    where = "" if param is None else f"{param}: "
    message = (
        f"{where}there is no response {response_id!r:.80} here: it was never stored, was forgotten, or is another's"
    )
    return RequestError(message, param=param, status=404, kind="not_found_error", code="not_found")
