"""The device's thread keeps the order, answers for every step, and can always be closed."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepinfer.engine.device_thread import DeviceThread, DeviceThreadError, StepNotRunError
from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import PendingStep, Runner

NONE = np.empty(0, np.int64)


def plan(number: int) -> StepPlan:
    return StepPlan(
        number=number,
        edits=[],
        admissions=[],
        slots=NONE,
        starts=NONE,
        lengths=NONE,
        num_logits=NONE,
        window_floors=NONE,
        write_from=NONE,
        keep_from=NONE,
        draw_slots=NONE,
        draw_rows=NONE,
        draw_epochs=NONE,
    )


def answer(number: int) -> StepResult:
    return StepResult(np.array([number]), np.zeros(1, np.float32), np.ones(1, np.bool_))


def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


class Steps(Runner):
    """Answers with the plan's number; before that does what a test says."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.before = before
        self.ran: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.ran.append(plan.number)
        self.before(plan.number)
        return answer(plan.number)


class Gate:
    """Steps that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        self.entered.set()
        assert self.open.wait(20)


def failing(*numbers: int) -> Callable[[int], None]:
    def before(number: int) -> None:
        if number in numbers:
            raise ValueError(f"step {number} is broken")

    return before


def test_results_come_in_the_order_of_the_plans() -> None:
    runner = Steps()
    device = DeviceThread(runner)
    device.submit(plan(0))
    for number in range(1, 300):
        device.submit(plan(number))
        assert device.in_flight == 2
        assert device.result().token_ids.tolist() == [number - 1]
    assert device.result().token_ids.tolist() == [299]
    assert device.in_flight == 0 and runner.ran == list(range(300))
    assert device.close()


def test_a_third_plan_in_flight_and_a_result_too_many_are_refused_instead_of_waiting_for_ever() -> None:
    gate = Gate()
    device = DeviceThread(Steps(gate))
    with pytest.raises(RuntimeError, match="no step is in flight"):
        device.result()
    device.submit(plan(0))
    device.submit(plan(1))
    with pytest.raises(RuntimeError, match="take a result first"):
        device.submit(plan(2))
    gate.open.set()
    assert [device.result().token_ids.tolist() for _ in range(2)] == [[0], [1]]
    device.close()


def test_a_step_s_error_comes_back_and_what_was_queued_behind_it_is_not_run() -> None:
    runner = Steps(failing(1))
    device = DeviceThread(runner)
    device.submit(plan(0))
    device.submit(plan(1))
    assert device.result().error is None
    device.submit(plan(2))
    broken, behind = device.result(), device.result()
    assert isinstance(broken.error, ValueError) and "step 1 is broken" in str(broken.error)
    assert isinstance(behind.error, StepNotRunError) and "step 1 failed" in str(behind.error)
    device.submit(plan(3))
    assert isinstance(device.result().error, StepNotRunError)
    assert runner.ran == [0, 1]
    device.reset()
    device.submit(plan(4))
    assert device.result().token_ids.tolist() == [4] and runner.ran == [0, 1, 4]
    device.close()


class Queue(Runner):
    """A device that has steps before it: their results are there when a test says so. Plans with an even number end
    where they begin, and can begin behind nothing."""

    def __init__(self, broken: int = -1) -> None:
        self.began: list[int] = []
        self.behind: list[int] = []  # of them, before the one before had ended
        self.ended: list[int] = []
        self.broken = broken
        self.gate = threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        self.began.append(plan.number)
        return answer(plan.number)

    def begin(self, plan: StepPlan, *, behind: bool) -> StepResult | PendingStep | None:
        if plan.number % 2 == 0:
            return super().begin(plan, behind=behind)
        self.began.append(plan.number)
        if behind:
            self.behind.append(plan.number)
        return Later(self, plan.number)


class Later:
    def __init__(self, device: Queue, number: int) -> None:
        self.device, self.number = device, number

    def end(self) -> StepResult:
        assert self.device.gate.wait(20)
        if self.number == self.device.broken:
            raise ValueError(f"step {self.number} is broken")
        self.device.ended.append(self.number)
        return answer(self.number)


def test_a_step_begins_before_the_one_before_it_ends_where_the_runner_can() -> None:
    runner = Queue()
    device = DeviceThread(runner)
    device.submit(plan(1))
    device.submit(plan(3))
    until(lambda: runner.began == [1, 3])
    assert runner.ended == []
    runner.gate.set()
    numbers = [5, 7, 8, 10, 11, 13, 15]
    got = []
    for number in numbers:
        got += device.result().token_ids.tolist()
        device.submit(plan(number))
    got += [device.result().token_ids.tolist()[0] for _ in range(2)]
    assert got == runner.began == [1, 3, *numbers]
    assert runner.behind == [3, 5, 7, 13, 15], "a step that cannot follow waits, and nothing waits for a result at hand"
    assert runner.ended == [number for number in got if number % 2]
    assert device.close()


def test_the_last_step_is_ended_when_its_result_is_asked_for() -> None:
    runner = Queue()
    runner.gate.set()
    device = DeviceThread(runner)
    for number in (1, 3, 4):
        device.submit(plan(number))
        assert device.result().token_ids.tolist() == [number]
    assert runner.behind == []
    device.close()


@pytest.mark.parametrize("behind", [4, 5])
def test_what_began_behind_a_step_that_fails_is_not_answered_with_its_result(behind: int) -> None:
    runner = Queue(broken=3)
    runner.gate.set()
    device = DeviceThread(runner)
    device.submit(plan(1))
    device.submit(plan(3))
    assert device.result().token_ids.tolist() == [1]
    device.submit(plan(behind))
    broken, lost = device.result(), device.result()
    assert isinstance(broken.error, ValueError) and "step 3 is broken" in str(broken.error)
    assert isinstance(lost.error, StepNotRunError) and "step 3 failed" in str(lost.error)
    assert runner.began == [1, 3, 5][: 3 if behind == 5 else 2]
    device.reset()
    device.submit(plan(7))
    device.submit(plan(9))
    assert [device.result().token_ids.tolist() for _ in range(2)] == [[7], [9]]
    assert runner.behind == ([3, 5, 9] if behind == 5 else [3, 9])
    device.close()


def test_close_waits_for_the_step_that_the_device_has_before_it() -> None:
    runner = Queue()
    device = DeviceThread(runner)
    device.submit(plan(1))
    until(lambda: runner.began == [1])
    assert not device.close(timeout=0.05)
    runner.gate.set()
    assert device.close()
    assert device.result().token_ids.tolist() == [1]


def test_reset_drops_what_is_in_flight_and_no_old_result_meets_a_new_plan() -> None:
    device = DeviceThread(Steps(failing(0, 7)))
    for first in (0, 4, 7, 9):
        device.submit(plan(first))
        device.submit(plan(first + 1))
        device.reset()
        assert device.in_flight == 0
        device.submit(plan(first + 2))
        assert device.result().token_ids.tolist() == [first + 2]
    device.close()


def test_a_dead_thread_is_noticed_and_not_waited_for() -> None:
    def die(number: int) -> None:
        raise SystemExit("out")

    device = DeviceThread(Steps(die))
    device.submit(plan(0))
    device.submit(plan(1))
    for ask in (device.result, device.result, device.reset):
        with pytest.raises(DeviceThreadError) as caught:
            ask()
        assert isinstance(caught.value.__cause__, SystemExit)
    assert device.close()


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_close_ends_the_thread_after_the_step_it_runs(in_flight: int) -> None:
    gate = Gate()
    runner = Steps(gate)
    device = DeviceThread(runner)
    for number in range(in_flight):
        device.submit(plan(number))
    if in_flight:
        assert gate.entered.wait(20)
        assert not device.close(timeout=0.05)  # the step still runs
    gate.open.set()
    assert device.close() and device.close()
    answers = [device.result() for _ in range(in_flight)]
    assert [type(answer.error) for answer in answers] == [type(None), StepNotRunError][:in_flight]
    assert runner.ran == [0][:in_flight]
    for ask in (lambda: device.submit(plan(9)), device.result):
        with pytest.raises(RuntimeError):
            ask()


def test_a_device_thread_that_nobody_closed_ends_with_its_owner() -> None:
    others = set(threading.enumerate())
    device = DeviceThread(Steps())
    device.submit(plan(0))
    device.result()
    (thread,) = set(threading.enumerate()) - others
    del device
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_is_what_the_device_waited_while_the_engine_had_work() -> None:
    clock = Clock()

    def take_five(number: int) -> None:
        clock.now += 5

    device = DeviceThread(Steps(take_five), clock)

    def step(number: int, wait: float, **options: bool) -> float:
        clock.now += wait
        device.submit(plan(number), **options)
        return device.result().idle_seconds

    assert step(0, 10, after_pause=False) == 0  # nothing came before it
    assert step(1, 2, after_pause=False) == 2
    assert step(2, 30, after_pause=True) == 0
    assert step(3, 50) == 0  # nothing was in flight, so there was nothing to do
    assert step(4, 0.5, after_pause=False) == 0.5
    assert (device.busy_seconds, device.idle_seconds) == (25, 2.5)
    device.close()


def test_a_device_finds_its_next_step_waiting_when_it_ends_one() -> None:
    """5 ms a step, and a host with 1 ms of pure Python for each: the typical wait is below 1 %. The median, because a
    machine with other things to do delays single steps; benchmarks/host_overhead.py measures the share."""
    device = DeviceThread(Steps(lambda number: time.sleep(0.005)))
    device.submit(plan(0))
    waits = []
    for number in range(1, 150):
        device.submit(plan(number))
        busy_until = time.perf_counter() + 0.001
        while time.perf_counter() < busy_until:
            pass
        waits.append(device.result().idle_seconds)
    device.close()
    assert statistics.median(waits) < 50e-6


def test_a_program_that_ends_while_a_step_runs_waits_for_it() -> None:
    """Otherwise the thread would die inside of torch, and take the process down ("terminate called ...")."""
    program = """
import time
from test_device_thread import Steps, plan
from deepinfer.engine.device_thread import DeviceThread

def slow(number):
    time.sleep(0.5)
    print(f"step {number} ended", flush=True)

device = DeviceThread(Steps(slow))
device.submit(plan(0))
time.sleep(0.1)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "step 0 ended\n", "")
