"""Core and front end in one process: requests of token ids in, outputs with text out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import numpy as np

from deepinfer.cache.manager import CacheManager
from deepinfer.engine.admission import check_label
from deepinfer.engine.answer import TextStream
from deepinfer.engine.blocked import Condition
from deepinfer.engine.core import EngineCore
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.frontend import OutputProcessor
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.outputs import RequestOutput, SequenceDelta
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.stop import FinishReason
from deepinfer.metrics.log_line import LogLine


class Engine:
    """Not thread-safe: one owner calls add_request, abort and step in turn.

    detokenizer: makes the text stream of a sequence (argument: skip_special_tokens), or None for ids only, in which
    case stop strings are refused. clock: the core's, in seconds. report: gets a line on how the engine does every
    `report_interval` steps; 0 = never.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        detokenizer: Callable[[bool], TextStream] | None = None,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] | None = None,
        report_interval: int = 0,
    ) -> None:
        self.core = core
        self.outputs = OutputProcessor(detokenizer, clock)
        self._clock = clock
        self._numbers = count()
        self._report = report if report_interval else None
        self._log = LogLine(report_interval, clock)
        self._reported = core.meter.last

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def cache(self) -> CacheManager:
        return self.core.manager

    @property
    def has_unfinished(self) -> bool:
        return self.outputs.has_unfinished

    def is_unfinished(self, request_id: str) -> bool:
        """True while the request waits or runs."""
        return self.outputs.is_unfinished(request_id)

    def check(self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams) -> int:
        """The door alone: raises InvalidRequestError, or returns how many tokens the request may generate."""
        if params.stop and not self.outputs.reads_text:
            raise InvalidRequestError("stop", "stop strings need a tokenizer, and this engine has none")
        return self.core.check(prompt_token_ids, params)

    def check_grammar(self, params: SamplingParams) -> None:
        """Waits until what the output must be is compiled. InvalidRequestError naming the field that is wrong."""
        grammar = self.core.grammars.begin(params)
        if grammar is not None:
            grammar.wait()

    def check_ids(self, field: str, token_ids: Sequence[int] | np.ndarray) -> None:
        """Raises InvalidRequestError unless there are ids and the model knows them all."""
        self.core.check_ids(field, token_ids)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        prompt: str | None = None,
        arrival: float | None = None,
        *,
        tenant: str = "",
        salt: str = "",
        blocked_on: Iterable[Condition] = (),
    ) -> None:
        """Queues a request; raises InvalidRequestError and changes nothing if it can never run.

        arrival: when it was submitted, on the engine's clock; None = now. tenant: whose share it counts against; salt:
        it shares cached prefixes only with requests of the same salt. blocked_on: what must be ready before it runs.
        """
        for field, value in (("request_id", request_id), ("tenant", tenant), ("salt", salt)):
            check_label(field, value)
        if self.outputs.is_known(request_id):
            raise InvalidRequestError("request_id", f"{request_id!r} is already in use")
        max_tokens = self.check(prompt_token_ids, params)
        now = self._clock()
        request = EngineRequest(
            number=next(self._numbers),
            request_id=request_id,
            prompt_token_ids=np.array(prompt_token_ids, np.int32),
            params=params,
            max_tokens=max_tokens,
            age=0.0 if arrival is None else now - arrival,
            tenant=tenant,
            salt=salt,
        )
        self.outputs.add(request, prompt, now if arrival is None else arrival)
        try:
            self.core.add(request, tuple(blocked_on))
        except BaseException:
            self.discard(request_id)
            raise

    def abort(self, request_id: str) -> bool:
        """Ends a request in whatever state it is and frees what it holds; False if it is not running. Idempotent."""
        number = self.outputs.number_of(request_id)
        if number is None:
            return False
        self.core.abort(number)
        self.outputs.end(request_id, FinishReason.ABORT)
        return True

    def discard(self, request_id: str) -> None:
        """Ends a request if it runs, and forgets its output if nobody took it. Idempotent."""
        self.abort(request_id)
        self.outputs.forget(request_id)

    def abort_all(self) -> None:
        for request_id in self.outputs.unfinished():
            self.abort(request_id)

    def pop_output(self, request_id: str) -> RequestOutput:
        """Hands a finished request over; KeyError if it has not finished or was handed over before."""
        return self.outputs.pop_output(request_id)

    def step(self) -> list[SequenceDelta]:
        """Runs one step and says what became known. With the overlapped loop that is what an earlier step computed, so
        the first call may say nothing. If it fails, everything under way is ended with reason "abort", all slots and
        blocks are free again, and EngineStepError is raised with the cause chained."""
        try:
            output = self.core.step()
        except EngineStepError:
            self._end_outputs()
            raise
        except BaseException:  # an interrupt may have struck anywhere: what the device was to do may not be done
            self.core.recover()
            self._end_outputs()
            raise
        begin = time.perf_counter()
        deltas, aborts = self.outputs.process(output)
        for refusal in self.core.take_refused():
            deltas += self.outputs.end(refusal.request_id, FinishReason.ERROR)
        self.core.meter.add_output(time.perf_counter() - begin)
        for number, index in aborts:
            self.core.abort(number, index)
        self._report_progress()
        return deltas

    def _end_outputs(self) -> None:
        for request_id in self.outputs.unfinished():
            self.outputs.end(request_id, FinishReason.ABORT)

    def _report_progress(self) -> None:
        step = self.core.meter.last
        if self._report is None or step is self._reported:
            return
        self._reported = step
        if (line := self._log.observe(step)) is not None:
            self._report(line)

    def close(self) -> None:
        """Ends everything and stops the device's thread, if there is one. Idempotent."""
        self.abort_all()
        self.core.shutdown()
