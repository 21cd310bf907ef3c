"""Books the result of a step: what was assumed when it was scheduled meets what came (spec/engine.md 5.2).

A row whose slot has changed hands since (its sequence ended or was preempted) is dropped: the epoch tells. For the
rest the order is that of spec/engine.md 4.8: stop and end tokens, then the length limit. Stop strings are found by the
front end, which aborts the sequence.
"""

from __future__ import annotations

import numpy as np

from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.settle_runs import ERROR, Settled, finish_codes, settle_runs
from deepinfer.engine.step_output import NO_TOKEN, PromptScores, StepOutput


def settle(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> StepOutput:
    """What the step added, and the ends it brought. Sequences that ended have given everything back."""
    table, drafting = scheduler.table, scheduler.planner is not None
    current = table.epoch[plan.slots] == plan.chunk_epochs
    if drafting:
        current[: plan.num_decodes] = False  # how many of their rows stay follows from their draws
    table.settle_chunks(plan.slots[current], plan.starts[current], plan.lengths[current])

    current = table.epoch[plan.draw_slots] == plan.draw_epochs
    settled = (settle_runs if drafting else _settle_single)(scheduler, plan, result, current)
    output = StepOutput(
        numbers=table.number[settled.slots],
        indices=table.index[settled.slots],
        token_ids=settled.token_ids,
        logprobs=result.logprobs[settled.places],
        finish=settled.finish,
        top=None if result.top is None else [result.top[i] for i in settled.places.tolist()],
        prompt_scores=[
            PromptScores(score.sequence.request.number, entries)
            for score, entries in zip(plan.scores, result.scores, strict=True)
        ],
        rounds=settled.rounds,
    )
    failed = settled.slots[settled.finish == ERROR]
    result.num_failed = len(failed)
    if result.stuck is not None:
        result.num_stuck = int(np.isin(failed, plan.draw_slots[result.stuck]).sum())
    for slot in settled.slots[settled.finish > 0].tolist():
        sequence = scheduler.by_slot[slot]
        assert sequence is not None
        scheduler.finish(sequence)
    for slot in table.unpublished(plan.slots).tolist():
        sequence = scheduler.by_slot[slot]
        if sequence is not None:
            scheduler.prefixes.publish(sequence)
    return output


def _settle_single(scheduler: Scheduler, plan: StepPlan, result: StepResult, current: np.ndarray) -> Settled:
    """Every draw brought one token."""
    table, places = scheduler.table, current.nonzero()[0]
    slots, valid = plan.draw_slots[places], result.valid[places]
    token_ids = result.token_ids[places]
    stopped, full = table.settle_draws(slots, token_ids)
    if valid.all():
        return Settled(slots, places, token_ids, finish_codes(stopped, full))
    table.known[slots[~valid]] -= 1  # an invalid row gave no token
    token_ids = np.where(valid, token_ids, NO_TOKEN)
    return Settled(slots, places, token_ids, finish_codes(stopped & valid, full & valid, ~valid))
