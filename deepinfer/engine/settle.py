"""Books the result of a step: what was assumed when it was scheduled meets what came (spec/engine.md 5.2).

A row whose slot has changed hands since (its sequence ended or was preempted) is dropped: the epoch tells. For the
rest the order is that of spec/engine.md 4.8: stop and end tokens, then the length limit. Stop strings are found by the
front end, which aborts the sequence.
"""

from __future__ import annotations

import numpy as np

from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.step_output import FINISH_CODE, NO_TOKEN, PromptScores, StepOutput
from deepinfer.engine.stop import FinishReason

STOP, LENGTH, ERROR = (FINISH_CODE[reason] for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR))


def settle(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> StepOutput:
    """What the step added, and the ends it brought. Sequences that ended have given everything back."""
    table = scheduler.table
    current = table.epoch[plan.slots] == plan.chunk_epochs
    table.settle_chunks(plan.slots[current], plan.starts[current], plan.lengths[current])

    current = table.epoch[plan.draw_slots] == plan.draw_epochs
    slots = plan.draw_slots[current]
    token_ids, valid = result.token_ids[current], result.valid[current]
    token_ids = np.where(valid, token_ids, NO_TOKEN)
    stopped, full = table.settle_draws(slots, np.where(valid, token_ids, 0))
    finish = np.where(stopped, STOP, np.where(full, LENGTH, 0))
    finish = np.where(valid, finish, ERROR).astype(np.int8)
    output = StepOutput(
        numbers=table.number[slots],
        indices=table.index[slots],
        token_ids=token_ids,
        logprobs=result.logprobs[current],
        finish=finish,
        top=None if result.top is None else [result.top[i] for i in np.flatnonzero(current).tolist()],
        prompt_scores=[
            PromptScores(score.sequence.request.number, entries)
            for score, entries in zip(plan.scores, result.scores, strict=True)
        ],
    )
    ended = slots[finish > 0]
    table.known[slots[~valid]] -= 1  # an invalid row gave no token
    for slot in ended.tolist():
        sequence = scheduler.by_slot[slot]
        assert sequence is not None
        scheduler.finish(sequence)
    for slot in table.unpublished(plan.slots).tolist():
        sequence = scheduler.by_slot[slot]
        if sequence is not None:
            scheduler.prefixes.publish(sequence)
    return output
