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

    on_start: called with the first token. outputs: what the engine says of each prompt's request when it has ended, in
    no order.
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
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.job = job
        self._writer = writer
        self._on_start = on_start
        self._tenant, self._salt = tenant, salt
        count = len(job.prompts)
        names = [request_id] if count == 1 else [f"{request_id}.{prompt}" for prompt in range(count)]
        self._prompts = {name: prompt for prompt, name in enumerate(names)}  # by name of the engine's request
        self._completions = [_Completion(make_parser()) for _ in range(count * job.params.n)]
        self._cached = [0] * count
        self._started = False  # the writer has
        self._enough: list[SequenceDelta] = []  # the last ones of completions that the engine would go on with
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
        streams = [
            client.generate(
                self.job.prompts[prompt],
                self.job.params,
                request_id=name,
                tenant=self._tenant,
                salt=self._salt,
                on_output=self.outputs.append,
            )
            for name, prompt in self._prompts.items()
        ]
        # Tokens pass here one by one: every generator between the engine and the socket is a microsecond of each.
        async with aclosing(streams[0] if len(streams) == 1 else _interleaved(streams)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                piece = self._take(delta)
                while self._enough:
                    last = self._enough.pop()
                    await client.abort(last.request_id, last.index, FinishReason.STOP)
                yield piece

    def _take(self, delta: SequenceDelta) -> bytes:
        prompt = self._prompts[delta.request_id]
        index = prompt * self.job.params.n + delta.index
        completion = self._completions[index]
        if completion.finished:
            return b""
        began = time.perf_counter()
        pieces = []
        self._cached[prompt] = delta.cached_tokens
        if delta.token_ids:
            if not self._started:
                self._on_start()
                pieces.append(self._start())
            if self.job.wants_logprobs:
                _note_logprobs(completion, delta)
            events = self._read(completion, delta.token_ids)
            if events:
                pieces.append(self._render(index, completion, events))
        if delta.finish_reason is not None:
            pieces.append(self._finish(index, completion, delta.finish_reason))
        elif completion.parser.done:
            pieces.append(self._finish(index, completion, str(FinishReason.STOP)))
            self._enough.append(delta)
        self.busy_seconds += time.perf_counter() - began
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]

    def _start(self) -> bytes:
        self._started = True
        return self._writer.start(self.usage)

    def _read(self, completion: _Completion, token_ids: list[int]) -> list[Event]:
        """Tokens behind the end of what is wanted are not counted, however many the engine was ahead."""
        parser = completion.parser
        if not self.job.stop:
            events = parser.push(token_ids)
        else:  # a stop string ends in the middle of a run that the parser takes as one
            events = [event for token_id in token_ids if not parser.done for event in parser.push([token_id])]
        completion.num_tokens = parser.num_read
        return events

    def _finish(self, index: int, completion: _Completion, reason: str) -> bytes:
        if reason == FinishReason.ERROR and len(self._completions) == 1:
            raise internal("the model gave no finite numbers for this; its answer cannot be trusted and was ended")
        if reason == FinishReason.DEADLINE and not self._started:
            raise unavailable("no first token could be made in time; the server is overloaded", code="overloaded")
        pieces = [] if self._started else [self._start()]
        completion.finished = True
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


async def _interleaved(streams: Sequence[AsyncIterator[SequenceDelta]]) -> AsyncIterator[SequenceDelta]:
    """What several streams give, as it comes; the first error ends all of them. Where it is taken slowly, the streams
    wait, and put together what their engine goes on to say."""
    arrived: asyncio.Queue[SequenceDelta | Exception | None] = asyncio.Queue(len(streams))

    async def read(stream: AsyncIterator[SequenceDelta]) -> None:
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for item in stream:
                    await arrived.put(item)
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

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
