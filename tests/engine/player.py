"""A device that computes nothing: it accepts drafts by chance and knows every sequence's tokens beforehand.

For tests of the host's side with drafts: whatever is drafted, verified or accepted, token p of a sequence is a function
of its seed and p, so what a request must give in the end is known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import Runner

VOCAB = 64


def token(seed: int, position: int) -> int:
    """2 .. VOCAB - 1."""
    return 2 + random.Random(seed * 1_000_003 + position).randrange(VOCAB - 2)


@dataclass
class _Slot:
    seed: int
    limit: int
    length: int = 0  # position of the newest token
    drafts: int = 0  # that wait to be verified


class Player(Runner):
    """right: how often a draft is accepted. broken: how often a draw's last row is not finite."""

    def __init__(self, drafts: int, *, chance: random.Random, right: float = 0.7, broken: float = 0.0) -> None:
        self.slots: dict[int, _Slot] = {}
        self._drafts, self._chance, self._right, self._broken = drafts, chance, right, broken

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self.slots[admission.slot] = _Slot(admission.seed, admission.limit)
        decodes, chance = plan.num_decodes, self._chance
        for slot, start, length in zip(
            *(a[decodes:].tolist() for a in (plan.slots, plan.starts, plan.lengths)), strict=True
        ):
            self.slots[slot].length = start + length
        for parent, child, seed, _ in plan.forks:
            self.slots[child] = _Slot(seed, self.slots[parent].limit, self.slots[parent].length)
        tokens: list[int] = []
        counts, verified = [], []
        budget = plan.draft_budget
        for at, number in enumerate(plan.draw_slots.tolist()):
            slot, lengths = self.slots[number], 0
            if at < decodes:
                assert slot.length <= plan.starts[at], "the host's bound is below the truth"
                lengths = max(0, min(int(plan.draft_caps[at]), slot.drafts, slot.limit - slot.length - 2))
                lengths = lengths if budget is None else min(lengths, budget)
                budget = None if budget is None else budget - lengths
            accepted = 0
            while accepted < lengths and chance.random() < self._right:
                accepted += 1
            first = slot.length + 1 if at < decodes else slot.length
            tokens += [token(slot.seed, first + i) for i in range(accepted + 1)]
            slot.length = first + accepted
            slot.drafts = self._drafts if plan.propose else 0
            counts.append(accepted + 1)
            verified.append(lengths)
        survivals = np.sort(np.random.default_rng(chance.randrange(1 << 30)).random((len(counts), self._drafts)), 1)
        return StepResult(
            token_ids=np.array(tokens, np.int64),
            logprobs=-np.array(tokens, np.float32),
            valid=np.array([chance.random() >= self._broken for _ in counts], bool),
            counts=np.array(counts, np.int64),
            num_verified=np.array(verified, np.int64),
            survivals=survivals[:, ::-1].astype(np.float32) if plan.propose and counts else None,
        )
