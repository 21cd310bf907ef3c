"""An engine process as asyncio code uses it: start or attach, stream answers, be told within two seconds if it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from deepinfer.cache.events import CacheEvent
from deepinfer.engine import wire
from deepinfer.engine.admission import check_label, check_token_ids
from deepinfer.engine.answer import TextStream
from deepinfer.engine.client_connection import Connection, EngineDeadError, EngineDrainingError
from deepinfer.engine.core_process import MakeCore
from deepinfer.engine.engine_process import EngineProcess
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.frontend import OutputProcessor
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.outputs import RequestOutput, SequenceDelta
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.stop import FinishReason
from deepinfer.metrics import EngineMetrics, EngineStats, RequestStats

__all__ = ["AsyncEngineClient", "EngineDeadError", "EngineDrainingError"]

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256
"""Tokens of a delta without text: a reader that comes late takes them in turns, so that the others' tokens go on."""


@dataclass(eq=False, slots=True)
class _Stream:
    """One request under way, as its reader sees it.

    What its reader has not taken yet is one delta per completion, however much comes: a reader that is slower than the
    engine gets more at once, and costs less.
    """

    request: EngineRequest
    arrival: float
    last_token: dict[int, float] = field(default_factory=dict)  # when, by completion
    _arrived: dict[int, SequenceDelta] = field(default_factory=dict)  # by completion
    _error: Exception | None = None
    _reader: asyncio.Future[None] | None = None

    @property
    def is_empty(self) -> bool:
        return not self._arrived and self._error is None

    def put(self, delta: SequenceDelta) -> None:
        waiting = self._arrived.setdefault(delta.index, delta)
        if waiting is not delta:
            waiting.extend(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def get(self) -> SequenceDelta:
        """What has come and was not taken, of one completion. Raises what the request failed with, after that."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        index, delta = next(iter(self._arrived.items()))
        if len(delta.token_ids) > MOST_AT_ONCE and not delta.text:
            part = delta.first(MOST_AT_ONCE)
            await asyncio.sleep(0)
            return part
        return self._arrived.pop(index)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncEngineClient:
    """Made by `start` (an engine process of its own) or `connect` (one that runs already); a context manager, or closed
    with `close`. All of it on one event loop.

    detokenizer: makes the text stream of a completion (argument: skip_special_tokens); None = token ids only.
    keep_outputs: whole answers hold their tokens; False: their numbers and times alone, as for readers of deltas.
    on_progress: told what the engine is loading and how far it is, when that changes. model: a name for the metrics.
    name: of this client in the engine's log.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        process: EngineProcess | None = None,
        detokenizer: Callable[[bool], TextStream] | None = None,
        keep_outputs: bool = True,
        on_progress: Callable[[str, float | None], None] | None = None,
        model: str = "",
        name: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.process = process  # if it is this client's own
        self.metrics = EngineMetrics(model)
        self._name = name or f"pid {os.getpid()}"
        self._processor = OutputProcessor(detokenizer, keep=keep_outputs)
        self._on_progress = on_progress
        self._numbers = count()
        self._streams: dict[int, _Stream] = {}  # by number
        self._named: dict[str, _Stream] = {}  # by request_id
        self._replies: dict[int, asyncio.Future[EngineStats]] = {}
        self._listeners: set[asyncio.Queue[list[CacheEvent] | Exception]] = set()
        self._draining = False
        self._ready: wire.Ready | None = None
        self._last_output = time.monotonic()
        self._beat = wire.Heartbeat(state="loading")
        self._connection = Connection(endpoint, self._take, self._notice_death, process)

    # -- begin and end ------------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        make_core: MakeCore,
        *,
        endpoint: str | None = None,
        drain_timeout: float | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncEngineClient:
        """Starts an engine process and waits until it takes requests.

        make_core: makes the core there (engine/model_core.py); importable by name, because the process starts afresh.
        endpoint: where it listens, None = a socket in a private directory. drain_timeout: see `run_core`. timeout:
        seconds for loading, None = as long as the process lives. options: those of the class. EngineDeadError if it
        does not come up.
        """
        process = await asyncio.to_thread(EngineProcess, make_core, endpoint, drain_timeout)
        try:
            client = cls(process.endpoint, process=process, **options)
        except BaseException:
            await asyncio.to_thread(process.stop)
            raise
        await client._open(None, timeout)
        return client

    @classmethod
    async def connect(cls, endpoint: str, *, timeout: float = 30.0, **options: Any) -> AsyncEngineClient:
        """Attaches to an engine process. EngineDeadError if it does not answer within `timeout` seconds; one that loads
        its model answers, and is waited for. ProtocolMismatchError if it is another release's."""
        client = cls(endpoint, **options)
        await client._open(timeout, None)
        return client

    async def _open(self, answer_within: float | None, ready_within: float | None) -> None:
        try:
            ready = await self._connection.open(self._name, answer_within, ready_within)
        except BaseException:
            await self.close()
            raise
        if self._beat.state == "loading":
            self._beat = wire.Heartbeat(state="ready")
        self._ready = ready
        self.metrics.set_info("build", {"version": ready.build})
        self.metrics.set_info("cache_config", ready.settings)

    async def __aenter__(self) -> AsyncEngineClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every request of this client. A process that `start` made ends too."""
        await self._connection.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        tenant: str = "",
        salt: str = "",
        on_output: Callable[[RequestOutput], None] | None = None,
        counted: bool = True,
    ) -> AsyncIterator[SequenceDelta]:
        """Completes one prompt and yields what each step adds, or several steps where the reader is slower than they
        are. Leaving the loop, or cancelling the task, aborts it.

        tenant: whose share it counts against; salt: it shares cached prefixes only with requests of the same salt.
        on_output: given the whole answer at its end. counted: it is in the metrics. InvalidRequestError names the field
        that is wrong; EngineDrainingError and EngineDeadError mean that another engine may do better; EngineStepError:
        a step failed and took this request with it.
        """
        params = SamplingParams() if params is None else params
        stream = self._submit(prompt_token_ids, params, request_id, prompt, tenant, salt)
        number, name = stream.request.number, stream.request.request_id
        try:
            while self._processor.is_unfinished(name) or not stream.is_empty:
                yield await stream.get()
            output = self._processor.pop_output(name)
            if counted:
                self.metrics.observe_request(_request_stats(stream, output))
            if on_output is not None:
                on_output(output)
        finally:
            del self._streams[number], self._named[name]
            if self._processor.is_unfinished(name):
                self._processor.end(name, FinishReason.ABORT)
                self._connection.send(wire.Abort(number=number))
            self._processor.forget(name)

    async def complete(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The whole answer. options: those of `generate`."""
        outputs: list[RequestOutput] = []
        deltas = self.generate(prompt_token_ids, params, on_output=outputs.append, **options)
        async with aclosing(deltas):  # type: ignore[type-var]
            async for _ in deltas:
                pass
        return outputs[0]

    async def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Ends a request, or one completion of it; whoever reads it gets the end, with this reason (STOP where the
        reader has all that it wanted). False if that is not under way."""
        number = self._processor.number_of(request_id)
        if number is None:
            return False
        ends = self._processor.end(request_id, reason, index)
        if ends:
            self._connection.send(wire.Abort(number=number, index=index))
        self._hand_out(ends)
        return bool(ends)

    def _submit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        request_id: str | None,
        prompt: str | None,
        tenant: str,
        salt: str,
    ) -> _Stream:
        self._raise_if_dead()
        if self._draining:
            raise EngineDrainingError("the engine is draining and takes no new requests; send it to another one")
        number = next(self._numbers)
        name = f"{self._connection.identity.hex()}-{number}" if request_id is None else request_id
        for label, value in (("request_id", name), ("tenant", tenant), ("salt", salt)):
            check_label(label, value)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("sampling_params", f"must be SamplingParams, got {type(params).__name__}")
        if self._processor.is_known(name):
            raise InvalidRequestError("request_id", f"{name!r} is already in use")
        if params.stop and not self._processor.reads_text:
            raise InvalidRequestError("stop", "stop strings need a tokenizer, and this client has none")
        request = EngineRequest(
            number=number,
            request_id=name,
            prompt_token_ids=_as_ids(prompt_token_ids),
            params=params,
            max_tokens=params.max_tokens or 0,  # the engine cuts it at its context
            tenant=tenant,
            salt=salt,
        )
        frames = wire.encode_add(number, request)
        stream = _Stream(request, time.monotonic())
        self._processor.add(request, prompt)
        self._streams[number] = self._named[name] = stream
        self._connection.transmit(frames)
        return stream

    # -- the engine as a whole ----------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self._connection.death is None

    @property
    def state(self) -> str:
        """ "loading", "ready", "draining" or "dead"."""
        return self._beat.state if self.is_alive else "dead"

    @property
    def last_step_age(self) -> float:
        """Seconds since the engine's last step ended, while it has work: large when a step hangs."""
        return self._beat.last_step_age

    @property
    def last_output_age(self) -> float:
        """Seconds since the engine sent tokens of any request of this client, or since this client was made."""
        return time.monotonic() - self._last_output

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        assert self._ready is not None
        return self._ready.max_model_len

    @property
    def settings(self) -> Mapping[str, Any]:
        """The engine's EngineConfig, field by field."""
        assert self._ready is not None
        return self._ready.settings

    async def wait_ended(self) -> Exception:
        """Returns when nothing will come from the engine any more, with the reason."""
        await self._connection.ended.wait()
        assert self._connection.death is not None
        return self._connection.death

    def _raise_if_dead(self) -> None:
        if self._connection.death is not None:
            raise self._connection.death

    async def drain(self, timeout: float | None = None) -> None:
        """Has the engine finish what it has, of every client, and end; returns when it has. timeout: seconds after
        which the rest is aborted. EngineDeadError if it dies on the way."""
        self._draining = True
        self._connection.send(wire.Drain(timeout=timeout))
        await self._connection.ended.wait()
        if not isinstance(self._connection.death, EngineDrainingError):
            self._raise_if_dead()

    async def stats(self) -> EngineStats:
        """What the engine has counted since it started. EngineDeadError."""
        self._raise_if_dead()
        tag = next(self._numbers)
        reply = self._replies[tag] = asyncio.get_running_loop().create_future()
        self._connection.send(wire.StatsRequest(tag=tag))
        try:
            return await reply
        finally:
            del self._replies[tag]

    async def render_metrics(self) -> bytes:
        """The engine's numbers and those of this client's requests, in Prometheus' text format."""
        self.metrics.take_totals(await self.stats())
        return self.metrics.render()

    async def events(self) -> AsyncIterator[list[CacheEvent]]:
        """What the engine's prefix cache stores and loses from now on. EngineDeadError at its end."""
        self._raise_if_dead()
        arrived: asyncio.Queue[list[CacheEvent] | Exception] = asyncio.Queue()
        self._listeners.add(arrived)
        self._connection.send(wire.Subscribe())
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._listeners.discard(arrived)

    # -- what comes ---------------------------------------------------------------------------------------------------

    def _take(self, message: wire.ToClient) -> None:
        match message:
            case wire.Outputs(output=output):
                deltas, aborts = self._processor.process(output)
                for number, index in aborts:
                    self._connection.send(wire.Abort(number=number, index=index))
                self._hand_out(deltas)
            case wire.Refused(number=int(number), draining=True):
                self._fail(number, EngineDrainingError(message.message))
            case wire.Refused(number=int(number)):
                self._fail(number, InvalidRequestError(message.field, message.message))
            case wire.Refused():
                logger.error("the engine refused a message: %s", message.message)
            case wire.Failed(numbers=numbers):
                for number in numbers:
                    self._fail(number, EngineStepError(message.message))
            case wire.Stats(tag=tag):
                if tag in self._replies and not self._replies[tag].done():
                    self._replies[tag].set_result(message.stats)
            case wire.Events():
                for listener in self._listeners:
                    listener.put_nowait(message.events)
            case wire.Heartbeat():
                self._note_beat(message)

    def _note_beat(self, beat: wire.Heartbeat) -> None:
        before, self._beat = self._beat, beat
        if beat.state == "loading" and self._on_progress is not None:
            news = (beat.stage, beat.fraction)
            if news != (before.stage, before.fraction):
                self._on_progress(*news)

    def _hand_out(self, deltas: list[SequenceDelta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            stream = self._named.get(delta.request_id)
            if stream is None:
                continue
            if delta.token_ids:
                if delta.index in stream.last_token:
                    self.metrics.observe_gap(now - stream.last_token[delta.index], len(delta.token_ids))
                stream.last_token[delta.index] = self._last_output = now
            stream.put(delta)

    def _fail(self, number: int, error: Exception) -> None:
        """Ends one request with an error."""
        stream = self._streams.get(number)
        if stream is not None:
            self._processor.end(stream.request.request_id, FinishReason.ERROR)
            stream.fail(error)

    def _notice_death(self, error: Exception) -> None:
        """Whoever waits is told."""
        for number, stream in list(self._streams.items()):
            if self._processor.is_unfinished(stream.request.request_id):
                self._fail(number, error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        for listener in self._listeners:
            listener.put_nowait(error)


def _request_stats(stream: _Stream, output: RequestOutput) -> RequestStats:
    return RequestStats(
        prompt_tokens=len(stream.request.prompt_token_ids),
        max_tokens=stream.request.params.max_tokens,
        completion_tokens=[completion.num_tokens for completion in output.outputs],
        finish_reasons=[str(completion.finish_reason) for completion in output.outputs],
        queue=output.metrics.queue,
        ttft=output.metrics.ttft,
        time_per_token=output.metrics.tbt,
        e2e=time.monotonic() - stream.arrival,
    )


def _as_ids(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """int32 [n]; InvalidRequestError for what is no list of ids. Whether the model knows them the engine says."""
    if not isinstance(token_ids, Sequence | np.ndarray):
        raise InvalidRequestError("prompt_token_ids", f"must be a list, got {type(token_ids).__name__}")
    check_token_ids("prompt_token_ids", token_ids, 1 << 31, {})
    return np.array(token_ids, np.int32)
