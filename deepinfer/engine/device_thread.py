"""A thread that runs steps while the host plans the next: the device's stream, where there is no device.

Plans go in, results come out, both in order. Nobody spins: an empty queue waits in the kernel, and handing a result
over and taking the next plan costs the device 25 us (2 shared cores).

On a GPU the thread is not the device but feeds it. A step that asks nothing of the host in between (engine/rounds.py)
is handed to the device as soon as its plan is there, and its result read when the next plan has been handed over, or
when the owner asks for it and there is none. So the device has its next step before it ends one.

The interpreter's lock. Every operation of torch, numpy and the CPU kernels gives it up, so the host gets it whenever it
wants it, and the device waits where it wants it back while the host's Python runs: at most for the length of that run,
or for `sys.getswitchinterval()` (5 ms) if that is shorter. Measured with steps of 300 small operations (11 to 20 ms on
two busy cores): 1 ms of pure Python per step lengthens a step by less than 0.3 ms, and no interval from 5 ms down to
30 us changes that beyond the noise. Only when the host computes for 60 ms at a stretch does a short interval help the
device (steps of 38 ms at 5 ms, 28 ms at 0.1 ms), and then the host is what everybody waits for. So the interval, which
belongs to the whole process, is left alone; long work of the host should be operations that give the lock up.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import PendingStep, Runner, end_guarded, failed_result

QUEUE_DEPTH = 2  # the step that runs and the one that waits for it (spec/engine.md 5.1)
_HEARTBEAT = 0.5  # seconds between looks at whether the thread still lives, while a result is awaited


class DeviceThreadError(RuntimeError):
    """The thread is gone; nothing more comes from it."""


class StepNotRunError(RuntimeError):
    """The step was queued behind one that failed, or when the thread was told to close."""


class _Order(NamedTuple):
    plan: StepPlan
    after_pause: bool


class _EndStep:
    """An order without a plan: the owner wants the result of the step that has begun, if one has."""


class _Begun(NamedTuple):
    """A step whose result is there, or one that the device has before it."""

    number: int
    step: StepResult | PendingStep
    seconds: float  # that it took the thread to begin it: all of it where the result is there
    waited: float  # before that


class _Worker:
    """What thread and owner share. Only the thread writes the times."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.orders: queue.SimpleQueue[_Order | _EndStep | None] = queue.SimpleQueue()  # None: end
        self.results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()  # None: the thread has ended
        self.refuse: str | None = None  # why plans are not run
        self.death: BaseException | None = None
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self._runner = runner
        self._clock = clock
        self._last_end: float | None = None
        self._begun: _Begun | None = None  # the device has it before it

    def serve(self) -> None:
        try:
            while (order := self.orders.get()) is not None:
                if isinstance(order, _Order):
                    self._answer(order)
                else:
                    self._end_begun()
                del order  # a plan may hold the tokens of a long prompt
            self._end_begun()
        except BaseException as error:  # not an error of a step: those are answers
            self.death = error
        finally:
            self.results.put(None)

    def _answer(self, order: _Order) -> None:
        begun = None
        if self._begun is not None:
            if self.refuse is None:
                begun = self._begin(order, behind=True)
            self._end_begun()
        # Refused since a moment ago, perhaps: then nobody asks for what began behind the failed step.
        if self.refuse is not None:
            self.results.put(failed_result(StepNotRunError(self.refuse)))
            return
        self._begun = begun or self._begin(order, behind=False)
        if self._begun is not None and isinstance(self._begun.step, StepResult):
            self._end_begun()

    def _begin(self, order: _Order, *, behind: bool) -> _Begun | None:
        begin = self._clock()
        step = self._runner.begin_guarded(order.plan, behind=behind)
        if step is None:
            return None
        waited = 0.0 if behind or self._last_end is None or order.after_pause else begin - self._last_end
        return _Begun(order.plan.number, step, self._clock() - begin, waited)

    def _end_begun(self) -> None:
        """The result of the step that has begun, if one has; waits for it."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if isinstance(begun.step, StepResult):
            result, seconds = begun.step, begun.seconds
        else:
            result = end_guarded(begun.step)
            seconds = result.device_seconds
        self._last_end = self._clock()
        result.idle_seconds += begun.waited
        self.busy_seconds += seconds
        self.idle_seconds += result.idle_seconds
        if result.error is not None:
            self.refuse = f"step {begun.number} failed before it"
        self.results.put(result)


class DeviceThread:
    """At most two plans in flight: submitted, and their results not taken. Not thread-safe: one owner calls it.

    busy_seconds, idle_seconds: sums over all steps so far.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._worker = _Worker(runner, clock)
        self._in_flight = 0
        self._closed = False
        # The thread holds the worker but not this object: an owner who forgets to close it ends it all the same.
        self._thread = threading.Thread(target=self._worker.serve, name="deepinfer-device", daemon=True)
        self._end = weakref.finalize(self, self._worker.orders.put, None)
        self._thread.start()
        _alive.add(self)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def busy_seconds(self) -> float:
        return self._worker.busy_seconds

    @property
    def idle_seconds(self) -> float:
        return self._worker.idle_seconds

    def submit(self, plan: StepPlan, *, after_pause: bool | None = None) -> None:
        """Queues a plan. RuntimeError with two in flight, or after `close`.

        after_pause: the device had no step because there was nothing to do, and the time since its last one does not
        count as idle. None: so it is when nothing is in flight.
        """
        if self._closed:
            raise RuntimeError("the device thread is closed")
        if self._in_flight == QUEUE_DEPTH:
            raise RuntimeError(f"{QUEUE_DEPTH} steps are in flight; take a result first")
        self._worker.orders.put(_Order(plan, self._in_flight == 0 if after_pause is None else after_pause))
        self._in_flight += 1

    def result(self) -> StepResult:
        """The result of the oldest plan in flight; waits for it. Its `error` is what the step raised; every plan
        submitted after it gets StepNotRunError for an answer until `reset`.

        RuntimeError if nothing is in flight; DeviceThreadError if the thread is gone.
        """
        if not self._in_flight:
            raise RuntimeError("no step is in flight")
        if self._in_flight < QUEUE_DEPTH:  # else the plan behind it ends it
            self._worker.orders.put(_EndStep())
        result = self._take()
        if result is None:
            raise DeviceThreadError("the device thread has ended") from self._worker.death
        self._in_flight -= 1
        return result

    def _take(self) -> StepResult | None:
        while True:
            try:
                return self._worker.results.get(timeout=_HEARTBEAT)
            except queue.Empty:
                if not self._thread.is_alive() and self._worker.results.empty():
                    return None

    def reset(self) -> None:
        """Waits for what is in flight, drops it, and runs plans again. DeviceThreadError if the thread is gone."""
        while self._in_flight:
            self.result()
        if not self._closed:
            self._worker.refuse = None  # the thread has nothing to do: no race

    def close(self, timeout: float = 30.0) -> bool:
        """Ends the thread after the step that it runs; a queued one gets StepNotRunError for an answer. Idempotent.

        False: the step did not end within `timeout` seconds. The thread then ends after it, and does not keep the
        process alive.
        """
        self._closed = True
        self._worker.refuse = "the device thread was closed before it"
        self._end()
        self._thread.join(timeout)
        return not self._thread.is_alive()


_alive: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that the interpreter's end meets inside of torch's C++ would take the process down with it."""
    for thread in list(_alive):
        thread.close(timeout=10)
