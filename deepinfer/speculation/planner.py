"""How many drafts a step verifies, and whether it drafts at all: the host's policy (spec/dspark.md section 4).

Whatever is decided here for a step comes from drafts that settled steps have verified, in the plain loop as in the
overlapped one; the drafts that the step will verify have no part in it. So the budget tells nothing of them, and their
ranking on the device (selection.py) cannot favour tokens that the target would not have chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer.speculation.budget import StepCosts, choose_budget

Whole = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

UNBOUNDED = 1 << 30
# Steps without drafts between two rounds that look whether drafts would pay again: twice as many each time that they
# would not, up to 32 for each sequence, because what many write changes slowly in the mean. On 2 CPU cores a probe at
# 32 sequences costs 0.9 steps: 2.8 % of the time at first, 0.3 % in the end.
PROBE_EVERY, PROBE_SELDOM = 32, 256
PROBE_DRAFTS = 8  # that such a round verifies at least: that drafts were accepted is worth more than a promise
RETURN_GAIN = 1.02  # drafting begins again when it promises this much: a tie is not worth a draft pass
ROUNDS = 8  # of each sequence that are remembered
SAMPLE_ROWS = 128  # sequences x rounds that a decision looks at: many sequences need only their last round
PRIOR_DRAFTS = 8.0  # weight of "the predictions are right" against the accepted drafts predicted
MEMORY_DRAFTS = 2000.0  # verified drafts after which a count has lost all but 1/e of its weight
CORRECTION = (0.25, 4.0)
MEAN_WEIGHT = 0.1  # of one step in the running mean of survivals over all sequences


class DraftPlan(NamedTuple):
    """Of one step. The device chooses the likeliest `budget` drafts within the caps."""

    caps: Whole  # int64 [R] drafts of each slot to verify at most
    budget: int | None  # of all slots together; None = no bound but the caps
    propose: bool  # draft tokens for the next step


class DraftPlanner:
    """Decides with what settled steps have shown. One per engine; slots are those of the engine.

    varlen: as many drafts as pay at the measured `costs`, or none; otherwise always k, in every step.
    """

    def __init__(self, max_num_seqs: int, k: int, *, varlen: bool, costs: StepCosts | None = None) -> None:
        if k < 0:
            raise ValueError(f"drafts = {k}: 0 or more")
        self.k = k
        self._varlen, self._costs = varlen, costs
        self._trims = varlen and k > 0 and costs is not None and not costs.are_flat
        # Of each slot: survivals of the drafts that its last `ROUNDS` rounds have verified, oldest overwritten, ...
        self._past = np.ones((max_num_seqs, ROUNDS, k), np.float32)
        self._next = np.zeros(max_num_seqs, np.int64)
        self._latest = np.ones((max_num_seqs, k), np.float32)  # the newest of them
        self._stale = np.ones(max_num_seqs, np.bool_)  # what stands there is a guess: the next value replaces it all
        # ... and of the drafts that a step in flight verifies, which nothing here may depend on before it has settled.
        self._pending = np.ones((max_num_seqs, k), np.float32)
        self._drafted = np.zeros(max_num_seqs, np.bool_)  # whether there are such drafts
        self._mean = np.ones(k, np.float32)  # of survivals, over all sequences: a new one's prospects
        self._accepted = self._predicted = 0.0  # drafts, of those verified lately
        self._drafting = k > 0
        self._proposed = True  # by the last plan
        self._idle_steps, self._patience = 0, PROBE_EVERY
        self._idle_sequences = 0  # decodes when it began to wait

    @property
    def explanation(self) -> str:
        """One line for people: which policy is in force, and why."""
        if not self.k:
            return "no drafts"
        fixed = f"always {self.k} drafts a sequence"
        if self._trims:
            return f"0 to {self.k} drafts a sequence, by confidence and the measured cost of a step"
        if not self._varlen:
            return fixed
        return f"{fixed}: the cost of a step is {'unknown' if self._costs is None else 'the same at every size'}"

    @property
    def correction(self) -> float:
        """Drafts accepted for each one predicted, of those verified lately."""
        ratio = (self._accepted + PRIOR_DRAFTS) / (self._predicted + PRIOR_DRAFTS)
        return min(max(ratio, CORRECTION[0]), CORRECTION[1])

    def open(self, slot: int) -> None:
        """A new sequence takes the slot (also one that comes back after a preemption). It is expected to do as the
        others did; before there were others, to have every draft accepted."""
        self._past[slot] = self._latest[slot] = self._mean
        self._stale[slot] = True
        self._drafted[slot] = False

    def plan(
        self, slots: Whole, most: Whole, other_rows: int = 0, other_samples: int = 0, room: int = UNBOUNDED
    ) -> DraftPlan:
        """The next step. slots [R]: its decodes; most [R]: drafts that each may use (limit, blocks); other_rows and
        other_samples: rows of prefill chunks in the step, and how many of these chunks draw a token; room: rows that
        may be added to the step beside the R anchors. Called once per step, in order."""
        usable = np.minimum(most, self.k)
        total = int(usable.sum())
        if not self._trims:
            propose = self.k > 0 and len(slots) + other_samples > 0
            wanted = total
        else:
            wanted, propose = self._decide(slots, usable, other_rows, other_samples, room)
        budget = min(wanted, room, total)
        self._proposed = propose or not self._trims
        return DraftPlan(np.minimum(usable, budget), budget if budget < total else None, propose)

    def settle(self, slots: Whole, num_verified: Whole, accepted: Whole, survivals: Floats | None) -> None:
        """A step came back. slots [n] that drew in it (decodes and others; stale draws left out), drafts verified and
        accepted of each [n] (before any stop cut), and survivals [n, k] of the drafts for the next step, None if it
        proposed none. Once per step that drew, in order."""
        self._count(self.predicted(slots), num_verified, accepted)
        done = slots[self._drafted[slots]]
        if len(done):
            verified = self._pending[done]
            fresh = self._stale[done]
            if fresh.any():
                self._past[done[fresh]] = verified[fresh, None]
                self._stale[done] = False
            at = self._next[done]
            self._past[done, at] = self._latest[done] = verified
            self._next[done] = (at + 1) % ROUNDS
            self._mean += MEAN_WEIGHT * (verified.mean(0) - self._mean)
        self._drafted[slots] = survivals is not None
        if survivals is not None:
            # A request whose logits broke says NaN; it must not spoil the sums over all.
            self._pending[slots] = np.where(np.isnan(survivals), 0, survivals)

    def predicted(self, slots: Whole) -> Floats:
        """[n, k]: what the device had said about the drafts that the step to be settled next has verified. Call it
        before `settle`. Meaningful for the first num_verified of each row."""
        return self._pending[slots]

    # -- the decision ----------------------------------------------------------------------------------------------

    def _decide(self, slots: Whole, usable: Whole, other_rows: int, other_samples: int, room: int) -> tuple[int, bool]:
        """Drafts to verify in this step, and whether to draft for the next."""
        assert self._costs is not None
        verify, draft = self._costs.verify, self._costs.draft
        sequences = len(slots)
        if not sequences:  # the first tokens of new sequences: do drafts for them pay?
            newcomers = np.broadcast_to(self._mean, (1, other_samples, self.k))
            if other_samples:
                self._switch(self._gains(newcomers, np.full(other_samples, self.k)), other_samples)
            return 0, other_samples > 0 and self._drafting
        gains = self._gains(self._sample(slots), usable)
        best = self._switch(gains, sequences)
        propose = self._drafting or self._probe(slots)
        if not self._proposed:
            return 0, propose
        if self._drafting and best <= room and not other_rows:
            return best, propose  # the question was the same
        # Drafts that are there and not followed by others are paid for.
        draft_seconds = draft.at(sequences + other_samples) if self._drafting else 0.0
        samples, rows = sequences + other_samples, sequences + other_rows
        budget, _ = choose_budget(gains[: max(room, 0) + 1], samples, rows, verify, draft_seconds)
        return budget if self._drafting else max(budget, PROBE_DRAFTS), propose

    def _switch(self, gains: Floats, sequences: int) -> int:
        """Drafting or not, a question of the decodes alone: prefill chunks come and go, and the drafts proposed beside
        one are verified in a step that may have none. Returns how many drafts such a step would verify."""
        assert self._costs is not None
        best, rate = choose_budget(gains, sequences, sequences, self._costs.verify, self._costs.draft.at(sequences))
        plain = sequences / self._costs.verify.at(sequences)
        self._drafting = rate > plain * (1.0 if self._drafting else RETURN_GAIN)
        if self._drafting:
            self._idle_steps, self._patience, self._idle_sequences = 0, PROBE_EVERY, sequences
        elif sequences <= self._idle_sequences // 2:  # another load, where another answer is likely
            self._patience, self._idle_sequences = PROBE_EVERY, sequences
        return best

    def _probe(self, slots: Whole) -> bool:
        """Not drafting: whether this step drafts all the same, to see what it would bring."""
        self._idle_steps += 1
        if self._idle_steps < self._patience:
            return False
        self._idle_steps, self._patience = 0, min(2 * self._patience, PROBE_SELDOM, PROBE_EVERY * len(slots))
        self._idle_sequences = len(slots)
        self._stale[slots] = True  # what the probe finds counts, not what it was when drafting stopped
        return True

    def _sample(self, slots: Whole) -> Floats:
        """Survivals [rounds, R, k] of the last rounds: few sequences need several, or a decision follows chance."""
        rounds = min(max(SAMPLE_ROWS // len(slots), 1), ROUNDS)
        if rounds == 1:
            return self._latest.take(slots, axis=0)[None]
        back = self._next[slots] - np.arange(1, rounds + 1)[:, None]
        return self._past[slots, back % ROUNDS]

    def _gains(self, past: Floats, caps: Whole) -> Floats:
        """Drafts accepted [K + 1] of the likeliest 0 .. K, the mean over rounds; K: all that the caps allow."""
        rounds, correction = len(past), self.correction
        if caps.min() == self.k:
            survivals = past.reshape(rounds, -1) * np.float32(-correction)  # the likeliest are sorted to the front
        else:
            survivals = past[:, np.arange(self.k) < caps[:, None]] * np.float32(-correction)
        if correction > 1:
            np.maximum(survivals, -1.0, out=survivals)
        survivals.sort(axis=1)
        gains = np.zeros(survivals.shape[1] + 1, np.float32)
        np.add.accumulate(survivals[0] if rounds == 1 else survivals.sum(0) / rounds, out=gains[1:])
        return np.negative(gains, out=gains)

    def _count(self, predicted: Floats, num_verified: Whole, accepted: Whole) -> None:
        verified = int(num_verified.sum())
        if verified:
            fade = np.exp(-verified / MEMORY_DRAFTS)
            likely = predicted[np.arange(self.k) < num_verified[:, None]].sum()
            self._predicted = self._predicted * fade + float(likely)
            self._accepted = self._accepted * fade + int(accepted.sum())
