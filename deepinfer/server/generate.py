"""One answer in the making: the engine's deltas of ids, through a parser per completion, to its writer's bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from deepinfer.codec.events import Event
from deepinfer.codec.generation import AnswerWriter, TokenLogprob, Usage
from deepinfer.codec.parsing import OutputParser, PlainParser
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.outputs import RequestOutput, SequenceDelta
from deepinfer.engine.stop import FinishReason, OutputText
from deepinfer.server.errors import internal, unavailable
from deepinfer.server.prepare import Job

MakeParser = Callable[[], OutputParser | PlainParser]


def parser_maker(
    job: Job, tokenizer: Tokenizer, *, plain: bool, make_id: Callable[[], str], promote_unterminated: bool
) -> MakeParser:
    """What reads one completion. plain: of /v1/completions, where all is content."""

    def make() -> OutputParser | PlainParser:
        stop = OutputText(job.stop, job.include_stop) if job.stop else None
        if plain:
            return PlainParser(tokenizer, stop=stop, min_tokens=job.params.min_tokens)
        return OutputParser(
            tokenizer,
            starts=job.starts,
            tools=job.tools,
            stop=stop,
            min_tokens=job.params.min_tokens,
            make_id=make_id,
            promote_unterminated=promote_unterminated,
            max_calls=job.max_calls,
            drop_calls=job.hides_calls,
        )

    return make


class _Completion:
    """One output on its way."""

    __slots__ = ("finished", "logprobs", "num_tokens", "parser")

    def __init__(self, parser: OutputParser | PlainParser) -> None:
        self.parser = parser
        self.num_tokens = 0
        self.logprobs: dict[int, TokenLogprob] = {}  # by place, of tokens whose text has not come out yet
        self.finished = False


class Answer:
    """Runs a job on an engine. `pieces` yields what the writer has to say, all but the end; `usage` grows meanwhile.

    outputs: what the engine says of each prompt's request when it has ended, in no order.
    """

    def __init__(
        self,
        job: Job,
        writer: AnswerWriter,
        make_parser: MakeParser,
        *,
        request_id: str,
        tenant: str = "",
        salt: str = "",
    ) -> None:
        self.job = job
        self._writer = writer
        self._request_id = request_id
        self._tenant, self._salt = tenant, salt
        self._completions = [_Completion(make_parser()) for _ in range(len(job.prompts) * job.params.n)]
        self._cached = [0] * len(job.prompts)
        self.started = False  # the first token has come
        self.finish_reasons: list[str] = []
        self.outputs: list[RequestOutput] = []
        self.busy_seconds = 0.0  # spent on parsing and rendering

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(
            prompt_tokens=self.job.prompt_tokens,
            cached_tokens=sum(self._cached),
            completion_tokens=sum(completion.num_tokens for completion in self._completions),
            reasoning_tokens=sum(completion.parser.reasoning_tokens for completion in self._completions),
        )

    async def pieces(self, client: AsyncEngineClient) -> AsyncIterator[bytes]:
        """Bytes of the answer's body, possibly empty ones; the first item comes with the first token. Raises what
        AsyncEngineClient.generate raises, and RequestError if nothing came in time. Leaving it ends the job."""
        if len(self.job.prompts) == 1:
            deltas = self._generate(client, 0)
        else:
            deltas = _interleaved([self._generate(client, prompt) for prompt in range(len(self.job.prompts))])
        async with aclosing(deltas):  # type: ignore[type-var]
            async for prompt, delta in deltas:
                yield await self._take(client, prompt, delta)

    async def _generate(self, client: AsyncEngineClient, prompt: int) -> AsyncIterator[tuple[int, SequenceDelta]]:
        deltas = client.generate(
            self.job.prompts[prompt],
            self.job.params,
            request_id=self._engine_id(prompt),
            tenant=self._tenant,
            salt=self._salt,
            on_output=self.outputs.append,
        )
        async with aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                yield prompt, delta

    def _engine_id(self, prompt: int) -> str:
        return self._request_id if len(self.job.prompts) == 1 else f"{self._request_id}.{prompt}"

    async def _take(self, client: AsyncEngineClient, prompt: int, delta: SequenceDelta) -> bytes:
        index = prompt * self.job.params.n + delta.index
        completion = self._completions[index]
        if completion.finished:
            return b""
        began = time.perf_counter()
        pieces = []
        self._cached[prompt] = delta.cached_tokens
        if delta.token_ids:
            if not self.started:
                self.started = True
                pieces.append(self._writer.start(self.usage))
            if self.job.wants_logprobs:
                _note_logprobs(completion, delta)
            events = self._read(completion, delta.token_ids)
            if events:
                pieces.append(self._render(index, completion, events))
        if delta.finish_reason is not None:
            pieces.append(self._finish(index, completion, delta.finish_reason))
        elif completion.parser.done:
            pieces.append(self._finish(index, completion, str(FinishReason.STOP)))
            await client.abort(self._engine_id(prompt), delta.index, FinishReason.STOP)
        self.busy_seconds += time.perf_counter() - began
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]

    def _read(self, completion: _Completion, token_ids: list[int]) -> list[Event]:
        """Tokens behind the end of what is wanted are not counted, however many the engine was ahead."""
        if not self.job.stop and self.job.max_calls is None:
            completion.num_tokens += len(token_ids)
            return completion.parser.push(token_ids)
        events: list[Event] = []
        for token_id in token_ids:
            if not completion.parser.done:
                completion.num_tokens += 1
                events += completion.parser.push([token_id])
        return events

    def _finish(self, index: int, completion: _Completion, reason: str) -> bytes:
        if reason == FinishReason.ERROR and len(self._completions) == 1:
            raise internal("the model gave no finite numbers for this; its answer cannot be trusted and was ended")
        if reason == FinishReason.DEADLINE and not self.started:
            raise unavailable("no first token could be made in time; the server is overloaded", code="overloaded")
        pieces = [] if self.started else [self._writer.start(self.usage)]
        self.started = completion.finished = True
        events = completion.parser.finish(reason)
        if events:
            pieces.append(self._render(index, completion, events))
        finish = completion.parser.result
        assert finish is not None
        self.finish_reasons.append(finish.reason)
        pieces.append(self._writer.finish(index, finish))
        completion.logprobs.clear()
        return b"".join(pieces)

    def _render(self, index: int, completion: _Completion, events: list[Event]) -> bytes:
        rendered = self._writer.events(index, events, completion.logprobs)
        if completion.logprobs:
            for event in events:
                for place in getattr(event, "tokens", ()):
                    completion.logprobs.pop(place, None)
        return rendered


def _note_logprobs(completion: _Completion, delta: SequenceDelta) -> None:
    tops: Sequence[dict[int, float] | None] = delta.logprobs or [None] * len(delta.token_ids)
    first = completion.num_tokens
    for offset, (token, logprob, top) in enumerate(zip(delta.token_ids, delta.token_logprobs, tops, strict=True)):
        completion.logprobs[first + offset] = TokenLogprob(token, logprob, top)


async def _interleaved(
    streams: list[AsyncIterator[tuple[int, SequenceDelta]]],
) -> AsyncIterator[tuple[int, SequenceDelta]]:
    """What several streams give, as it comes; the first error ends all of them."""
    arrived: asyncio.Queue[tuple[int, SequenceDelta] | Exception | None] = asyncio.Queue()

    async def read(stream: AsyncIterator[tuple[int, SequenceDelta]]) -> None:
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for item in stream:
                    arrived.put_nowait(item)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    readers = [asyncio.create_task(read(stream)) for stream in streams]
    left = len(readers)
    try:
        while left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
