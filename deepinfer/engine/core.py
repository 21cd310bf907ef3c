"""The engine core: requests of token ids in, arrays of tokens out, one step at a time.

It knows no text and no device. `step` is the whole life of the engine: end what is over, schedule, run, settle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deepinfer.cache.hashing import HashChain
from deepinfer.cache.manager import CacheManager
from deepinfer.config import EngineConfig
from deepinfer.engine.admission import check_request, check_token_ids
from deepinfer.engine.blocked import Condition
from deepinfer.engine.deadlines import Deadlines
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.grammars import GrammarCondition, Grammars
from deepinfer.engine.loop import Loop, OverlappedLoop, PlainLoop
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.meter import StepMeter
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.runner import Runner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Sequence as Seq
from deepinfer.engine.sequence import Status
from deepinfer.engine.settle import settle
from deepinfer.engine.step_output import FINISH_CODE, NO_TOKEN, SequenceEvent, StepOutput
from deepinfer.engine.stop import FinishReason
from deepinfer.kernels import random_streams
from deepinfer.metrics.stats import EngineStats
from deepinfer.speculation.planner import DraftPlanner

logger = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """A request that passed the door and turned out to be one that cannot be served. Nothing is left of it."""

    number: int
    request_id: str
    error: InvalidRequestError


class EngineCore:
    """Not thread-safe: one owner calls add, abort and step in turn.

    runner: what computes a plan (engine/runner.py). refused_ids: token ids that no prompt may hold, with the reason.
    planner: says how many drafts a step verifies; None = one that knows no costs. grammars: compile structured output;
    None = none is had. clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        manager: CacheManager,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        refused_ids: Mapping[int, str] | None = None,
        namespace: Callable[[str], bytes] = lambda salt: salt.encode(),
        planner: DraftPlanner | None = None,
        drafting: tuple[str, ...] = (),
        memory: tuple[str, ...] = (),
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.drafting, self.memory = drafting, memory  # lines for people
        self.manager = manager
        self.scheduler = Scheduler(config, manager, self._stop_ids, planner=planner)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.grammars = grammars or Grammars(None)
        self.meter = StepMeter(self.scheduler, clock)
        self.loop: Loop = OverlappedLoop(runner) if config.overlap else PlainLoop(runner)
        self._vocab_size = vocab_size
        self._refused_ids = dict(refused_ids or {})
        self._namespace = namespace
        self._clock = clock
        self._requests: dict[int, list[Seq]] = {}  # unfinished ones: all their sequences
        self._deadlines = Deadlines(config.max_num_batched_tokens)
        self._draining = False
        self._ended: list[tuple[int, int, FinishReason]] = []  # number, index: ends that no settled step brings
        self._events: list[SequenceEvent] = []
        self._refused: list[Refusal] = []

    # -- the door -------------------------------------------------------------------------------------------------

    def check(self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams) -> int:
        """Raises InvalidRequestError, or returns how many tokens the request may generate."""
        self.check_ids("prompt_token_ids", prompt_token_ids)
        self.grammars.check(params)
        return check_request(len(prompt_token_ids), params, self.config, self._vocab_size, self.eos_token_ids)

    def check_ids(self, field: str, token_ids: Sequence[int] | np.ndarray) -> None:
        """Raises InvalidRequestError unless there are ids and the model knows them all."""
        check_token_ids(field, token_ids, self._vocab_size, self._refused_ids)

    def add(self, request: EngineRequest, blocked_on: Sequence[Condition] = ()) -> None:
        """Queues a request that `check` has let pass. blocked_on: what must be ready before it starts.

        InvalidRequestError, and nothing has changed: its number is in use, or the engine is draining.
        """
        if self._draining:
            raise InvalidRequestError("request", "the engine is shutting down and takes no new work; send it elsewhere")
        if request.number in self._requests:
            raise InvalidRequestError("number", f"{request.number} is already in use")
        prompt = request.prompt_token_ids
        conditions = list(blocked_on)
        if (grammar := self.grammars.begin(request.params)) is not None:
            conditions.append(GrammarCondition(grammar))
        chain = HashChain(self._namespace(request.salt))
        if self.scheduler.prefixes.enabled:
            chain.extend(prompt)
        arrival = self._clock() - request.age
        sequences: list[Seq] = []
        seed = self._admission_seed(request)
        for index in range(request.params.n):
            sequences.append(
                Seq(
                    request=request,
                    index=index,
                    seed=random_streams.child_seed(seed, index),
                    arrival=arrival,
                    limit=len(prompt) + request.max_tokens,
                    chain=chain if index == 0 else chain.copy(),
                    token_ids=prompt,
                    siblings=sequences,
                    conditions=conditions if index == 0 else [],
                    grammar=grammar,
                    status=Status.FORKING,
                )
            )
        self._requests[request.number] = sequences
        self._deadlines.add(request.number, arrival, request.params.deadline, request.params.ttft_deadline)
        self.scheduler.add(sequences[0])

    # -- the step -------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests) or self.loop.num_in_flight > 0

    def step(self) -> StepOutput:
        """Settles at most one step and lets the next one begin. Empty if nothing could be done: everybody waits for
        something that is prepared elsewhere.

        If a step fails everything under way is dropped, slots and blocks are free again, and EngineStepError is raised
        with the cause chained; the engine can go on.
        """
        now = self._clock()
        self._end_overdue(now)
        begin = time.perf_counter()
        plan = self.scheduler.schedule(now)
        schedule_seconds = time.perf_counter() - begin
        for sequence, error in self.scheduler.take_failed():
            self._end_failed(sequence, error)
        if plan is not None:
            self._note_start(plan, now)
        settled = self.loop.turn(plan)
        if settled is None:
            if plan is None and self._stuck():
                self._fail(RuntimeError("sequences are waiting for room and nobody runs"))
            return self._with_ends(StepOutput.empty())
        plan, result = settled
        if result.error is not None:
            self._fail(result.error)
        begin = time.perf_counter()
        output = settle(self.scheduler, plan, result)
        self._forget_finished(output)
        output = self._with_ends(output)
        self.meter.record(plan, result, output, schedule_seconds, time.perf_counter() - begin)
        self._deadlines.observe(int(plan.lengths[plan.num_decodes :].sum()), result.device_seconds)
        if not self.has_unfinished:
            self.meter.pause()
        return output

    def take_refused(self) -> list[Refusal]:
        """Requests that were refused since the last call, after they had been let in."""
        refused, self._refused = self._refused, []
        return refused

    def stats(self) -> EngineStats:
        """Counters of all steps so far, and how things stand now."""
        for result, seconds in self.grammars.log.take():
            self.meter.totals.add_grammar(result, seconds)
        self.meter.take_levels(self.meter.totals.totals)
        return self.meter.totals

    def abort(self, number: int, index: int | None = None) -> bool:
        """Ends a request, or one completion of it, in whatever state it is, and frees what it holds; False if it is not
        running. Nothing comes for it any more. Idempotent."""
        sequences = self._requests.get(number, [])
        running = [s for s in sequences if index in (None, s.index) and s.status is not Status.FINISHED]
        for sequence in running:
            if sequence.status is not Status.FORKING and index is not None:
                self._pass_on(sequence)
            self.scheduler.finish(sequence)
        self._forget(number)
        return bool(running)

    def abort_all(self) -> None:
        for number in list(self._requests):
            self.abort(number)

    def recover(self) -> None:
        """After an error or an interrupt, which may have struck anywhere: everything under way is dropped, and what the
        cache was said to hold is void."""
        self.loop.reset()
        self.abort_all()
        self.manager.void()

    def drain(self) -> None:
        """From now on new requests are refused; those under way go on."""
        self._draining = True

    def shutdown(self) -> None:
        """Ends everything and stops the device's thread, if there is one."""
        self.abort_all()
        self.loop.close()
        self.grammars.close()

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end_overdue(self, now: float) -> None:
        for number in self._deadlines.over(now):
            self._end(number, FinishReason.DEADLINE)
        for sequence in self._deadlines.hopeless(now, self.scheduler.waiting, self.scheduler.tokens_to_compute):
            self._end(sequence.request.number, FinishReason.DEADLINE)

    def _end(self, number: int, reason: FinishReason) -> None:
        """Ends all completions of a request and says so in the next output."""
        for sequence in self._requests.get(number, []):
            if sequence.status is not Status.FINISHED:
                self.scheduler.finish(sequence)
                self._ended.append((number, sequence.index, reason))
        self._forget(number)

    def _end_failed(self, sequence: Seq, error: Exception) -> None:
        """It can never start. Where that is the request's own fault its owner is to hear so, and of nothing else."""
        request = sequence.request
        logger.warning("request %r cannot start: %s", request.request_id, error)
        if isinstance(error, InvalidRequestError):
            self.abort(request.number)
            self._refused.append(Refusal(request.number, request.request_id, error))
        else:
            self._end(request.number, FinishReason.ERROR)

    def _pass_on(self, sequence: Seq) -> None:
        """A completion that ends before its prompt is computed leaves the prompt to the next one that waits for it."""
        heirs = [s for s in sequence.siblings if s.status is Status.FORKING]
        if sequence.status in (Status.WAITING, Status.PREFILL) and heirs:
            heirs[0].conditions = sequence.conditions
            self.scheduler.add(heirs[0])

    def _fail(self, cause: BaseException) -> None:
        """A step failed: nothing on the device can be trusted."""
        self.recover()
        raise EngineStepError(f"a step failed: {cause}") from cause

    def _stuck(self) -> bool:
        """Nothing runs, nothing is in flight, and somebody waits for room only: must not happen."""
        return (
            not self.scheduler.running
            and not self.loop.num_in_flight
            and any(not s.conditions for s in self.scheduler.waiting)
        )

    def _forget_finished(self, output: StepOutput) -> None:
        for number in set(output.numbers[output.finish > 0].tolist()):
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Drops a request whose last sequence has ended."""
        if all(s.status is Status.FINISHED for s in self._requests.get(number, [])):
            self._requests.pop(number, None)
            self._deadlines.forget(number)

    def _with_ends(self, output: StepOutput) -> StepOutput:
        """The output with what happened besides: admissions, preemptions, ends that no token brought."""
        output.events, self._events = self._events, []
        if not self._ended:
            return output
        numbers, indices, reasons = zip(*self._ended, strict=True)
        self._ended = []
        count = len(numbers)
        output.numbers = np.append(output.numbers, numbers)
        output.indices = np.append(output.indices, np.array(indices, np.int32))
        output.token_ids = np.append(output.token_ids, np.full(count, NO_TOKEN))
        output.logprobs = np.append(output.logprobs, np.zeros(count, np.float32))
        output.finish = np.append(output.finish, np.array([FINISH_CODE[reason] for reason in reasons], np.int8))
        if output.top is not None:
            output.top += [None] * count
        return output

    def _note_start(self, plan: StepPlan, now: float) -> None:
        """Tells of the sequences that got a slot in this step, and of those that lost theirs."""
        for preempted in self.scheduler.take_preempted():
            self._events.append(SequenceEvent(preempted.request.number, preempted.index, "preempted"))
        for admission in plan.admissions:
            started = self.scheduler.by_slot[admission.slot]
            assert started is not None
            number, hit = started.request.number, started.hit
            queued = now - started.arrival
            self._events.append(
                SequenceEvent(number, started.index, "admitted", hit.replay_start, hit.replay_tokens, queued)
            )

    # -- what a sequence needs to begin ---------------------------------------------------------------------------

    def _stop_ids(self, sequence: Seq) -> set[int]:
        params = sequence.params
        return set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos_token_ids))

    def _admission_seed(self, request: EngineRequest) -> int:
        if request.params.seq_seed is not None:
            return request.params.seq_seed
        if self.config.seed is None:
            return random_streams.random_seed()
        return random_streams.derive_seed(self.config.seed, random_streams.Stream.REQUEST, request.number)
