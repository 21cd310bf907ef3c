"""Counts what a step did, for the statistics: from its plan, its result and how the queues and the cache stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.step_output import NO_TOKEN, StepOutput
from deepinfer.metrics.drafts import DraftStats
from deepinfer.metrics.stats import EngineStats, StepStats


class StepMeter:
    """Fills one StepStats per settled step. The sums of all steps are in `totals`."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.totals = EngineStats()
        self.last = StepStats()
        self._scheduler = scheduler
        self._clock = clock
        self._last_end: float | None = None  # of the step before; None after a pause
        self._cache = replace(scheduler.manager.stats)
        self._preempted = (0, 0)

    def add_output(self, seconds: float) -> None:
        """The last step's tokens took so long to be turned into text."""
        self.last.output_seconds += seconds
        self.totals.totals.output_seconds += seconds

    def pause(self) -> None:
        """There is no work: the time until the next step counts for none."""
        self._last_end = None

    def record(
        self, plan: StepPlan, result: StepResult, output: StepOutput, schedule_seconds: float, settle_seconds: float
    ) -> StepStats:
        """output: of this step, settled. schedule_seconds: of the plan made in this turn (that of a later step under
        the overlapped loop)."""
        now = self._clock()
        step = StepStats()
        own = schedule_seconds + result.device_seconds + settle_seconds
        step.seconds = own if self._last_end is None else now - self._last_end
        self._last_end = now
        step.decode_tokens, step.replay_tokens = plan.num_decodes, plan.num_replayed
        step.prefill_tokens = int(plan.lengths[plan.num_decodes :].sum()) - plan.num_replayed
        if result.num_verified is not None:
            self._count_drafts(step, plan, result.num_verified, output)
        step.decoder_rows_skipped = int(np.clip(plan.keep_from - plan.starts, 0, plan.lengths).sum())
        step.decoder_rows_kept = step.num_tokens - step.decoder_rows_skipped
        step.generated_tokens = int((output.token_ids != NO_TOKEN).sum())
        step.corrupted, step.fsm_errors = result.num_failed - result.num_stuck, result.num_stuck
        step.prompt_tokens, step.prompt_tokens_cached = self._scheduler.prefills.take_admitted()
        step.schedule_seconds, step.settle_seconds = schedule_seconds, settle_seconds
        step.prepare_seconds = result.prepare_seconds
        step.device_seconds, step.idle_seconds = result.device_seconds, result.idle_seconds
        self._count_cache(step)
        self.take_levels(step)
        self.totals.add(step)
        self.last = step
        return step

    @staticmethod
    def _count_drafts(step: StepStats, plan: StepPlan, num_verified: np.ndarray, output: StepOutput) -> None:
        allowed = int(plan.draft_caps.sum())
        step.draft_budget = allowed if plan.draft_budget is None else min(allowed, plan.draft_budget)
        step.draft_tokens = int(num_verified.sum())
        if (rounds := output.rounds) is not None:
            step.drafts = DraftStats()
            step.drafts.observe(rounds.drafted, rounds.accepted, rounds.predictions)

    def _count_cache(self, step: StepStats) -> None:
        scheduler, before = self._scheduler, self._cache
        after = self._cache = replace(scheduler.manager.stats)
        step.prefix_queries = after.query_tokens - before.query_tokens
        step.prefix_hits = after.hit_tokens - before.hit_tokens
        step.windows_hit = after.window_hits - before.window_hits
        step.windows_replayed = after.window_replays - before.window_replays
        recomputed, offloaded = scheduler.num_recomputed, scheduler.num_offloaded
        step.preemptions_recompute = recomputed - self._preempted[0]
        step.preemptions_offload = offloaded - self._preempted[1]
        self._preempted = (recomputed, offloaded)

    def take_levels(self, step: StepStats) -> None:
        """How things stand now."""
        scheduler, manager = self._scheduler, self._scheduler.manager
        step.running, step.waiting = len(scheduler.running), len(scheduler.waiting)
        step.waiting_by_reason = dict(Counter(sequence.waits_for for sequence in scheduler.waiting))
        step.blocks_cached, step.blocks_used = manager.num_cached_blocks, manager.num_used_blocks
        step.blocks_free = manager.num_free_blocks - step.blocks_cached
        step.slots_total = manager.max_num_seqs
        step.slots_used = manager.max_num_seqs - manager.num_free_slots
