"""Decode steps of an engine as rounds of the device (device_round.py): draws, verdicts and drafts without the host.

A plan of decodes alone, whose requests a round serves, runs as two graphs: the padded forward pass, and what follows
it. The host names the slots and goes on; the report, which it reads when it asks for it, is booked in the cache as the
runner's own path would have done. So a round may begin behind one that has not ended, if it `follows` it: then the
device does not wait for the host between them. Any other plan takes the runner's path, and the slots come back with
their next plan of decodes, their drafts forgotten.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deepinfer.cache.draft_window import PaddedDraftWindow
from deepinfer.cache.edits import SetTable
from deepinfer.cache.graph_step import commit_rows
from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.device_round import DeviceRound, DraftsOfRound, Mark, PendingResult, Round, RoundColumns, serves
from deepinfer.engine.graphs import GraphedModel, PaddedStep
from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.sampling_state import SamplingState
from deepinfer.kernels import select
from deepinfer.kernels.streams import Graph, record
from deepinfer.kernels.triton.sampling_rows import RowLaws
from deepinfer.model.batch import Batch
from deepinfer.model.draft_model import DraftModel
from deepinfer.speculation.calibration import Calibration

if TYPE_CHECKING:
    from deepinfer.kernels.triton.round_rows import Rows

Whole = npt.NDArray[np.int64]
Variant = tuple[bool, bool, bool]  # drawn, truncated, propose


class RoundDraftModel:
    """A `RoundDrafter` with trained draft layers: their whole block, of which the first k are drawn."""

    def __init__(self, model: DraftModel, storage: CacheStorage, k: int) -> None:
        self._model, self._storage, self._k = model, storage, k

    def propose(self, slots: Tensor, anchors: Tensor, laws: RowLaws) -> DraftsOfRound:
        model, storage, k = self._model, self._storage, self._k
        window = PaddedDraftWindow(storage.windows, slots, laws.positions, model.block, storage.rounds)
        with model.drafting():
            hidden = model.hidden(anchors, window)  # [C, block, D]
            logits = model.base_logits(hidden, k)
            drafts, embeddings = select.markov_chain(anchors, model.markov_embed, model.markov_head, logits, laws)
            confidence = model.confidence(hidden[:, :k].flatten(0, 1), embeddings.flatten(0, 1)).view(drafts.shape)
        return DraftsOfRound(drafts, confidence)


class Rounds:
    """Of one runner: its table of tokens int32 [slots, width], its sampling state, the cache, the padded steps."""

    def __init__(
        self,
        forward: GraphedModel,
        storage: CacheStorage,
        sampling: SamplingState,
        tokens: Tensor,
        *,
        max_model_len: int,
        draft_model: DraftModel | None = None,
        drafts: int = 0,
        calibration: Calibration | None = None,
    ) -> None:
        self._forward, self._storage, self._sampling = forward, storage, sampling
        slots = len(tokens)
        self._columns = RoundColumns(slots, drafts, tokens.device)
        drafter = RoundDraftModel(draft_model, storage, drafts) if draft_model is not None and drafts else None
        self._rounds = DeviceRound(
            self._columns, tokens, max_model_len=max_model_len, drafter=drafter, calibration=calibration
        )
        self._inside = np.zeros(slots, np.bool_)  # whose columns are up to date
        self._last_end: Mark | None = None  # of the round that began last
        self._finishes: dict[tuple[PaddedStep, Variant], Graph] = {}

    def leave(self, slots: Whole | list[int]) -> None:
        """Something else than a round changes these slots."""
        self._inside[slots] = False

    def step_of(self, plan: StepPlan) -> tuple[PaddedStep, Round] | None:
        """The padded step for a plan and what the round is told, None where the plan is none for a round."""
        if plan.num_decodes != len(plan.slots) or not plan.num_decodes or plan.forks or plan.scores:
            return None
        flags = self._sampling.flags[plan.slots]
        if not serves(flags, self._rounds.drafts):
            return None
        caps = plan.draft_caps if len(plan.draft_caps) else np.zeros_like(plan.slots)
        order = Round.of(flags, plan.slots, caps, plan.draft_budget, plan.propose)
        step = self._forward.step_for(order.most_rows, len(plan.slots))
        return None if step is None else (step, order)

    def follows(self, plan: StepPlan) -> bool:
        """Whether the plan may begin behind a round that is not booked: it is a round of sequences that went on in
        rounds, whose lengths only the device knows now, and changes nothing besides but tables, which grow."""
        if plan.admissions or not all(isinstance(order, SetTable) for order in plan.edits):
            return False
        return bool(self._inside[plan.slots].all()) and self.step_of(plan) is not None

    def begin(self, step: PaddedStep, order: Round, *, behind: bool = False) -> RoundInFlight:
        """One round, asked of the device. behind: of one that has not ended, which it `follows`. Rounds are to be ended
        in the order in which they began."""
        slots = order.slots
        new = slots[~self._inside[slots]]
        if new.size:
            self._columns.enter(self._sampling, new, self._storage.lengths(new))
            self._inside[new] = True
        variant = order.drawn, order.truncated, order.propose
        finish = self._finish(step, variant) if step.captured else None
        self._rounds.begin(order, step.rows)
        self._rounds.fill(step.rows)
        logits = step.play()
        if finish is None:
            self._finish_eagerly(step.rows, logits, variant)
        else:
            finish.replay()
        pending = self._rounds.collect(order, step.rows)
        before = self._last_end if behind else None
        self._last_end = pending.end
        return RoundInFlight(self, slots, pending, before)

    def book(self, slots: Whole, verified: Whole, counts: Whole) -> None:
        """These slots verified so many drafts and have so many tokens more, [slots] each."""
        starts = self._storage.lengths(slots).copy()
        none = np.zeros_like(starts)
        batch = Batch(
            token_ids=self._columns.lengths,  # nobody asks; it says on which device
            chunk_slots=slots,
            starts=starts,
            lengths=1 + verified,
            num_logits=1 + verified,
            window_floors=none,
            write_from=none,
            keep_from=none,
        )
        commit_rows(self._storage, batch)
        short = np.flatnonzero(counts < 1 + verified)
        if short.size:
            self._storage.truncate(slots[short], starts[short] + counts[short])

    def _finish_eagerly(self, rows: Rows, logits: Tensor, variant: Variant) -> None:
        drawn, truncated, propose = variant
        self._rounds.finish(rows, logits, drawn=drawn, truncated=truncated, propose=propose)

    def _finish(self, step: PaddedStep, variant: Variant) -> Graph:
        """The graph of what follows the pass, recorded when it is first asked for: over rows of nobody."""
        key = step, variant  # not its rows: two steps may have as many, in other chunks
        if key not in self._finishes:
            nothing = np.empty(0, np.int64)
            self._rounds.begin(Round(nothing, nothing), step.rows)
            self._rounds.fill(step.rows)
            logits = step.play()
            self._finish_eagerly(step.rows, logits, variant)
            work = partial(self._finish_eagerly, step.rows, logits, variant)
            # `record` waits for the device, rounds in flight included, and has to: this order was begun and never
            # collected, so no event says when its copy has left the page-locked memory that `begin` writes next. It
            # costs one stop per step size and variant, beside a recording that takes longer.
            self._finishes[key], _ = record(work, self._forward.memory_pool)
        return self._finishes[key]


class RoundInFlight:
    """A round that the device has before it."""

    def __init__(self, rounds: Rounds, slots: Whole, pending: PendingResult, before: Mark | None) -> None:
        """before: when the round ends that it follows."""
        self._rounds, self._slots, self._pending, self._before = rounds, slots, pending, before

    def end(self) -> StepResult:
        """Waits for its report, and books it."""
        result = self._pending.result()
        if self._before is not None:
            result.idle_seconds = self._pending.start.seconds_after(self._before)
        slots = self._slots
        counts = np.ones_like(slots) if result.counts is None else result.counts
        verified = np.zeros_like(slots) if result.num_verified is None else result.num_verified
        self._rounds.book(slots, verified, counts)
        return result
