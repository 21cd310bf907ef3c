"""A model in this process that answers as the server would: the same prompts, defaults and grammars."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from deepinfer.chat.source import Figures
from deepinfer.codec.body import parse
from deepinfer.codec.chat.request import ChatRequest, to_generation
from deepinfer.codec.chat.writer import make_call_id
from deepinfer.codec.events import Event
from deepinfer.codec.generation import Usage
from deepinfer.codec.openai_objects import finish_reason
from deepinfer.llm import LLM
from deepinfer.server.generate import parser_maker
from deepinfer.server.models import ServedModel
from deepinfer.server.prepare import prepare
from deepinfer.server.settings import ServerSettings

PATIENCE = 7 * 86400.0  # seconds: nobody else waits for this model, however slow it is


class LocalModel:
    """An AnswerSource."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._model = ServedModel.load(llm.path, llm.settings)
        self._settings = ServerSettings(request_timeout=PATIENCE, first_token_timeout=PATIENCE)
        self._threads = ThreadPoolExecutor(1)
        self.name = self._model.name

    def answer(self, body: dict[str, Any], figures: Figures) -> Iterator[Event]:
        began = time.perf_counter()
        generation = to_generation(parse(ChatRequest, {**body, "model": self.name}))
        context = self._llm.engine_config.max_model_len
        job = asyncio.run(prepare(generation, self._model, self._settings, context=context, threads=self._threads))
        parser = parser_maker(
            job, self._model.tokenizer, plain=False, make_id=make_call_id, promote_unterminated=False
        )()
        before = self._drafts()
        num_tokens, cached, reason = 0, 0, "stop"
        deltas = self._llm.stream(job.prompts[0].tolist(), job.params)
        try:
            with closing(deltas):  # type: ignore[type-var]
                for delta in deltas:
                    figures.saw(time.perf_counter() - began)
                    num_tokens += len(delta.token_ids)
                    cached = delta.cached_tokens
                    yield from parser.push(delta.token_ids)
                    if delta.finish_reason is not None:
                        reason = delta.finish_reason
                    if parser.done:
                        break
            yield from parser.finish(reason)
            assert parser.result is not None
            figures.finish = finish_reason(parser.result)
        finally:
            figures.usage = Usage(len(job.prompts[0]), cached, num_tokens, parser.reasoning_tokens)
            rounds, accepted = (now - then for now, then in zip(self._drafts(), before, strict=True))
            figures.accepted = accepted / rounds if rounds and self._is_drafting else None

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    @property
    def _is_drafting(self) -> bool:
        return self._llm.engine.core.stats().drafts.drafted > 0

    def _drafts(self) -> tuple[int, int]:
        """Rounds and accepted drafts so far."""
        drafts = self._llm.engine.core.stats().drafts
        return drafts.rounds, drafts.accepted
