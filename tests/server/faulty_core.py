"""An engine on the tiny model that fails, hangs or slows down when a prompt's text says so."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import process_cores

from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.core import EngineCore
from deepinfer.engine.core_process import Startup
from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import Runner

FAILS, HANGS, SLOW = "\x01", "\x02", "\x03"  # characters that no prompt has by chance
HANG_SECONDS = 3.0
STEP_SECONDS = 0.02  # of a step with a slow request in it


class FaultyRunner(Runner):
    def __init__(self, inner: Runner, fails: int, hangs: int, slow: int) -> None:
        self._inner = inner
        self._fails, self._hangs, self._slow = fails, hangs, slow
        self._slow_slots: set[int] = set()

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            tokens = set(admission.token_ids.tolist())
            if self._fails in tokens:
                raise RuntimeError("the device is on fire")
            if self._hangs in tokens:
                time.sleep(HANG_SECONDS)
            self._slow_slots.discard(admission.slot)
            if self._slow in tokens:
                self._slow_slots.add(admission.slot)
        if self._slow_slots.intersection(plan.slots.tolist()):
            time.sleep(STEP_SECONDS)
        return self._inner.run(plan)


def trigger_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Of FAILS, HANGS and SLOW."""
    ids = [tokenizer.encode_text(character) for character in (FAILS, HANGS, SLOW)]
    assert all(len(each) == 1 for each in ids)
    return tuple(each[0] for each in ids)


def make_faulty_core(path: Path, startup: Startup) -> EngineCore:
    core = process_cores.tiny_core(path, startup)
    core.loop._runner = FaultyRunner(core.loop._runner, *trigger_ids(Tokenizer.from_directory(path)))
    return core


def faulty(path: Path) -> Any:
    return partial(make_faulty_core, path)
