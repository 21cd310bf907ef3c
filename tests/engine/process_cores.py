"""Real cores on the tiny checkpoint for engine processes, and a runner that fails on command; and how tests start them.

Kept apart from the tests so that a process that starts afresh imports no more than it needs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from deepinfer.config import EngineConfig
from deepinfer.engine import build
from deepinfer.engine.core import EngineCore
from deepinfer.engine.core_process import Startup, process_main
from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import Runner
from deepinfer.model import load_model

# What a prompt must hold to make the step that takes it in go wrong.
FAILS, HANGS, SLOW = 505, 506, 507
HANG_SECONDS = 3.0
SIZES = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128, "num_blocks": 64, "seed": 0}


class FaultyRunner(Runner):
    """The real runner, which raises, hangs or slows down when a prompt asks for it."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._slow: set[int] = set()  # slots

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            tokens = set(admission.token_ids.tolist())
            if FAILS in tokens:
                raise RuntimeError("the device is on fire")
            if HANGS in tokens:
                time.sleep(HANG_SECONDS)
            self._slow.discard(admission.slot)
            if SLOW in tokens:
                self._slow.add(admission.slot)
        if self._slow.intersection(plan.slots.tolist()):
            time.sleep(0.02)
        return self._inner.run(plan)


def tiny_core(path: Path, startup: Startup, **changes: Any) -> EngineCore:
    """A core on the tiny checkpoint; the process has a thread, as the tests' own."""
    torch.set_num_threads(1)
    startup.progress("weights", 0.5)
    return build.build_core(path, load_model(path), EngineConfig(**{**SIZES, **changes}), on_event=startup.on_event)


def faulty_core(path: Path, startup: Startup, **changes: Any) -> EngineCore:
    core = tiny_core(path, startup, **changes)
    core.loop._runner = FaultyRunner(core.loop._runner)
    return core


def failing_core(startup: Startup) -> EngineCore:
    """Cannot be made."""
    raise ValueError("config.json: num_hidden_layers: must be at least 1")


def failing_late_core(startup: Startup) -> EngineCore:
    """Cannot be made, and takes a moment to find out."""
    time.sleep(1)
    raise RuntimeError("no such layer")


def loading_core(startup: Startup) -> EngineCore:
    """Is never made."""
    startup.progress("weights", 0.25)
    time.sleep(60)
    raise AssertionError("nobody stopped it")


@contextmanager
def running(
    make_core: Any, directory: Path, drain_timeout: float | None = None, endpoint: str | None = None
) -> Iterator[tuple[str, BaseProcess]]:
    """An engine process -> (endpoint, process). It is gone afterwards.

    It comes from a server that has imported torch already: many tests need a process of their own. That one can be
    started afresh, as users do it, is for the tests of AsyncEngineClient.start.
    """
    endpoint = f"ipc://{directory}/engine" if endpoint is None else endpoint
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["deepinfer.engine.build", "deepinfer.engine.core_process"])
    process = context.Process(target=process_main, args=(make_core, endpoint, drain_timeout), daemon=True)
    process.start()
    try:
        yield endpoint, process
    finally:
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            process.join(5)
        if process.exitcode is None:
            process.kill()
            process.join()


def tiny(path: Path, **changes: Any) -> Any:
    return partial(tiny_core, path, **changes)


def faulty(path: Path, **changes: Any) -> Any:
    return partial(faulty_core, path, **changes)
