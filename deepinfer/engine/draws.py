"""The second half of a step: from logits to tokens, verdicts on drafts, and drafts for the next step.

Rows of logits come as the plan counts them: those of the decodes first, as many of each as it verifies drafts and one
more; of everything else one row per draw. What is drawn stands in the runner's table of tokens afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.sampler import choose, list_top, logprobs_of
from deepinfer.engine.sampling_state import CONSTRAINED, SamplingState
from deepinfer.engine.slot_constraints import StepMasks
from deepinfer.engine.speculator import Speculator, VerifyRows
from deepinfer.speculation.constraint import Masks

Whole = npt.NDArray[np.int64]


class Chunks(NamedTuple):
    """Where a step's chunks really start and how long they are, [chunks] each: `starts`, `lengths` and `num_logits` of
    the plan where nothing is drafted."""

    starts: Whole
    lengths: Whole
    num_logits: Whole


class Asked(NamedTuple):
    """The masks of a step, on their way. Of each draw, as many rows as it has drafts and one more."""

    constrained: npt.NDArray[np.bool_]  # [draws]
    counts: Whole  # [draws] rows of masks, 0 where nothing constrains
    masks: StepMasks


class StepDraws:
    """Over the runner's table of tokens, int32 [slots, width]. speculator: None where nothing is drafted."""

    def __init__(self, tokens: Tensor, sampling: SamplingState, speculator: Speculator | None) -> None:
        self._tokens, self._sampling, self._speculator = tokens, sampling, speculator

    def places(self, slots: Whole, positions: Whole) -> Tensor:
        """Where tokens of these slots and positions stand in the flat table."""
        return self._sampling.place(slots * self._tokens.shape[1] + positions)

    def ask_constraints(self, plan: StepPlan, chunks: Chunks) -> Asked | None:
        """What may follow in the rows of constrained draws; None if there are none."""
        slots = plan.draw_slots.copy()
        for fork in plan.forks:  # a completion begins where its parent stands
            slots[slots == fork.child] = fork.parent
        constrained = self._sampling.flags[slots] & CONSTRAINED != 0
        if not constrained.any():
            return None
        decodes = plan.num_decodes
        counts = np.ones_like(slots)
        counts[:decodes] = chunks.lengths[:decodes]
        counts[~constrained] = 0
        drafts = np.maximum(counts[:decodes] - 1, 0)
        before = np.arange(drafts.sum()) - np.repeat(drafts.cumsum() - drafts, drafts)
        positions = np.repeat(chunks.starts[:decodes] + 1, drafts) + before
        token_ids = self._tokens.view(-1)[self.places(np.repeat(slots[:decodes], drafts), positions)].tolist()
        ends = np.zeros(len(slots) + 1, np.int64)
        ends[1 : decodes + 1] = drafts.cumsum()
        ends[decodes + 1 :] = ends[decodes]
        own = np.flatnonzero(constrained).tolist()
        paths = [token_ids[ends[i] : ends[i + 1]] for i in own]
        return Asked(constrained, counts, self._sampling.constraints.begin(slots[own].tolist(), paths))

    def draw(
        self, plan: StepPlan, chunks: Chunks, positions: Whole, logits: Tensor, inputs: Tensor, masks: Masks | None
    ) -> StepResult:
        """positions [draws] of the newest token before each draw. logits float32 [rows, vocab]; inputs int64: the
        tokens of the step's rows. masks: of the rows that are constrained."""
        if self._speculator is None:
            return self._draw(plan, positions, logits, masks)
        drafts = np.zeros_like(plan.draw_slots)
        drafts[: plan.num_decodes] = chunks.lengths[: plan.num_decodes] - 1
        rows = VerifyRows(plan.draw_slots, positions, drafts)
        return self._draw_with_drafts(plan, rows, logits, inputs, self._speculator, masks)

    def _draw(self, plan: StepPlan, positions: Whole, logits: Tensor, masks: Masks | None) -> StepResult:
        """One token per draw. masks: of the rows that are constrained."""
        slots = plan.draw_slots
        if not slots.size:
            return no_draws()
        decodes = plan.num_decodes
        rows = np.concatenate((np.arange(decodes), plan.draw_rows[decodes:] + decodes))
        logits = self._select(logits, rows)
        chosen = choose(logits, slots, positions, self._sampling, masks)
        self._tokens.view(-1)[self.places(slots, positions + 1)] = chosen.token_ids.int()
        valid = chosen.valid.cpu().numpy()
        self._sampling.append(slots, chosen.token_ids, valid)
        return StepResult(
            token_ids=chosen.token_ids.cpu().numpy(),
            logprobs=chosen.logprobs.cpu().numpy(),
            valid=valid,
            top=list_top(logits, chosen.token_ids, slots, self._sampling),
        )

    def _draw_with_drafts(
        self,
        plan: StepPlan,
        rows: VerifyRows,
        logits: Tensor,
        inputs: Tensor,
        speculator: Speculator,
        masks: Masks | None,
    ) -> StepResult:
        """The drafts that are kept and one token more per draw, and drafts for the next step."""
        slots, lengths = rows.slots, rows.lengths
        if not lengths.any():  # as while drafts do not pay
            result = self._draw(plan, rows.positions, logits, masks)
            result.counts, result.num_verified = np.ones_like(slots), lengths
            speculator.forget(slots)
            if plan.propose and slots.size:
                result.survivals = speculator.propose(slots, self._sampling.place(result.token_ids))
            return result
        firsts, decodes = rows.firsts, plan.num_decodes
        decode_rows = decodes + int(lengths.sum())
        logits = self._select(logits, np.concatenate((np.arange(decode_rows), plan.draw_rows[decodes:] + decode_rows)))
        verdict, accepted = speculator.verify(logits, inputs, rows, masks)

        counts = accepted + 1
        ends = counts.cumsum()
        emitted = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # how many of its draw came before
        draws = np.repeat(np.arange(len(slots)), counts)
        width = verdict.token_ids.shape[1]
        token_ids = verdict.token_ids.view(-1)[self._sampling.place(draws * width + emitted)]
        newest = token_ids if len(token_ids) == len(slots) else token_ids[self._sampling.place(ends - 1)]
        # Drafts that are kept stand in the table already.
        self._tokens.view(-1)[self.places(slots, rows.positions + counts)] = newest.int()
        valid = verdict.valid.cpu().numpy()
        kept = np.ones(len(token_ids), np.bool_)
        kept[ends - 1] = valid
        owners = slots[draws]
        self._sampling.append(owners, token_ids, kept)

        logits = self._select(logits, np.repeat(firsts, counts) + emitted)
        positions = np.repeat(rows.positions, counts) + emitted
        result = StepResult(
            token_ids=token_ids.cpu().numpy(),
            logprobs=logprobs_of(logits, token_ids, owners, positions, self._sampling).cpu().numpy(),
            valid=valid,
            top=list_top(logits, token_ids, owners, self._sampling),
            counts=counts,
            num_verified=lengths,
        )
        if plan.propose:
            result.survivals = speculator.propose(slots, newest)
        return result

    def _select(self, logits: Tensor, rows: Whole) -> Tensor:
        if rows.size == len(logits) and (rows == np.arange(rows.size)).all():
            return logits
        return logits.index_select(0, self._sampling.place(rows))


def stuck(asked: Asked, masks: Masks, result: StepResult) -> npt.NDArray[np.bool_]:
    """Draws without a valid token because nothing may follow, bool [draws]."""
    last = asked.counts.cumsum() - asked.counts + (0 if result.counts is None else result.counts - 1)
    found = asked.constrained & ~result.valid
    found[found] = ~masks[last[found]].any(-1)
    return found


def no_draws() -> StepResult:
    return StepResult(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.bool_))
