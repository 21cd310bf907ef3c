"""Draws that brought several tokens each: the drafts that were accepted, and one token more.

A run may hold the token that ends its sequence; what was accepted behind it is dropped (spec/engine.md 4.8). What was
assumed when the step was scheduled, that every draft would be accepted, is taken back here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.step_output import FINISH_CODE, NO_TOKEN, Rounds
from deepinfer.engine.stop import FinishReason

STOP, LENGTH, ERROR = (FINISH_CODE[reason] for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR))


class Settled(NamedTuple):
    """Rows of the output, one per token, in order; one without a token ends a sequence whose logits were no numbers."""

    slots: np.ndarray  # int64 [rows]
    places: np.ndarray  # int64 [rows] where the token stands in the result
    token_ids: np.ndarray  # int64 [rows], NO_TOKEN where the result's means nothing
    finish: np.ndarray  # int8 [rows] codes
    rounds: Rounds | None = None


def finish_codes(stopped: np.ndarray, full: np.ndarray, failed: np.ndarray | None = None) -> np.ndarray:
    """The first that holds of each bool [n] -> int8 [n]."""
    last = 0 if failed is None else np.where(failed, ERROR, 0)
    return np.where(stopped, STOP, np.where(full, LENGTH, last)).astype(np.int8)


def settle_runs(scheduler: Scheduler, plan: StepPlan, result: StepResult, current: np.ndarray) -> Settled:
    """current: bool [draws], whose slots have not changed hands."""
    table, draws = scheduler.table, current.nonzero()[0]
    every = np.ones(len(current), np.int64) if result.counts is None else result.counts
    slots, counts, valid = plan.draw_slots[draws], every[draws], result.valid[draws]
    firsts = (every.cumsum() - every)[draws]
    before = table.known[slots]

    columns = np.arange(int(counts.max(initial=1)))
    places = firsts[:, None] + np.minimum(columns, counts[:, None] - 1)  # [n, m]
    token_ids = result.token_ids[places]
    good = counts - ~valid
    kept, stopped, full = table.settle_runs(slots, token_ids, good)
    failed = ~(valid | stopped | full)

    decodes = int(current[: plan.num_decodes].sum())  # they come first
    own = slots[:decodes]
    table.settle_chunks(own, before[:decodes] - 1, kept[:decodes])
    table.take_back(own, plan.draft_caps[draws[:decodes]], counts[:decodes])
    # Each paid for one token when it was scheduled.
    scheduler.waiting.charge_outputs(np.repeat(table.tenant[own], np.maximum(kept[:decodes] - 1, 0)))
    rounds = _settle_rounds(scheduler, result, draws, slots, counts, kept, good, decodes)

    rows = kept + failed  # of the output, at least one per draw
    ends = rows.cumsum()
    draw = np.repeat(np.arange(len(draws)), rows)
    column = np.arange(len(draw)) - (ends - rows)[draw]
    finish = np.zeros(len(draw), np.int8)
    finish[ends - 1] = finish_codes(stopped, full, failed)
    return Settled(
        slots[draw],
        places[draw, column],
        np.where(column < kept[draw], token_ids[draw, column], NO_TOKEN),
        finish,
        rounds,
    )


def _settle_rounds(
    scheduler: Scheduler,
    result: StepResult,
    draws: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
    kept: np.ndarray,
    good: np.ndarray,
    decodes: int,
) -> Rounds | None:
    """What the step verified, for the planner and for the statistics."""
    planner, table = scheduler.planner, scheduler.table
    if planner is None or not len(draws):
        return None
    verified = np.zeros(len(draws), np.int64) if result.num_verified is None else result.num_verified[draws]
    own = slots[:decodes]
    predicted = planner.predicted(own).astype(np.float32)  # [decodes, k]
    planner.settle(slots, verified, counts - 1, None if result.survivals is None else result.survivals[draws])
    if not decodes:
        return None
    verified, kept = verified[:decodes], kept[:decodes]
    # Of a draft behind the end nobody knows whether it was right.
    observed = np.where(kept < good[:decodes], np.minimum(verified, kept), verified)
    predicted[np.arange(predicted.shape[1]) >= observed[:, None]] = np.nan
    return Rounds(
        numbers=table.number[own],
        indices=table.index[own],
        drafted=verified,
        accepted=np.minimum(counts[:decodes] - 1, kept),
        predicted=predicted.ravel(),
    )
