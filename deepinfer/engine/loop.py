"""The two step loops, side by side. Both turn the next plan into results; the overlapped one is a step behind.

While step N runs on the device, the overlapped loop lets the host settle step N - 1 and schedule and hand over step
N + 1, so the device finds its next step waiting when it ends one.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from deepinfer.engine.device_thread import DeviceThread
from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import Runner

Settled = tuple[StepPlan, StepResult]


class Loop(Protocol):
    @property
    def num_in_flight(self) -> int: ...
    def turn(self, plan: StepPlan | None) -> Settled | None:
        """Takes the next plan, if there is one, and gives a step whose result is there, if there is one. With None and
        steps in flight it gives one of them."""

    def wait(self) -> None:
        """Until nothing runs on the device. Results stay for `turn` to give."""

    def reset(self) -> None:
        """After an error: what is in flight is dropped."""

    def close(self) -> None: ...


class PlainLoop:
    """One step at a time: schedule -> run -> settle."""

    num_in_flight = 0

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def turn(self, plan: StepPlan | None) -> Settled | None:
        return None if plan is None else (plan, self._runner.run_guarded(plan))

    def wait(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


class OverlappedLoop:
    """One step ahead: schedule N + 1 -> hand it over -> settle N, while the device runs N and then N + 1."""

    def __init__(self, runner: Runner) -> None:
        self._device = DeviceThread(runner)
        self._in_flight: deque[StepPlan] = deque()
        self._early: deque[StepResult] = deque()  # results that `wait` took before their turn

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def turn(self, plan: StepPlan | None) -> Settled | None:
        if plan is not None:
            self._device.submit(plan)
            self._in_flight.append(plan)
        if self._in_flight and (plan is None or len(self._in_flight) == 2):
            return self._in_flight.popleft(), self._early.popleft() if self._early else self._device.result()
        return None

    def wait(self) -> None:
        while self._device.in_flight:
            self._early.append(self._device.result())

    def reset(self) -> None:
        self._in_flight.clear()
        self._early.clear()
        self._device.reset()

    def close(self) -> None:
        self._device.close()
