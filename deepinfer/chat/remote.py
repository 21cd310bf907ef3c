"""A model behind a server that runs already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from deepinfer.chat.source import Figures
from deepinfer.client import (
    Address,
    Connection,
    Exposition,
    ServerRefusal,
    ServerUnreachable,
    model_names,
    scrape,
    stream_chat,
)
from deepinfer.codec.events import Event

T = TypeVar("T")


class RemoteModel:
    """An AnswerSource. Asks for the server's models when it is made: ServerUnreachable, ServerRefusal, or ValueError
    for a name that is not served there."""

    def __init__(self, server: str, api_key: str | None = None, model: str | None = None) -> None:
        self._runner = asyncio.Runner()
        self._connection = Connection(Address.parse(server), api_key=api_key)
        try:
            names = self._wait(model_names(self._connection))
            if model is not None and model not in names:
                raise ValueError(f"model: {model!r} is not served at {server}; there is {', '.join(names)}")
        except BaseException:
            self.close()
            raise
        self.name = model or names[0]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def answer(self, body: dict[str, Any], figures: Figures) -> Iterator[Event]:
        before = self._wait(self._metrics())
        began = time.perf_counter()
        asked = {**body, "model": self.name, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = stream_chat(self._connection, asked)

        async def following() -> Any:
            return await anext(chunks, None)

        async def leave() -> None:
            await chunks.aclose()  # type: ignore[attr-defined]

        try:
            while (chunk := self._wait(following())) is not None:
                if chunk.events:
                    figures.saw(chunk.at - began)
                figures.usage = chunk.usage or figures.usage
                figures.finish = chunk.finish or figures.finish
                yield from chunk.events
        finally:
            self._wait(leave())
            figures.accepted = _accepted(before, self._wait(self._metrics()))

    async def _metrics(self) -> Exposition | None:
        """None where they are not to be had: they are an ornament here."""
        try:
            async with asyncio.timeout(2):
                return await scrape(self._connection)
        except (ServerRefusal, ServerUnreachable, TimeoutError):
            self._connection.close()
            return None

    def close(self) -> None:
        self._connection.close()
        self._runner.close()


def _accepted(before: Exposition | None, after: Exposition | None) -> float | None:
    """Drafts accepted per round between two scrapes. Of the whole server: alone on it they are this answer's."""
    if before is None or after is None or not after.growth(before, "spec_decode_draft_tokens_total"):
        return None
    rounds = after.growth(before, "spec_decode_drafts_total")
    return after.growth(before, "spec_decode_accepted_tokens_total") / rounds if rounds else None
