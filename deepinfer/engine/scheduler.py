"""Builds a step: who computes which tokens.

There are no phases: every sequence has known tokens and computed tokens, and a step hands out counts until computed
catches up (spec/engine.md 4.1). What keeps it free of deadlock:
- a sequence enters only if a slot and the blocks of its whole prompt are free, so a prefill never stops half way;
- when blocks run out in decode, the youngest running sequence gives its up, so the oldest always moves; one that gave
  up MAX_PREEMPTIONS times enters next with the blocks of its whole output, and is left alone from then on;
- the oldest alone always fits: the door refuses what exceeds max_model_len, and EngineConfig holds one such sequence.

Steps may be in flight while the next one is scheduled. A sequence then counts as if all of them went well; those that
turn out to have ended are dropped when their results come (settle.py).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from deepinfer.cache import CacheFullError
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.prefix import COLD, PrefixHit
from deepinfer.config import BLOCK_SIZE, EngineConfig
from deepinfer.engine.draft_room import DraftRoom
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.plan_builder import PlanBuilder
from deepinfer.engine.prefills import Prefills
from deepinfer.engine.prefix_planner import PrefixPlanner
from deepinfer.engine.queue_policy import QueuePolicy, make_policy
from deepinfer.engine.sequence import Sequence, Status
from deepinfer.engine.table import SequenceTable
from deepinfer.speculation.planner import DraftPlanner

MAX_PREEMPTIONS = 3
LOOK_AHEAD = 16  # waiting sequences that may ask running prefills for windows although the step is full


class Scheduler:
    """Owns the queue, the slots and the blocks; knows nothing of tokens' meaning or of time.

    stop_ids: the token ids that end a sequence, asked once when it starts. planner: says how many drafts a step
    verifies, where there are any; None = one that knows no costs.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: CacheManager,
        stop_ids: Callable[[Sequence], set[int]],
        policy: QueuePolicy | None = None,
        planner: DraftPlanner | None = None,
    ) -> None:
        self.config = config
        self.manager = manager
        self.table = SequenceTable(config.max_num_seqs, config.max_model_len)
        self.waiting = policy or make_policy(config.queue_policy)
        self.running: list[Sequence] = []  # by order; each holds a slot
        self.prefixes = PrefixPlanner(config, manager, self.table)
        if planner is None and config.drafts:
            planner = DraftPlanner(config.max_num_seqs, config.drafts, varlen=config.varlen)
        self.planner = planner
        self._draft_room = None if planner is None else DraftRoom(config.drafts, manager, self.table, planner)
        self.by_slot: list[Sequence | None] = [None] * config.max_num_seqs
        self.failed: list[tuple[Sequence, Exception]] = []  # that can never start; taken by the core
        self._preempted: list[Sequence] = []  # taken by the core
        self.num_recomputed = self.num_offloaded = 0  # preemptions
        self._decoding = np.empty(0, np.int64)  # slots of running sequences in DECODE, by order
        self._prefilling: list[Sequence] = []  # running sequences in PREFILL, by order
        self._running_changed = False
        self._steps_without_prefill = 0
        self._num_steps = 0
        self.prefills = Prefills(
            config,
            manager,
            self.table,
            self.waiting,
            self.prefixes,
            stop_ids=stop_ids,
            run=self._run,
            running=self.running,
        )

    @property
    def num_preemptions(self) -> int:
        return self.num_recomputed + self.num_offloaded

    # -- the step -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, of at most max_num_batched_tokens tokens; None if nobody can compute anything now."""
        self.prefixes.save_windows()
        builder = PlanBuilder(self.table, self.config.max_num_batched_tokens)
        self._decode(builder)
        prefills = self._prefill_is_due(builder)
        drafts = None
        if self._draft_room is not None:
            drafts = self._draft_room.hold(builder, self._prefill_tokens() if prefills else 0)
        if prefills:
            self._continue_prefills(builder)
            self._admit(builder, now)
        while self.prefills.unforked:  # now that nobody walks the queue
            self.add(self.prefills.unforked.pop(0))
        if builder.is_empty:
            return None
        caps: np.ndarray | int = 0
        if self._draft_room is not None and drafts is not None:
            caps = self._draft_room.fill(builder, *drafts)
        self.table.schedule_decodes(builder.decode_slots, caps)
        self._steps_without_prefill = 0 if builder.num_prefill_tokens else self._steps_without_prefill + 1
        self._num_steps += 1
        return builder.plan(self._num_steps, self.manager.take_edits())

    def _decode(self, builder: PlanBuilder) -> None:
        """One token for every sequence whose prompt is scheduled, unless its last one is promised already."""
        table, slots = self.table, self._decoding_slots()
        slots = slots[table.least[slots] < table.limit[slots]]
        short = slots[self._ends(slots) > self.manager.capacity[slots]]
        for slot in short.tolist():
            if (sequence := self.by_slot[slot]) is not None and sequence.status is Status.DECODE:
                self._grow(sequence)
        if self._running_changed:
            slots = slots[np.isin(slots, self._decoding_slots())]  # without those that were preempted
        self.waiting.charge_outputs(table.tenant[slots])
        builder.decode(slots, self._ends(slots) - 1)

    def _ends(self, slots: np.ndarray) -> np.ndarray:
        """How many tokens they have at most when the step begins."""
        ends = self.table.total[slots]
        return ends if self.planner is None else np.minimum(ends, self.table.limit[slots])

    def _prefill_tokens(self) -> int:
        """That prefills could compute now; a block where that cannot be known without walking the queue."""
        if len(self.waiting) and self.manager.num_free_slots:
            return BLOCK_SIZE
        self._sort_running()
        slots = np.array([s.slot for s in self._prefilling], np.int64)
        return int((self.table.prefill_end[slots] - self.table.computed[slots]).sum())

    def _prefill_is_due(self, builder: PlanBuilder) -> bool:
        """With a prefill interval, decode steps come between; a step that decodes nobody may always prefill."""
        return not builder.num_decodes or self._steps_without_prefill >= self.config.prefill_interval

    def _continue_prefills(self, builder: PlanBuilder) -> None:
        self._sort_running()
        for sequence in self._prefilling:
            if builder.budget <= 0:
                return
            self.prefills.advance(sequence, builder)

    def _admit(self, builder: PlanBuilder, now: float) -> None:
        """Starts waiting sequences while there is budget, a slot and blocks for the next in line.

        Nobody overtakes who waits for room, so a long prompt does not starve behind short ones. Who waits for something
        else is passed by. When the step is full the next few are looked at all the same: a prefill that computes their
        prefix right now can only be asked for its window before it has gone past.
        """
        started = []
        looked_ahead = 0
        for sequence in self.waiting.candidates(now):
            full = builder.budget <= 0 or not self.manager.num_free_slots
            if full and (looked_ahead == LOOK_AHEAD or self.prefixes.shared.is_empty()):
                break
            looked_ahead += full
            if self._is_blocked(sequence):
                continue
            hit = self.prefixes.lookup(sequence)
            if self.prefixes.must_wait(sequence, hit):
                continue
            if full:
                continue
            if not self._fits(sequence, hit):
                sequence.waits_for = "room"
                break
            try:
                constraint = sequence.new_constraint()
            except Exception as error:
                self.failed.append((sequence, error))  # as above: before the queue is walked again it is gone
                continue
            self.prefills.start(sequence, hit, self._tokens_to_reserve(sequence), constraint, builder)
            started.append(sequence)
            self.prefixes.start(sequence, hit, islice(self.waiting.candidates(now), LOOK_AHEAD))
            self.prefills.advance(sequence, builder)
        for sequence in started:
            self.waiting.remove(sequence)

    def take_failed(self) -> list[tuple[Sequence, Exception]]:
        """Waiting sequences that can never start, and why. The caller ends them."""
        failed, self.failed = self.failed, []
        return failed

    def take_preempted(self) -> list[Sequence]:
        """Sequences that lost their slot since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    # -- waiting --------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.waiting.push(sequence)

    def _is_blocked(self, sequence: Sequence) -> bool:
        """True while something that is prepared elsewhere is missing, or a prefill that computes its prefix runs."""
        while sequence.conditions:
            try:
                if not sequence.conditions[0].ready():
                    sequence.waits_for = sequence.conditions[0].reason
                    return True
            except Exception as error:
                self.failed.append((sequence, error))  # once: the core ends it before the queue is walked again
                return True
            del sequence.conditions[0]
        return self.prefixes.is_awaiting(sequence)

    def _fits(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """1 % of the blocks stay free for those that run: filling up to the brim only buys preemptions."""
        free = self.manager.num_free_blocks
        if free <= sequence.refused_with:
            return False
        spare = max(1, self.manager.num_blocks // 100) if self.running else 0
        fits = self.manager.fits(hit, self._tokens_to_reserve(sequence), spare)
        sequence.refused_with = -1 if fits else free
        return fits

    def tokens_to_compute(self, sequence: Sequence) -> int:
        """Known tokens of a waiting sequence that the cache does not have now."""
        return sequence.num_known - self.prefixes.lookup(sequence).replay_start

    def _tokens_to_reserve(self, sequence: Sequence) -> int:
        return sequence.limit if sequence.preemptions >= MAX_PREEMPTIONS else sequence.num_known

    # -- running --------------------------------------------------------------------------------------------------

    def _run(self, sequence: Sequence, slot: int, status: Status) -> None:
        """It has this slot, and computes its known tokens (PREFILL) or one more per step (DECODE) from now on."""
        self._running_changed = True
        sequence.status = status
        if sequence.slot == slot:
            return
        sequence.slot = slot
        self.by_slot[slot] = sequence
        if self.planner is not None:
            self.planner.open(slot)
        bisect.insort(self.running, sequence, key=lambda s: s.order)

    def _sort_running(self) -> None:
        """Lists of those that decode and those that prefill, made again only when somebody has changed sides."""
        if self._running_changed:
            self._decoding = np.array([s.slot for s in self.running if s.status is Status.DECODE], np.int64)
            self._prefilling = [s for s in self.running if s.status is Status.PREFILL]
            self._running_changed = False

    def _decoding_slots(self) -> np.ndarray:
        self._sort_running()
        return self._decoding

    # -- leaving --------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out of whatever it is in and frees what it holds. Idempotent."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            if sequence.ticket is not None:
                self.manager.forget(sequence.ticket)
                sequence.ticket = None
        elif sequence.slot is not None:
            self._release(sequence)
        sequence.status = Status.FINISHED

    def _grow(self, sequence: Sequence) -> None:
        """Makes room for its next token, at the expense of the youngest, which may be the sequence itself."""
        while sequence.slot is not None:
            try:
                slot = sequence.slot
                self.manager.reserve(slot, int(min(self.table.total[slot], self.table.limit[slot])))
                return
            except CacheFullError:
                self._preempt(next(self._victims(), sequence))

    def _victims(self) -> Iterator[Sequence]:
        return (s for s in reversed(self.running) if s.preemptions < MAX_PREEMPTIONS)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, in its old place. A long one leaves its state in host memory if there is room, else
        prompt and output are computed again, as far as the prefix cache has lost them."""
        slot, table = sequence.slot, self.table
        assert slot is not None
        done, known = int(table.done[slot]), int(table.known[slot])
        sequence.token_ids = table.tokens[slot, :known].copy()
        # A chunk in flight writes over the window before it; of as many rows as a verify step has the rings keep what
        # they take.
        whole = int(table.computed[slot]) - done <= 1 + self.config.drafts
        if whole and done >= self.config.offload_tokens and self.config.offload_bytes:
            sequence.ticket = self.manager.offload(slot, done)
            sequence.offloaded = done
        self.num_offloaded += sequence.ticket is not None
        self.num_recomputed += sequence.ticket is None
        self._release(sequence)
        sequence.preemptions += 1
        self._preempted.append(sequence)
        if sequence.ticket is None:
            sequence.hit = COLD
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        self.prefixes.leave(sequence)
        self.waiting.leave(int(self.table.tenant[slot]))
        self.running.remove(sequence)
        self.manager.close(slot)
        self.table.vacate(slot)
        self.by_slot[slot] = None
        sequence.slot = None
        self._running_changed = True
