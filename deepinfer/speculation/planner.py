"""How many drafts a step verifies, and whether it drafts at all: the host's policy (spec/dspark.md section 4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer.speculation.budget import StepCosts

Whole = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
UNBOUNDED = 1 << 30


class DraftPlan(NamedTuple):
    """Of one step. The device chooses the likeliest `budget` drafts within the caps (selection.py)."""

    caps: Whole  # int64 [R] drafts of each slot to verify at most
    budget: int | None  # of all slots together; None = no bound but the caps
    propose: bool  # draft tokens for the next step


class DraftPlanner:
    """Decides with what settled steps have shown. One per engine; slots are those of the engine."""

    def __init__(self, max_num_seqs: int, k: int, *, varlen: bool, costs: StepCosts | None = None) -> None:
        raise NotImplementedError

    @property
    def explanation(self) -> str:
        """One line for people: which policy is in force, and why."""
        raise NotImplementedError

    def open(self, slot: int) -> None:
        """A new sequence takes the slot (also one that comes back after a preemption)."""
        raise NotImplementedError

    def plan(
        self, slots: Whole, most: Whole, other_rows: int = 0, other_samples: int = 0, room: int = 1 << 30
    ) -> DraftPlan:
        """The next step. slots [R]: its decodes; most [R]: drafts that each may use (limit, blocks); other_rows and
        other_samples: rows of prefill chunks in the step, and how many of these chunks draw a token; room: rows that
        may be added to the step beside the R anchors. Called once per step, in order."""
        raise NotImplementedError

    def settle(self, slots: Whole, num_verified: Whole, accepted: Whole, survivals: Floats | None) -> None:
        """A step came back. slots [n] that drew in it (decodes and others; stale draws left out), drafts verified and
        accepted of each [n] (before any stop cut), and survivals [n, k] of the drafts for the next step, None if it
        proposed none. Once per step that drew, in order."""
        raise NotImplementedError

    def predicted(self, slots: Whole) -> Floats:
        """[n, k]: what the device had said about the drafts that the step to be settled next has verified. Call it
        before `settle`. Meaningful for the first num_verified of each row."""
        raise NotImplementedError
