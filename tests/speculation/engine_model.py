"""An engine in numbers: requests that accept drafts by chance, steps that take the time of a cost curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.speculation.budget import StepCosts
from deepinfer.speculation.planner import DraftPlanner
from deepinfer.speculation.selection import select_lengths


@dataclass
class Workload:
    sequences: int
    acceptance: float  # mean probability of a draft, given those before it
    spread: float = 1.0  # how much it differs from draft to draft, in log-odds
    says: float = 1.0  # confidence = acceptance ** says: below 1 the head promises too much
    k: int = 5

    def truth(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Probability [rows, k] that a draft is accepted if those before it are."""
        middle = np.log(self.acceptance / (1 - self.acceptance))
        return 1 / (1 + np.exp(-rng.normal(middle, self.spread, (rows, self.k))))

    def expected(self) -> float:
        """Drafts accepted of k, in the mean."""
        return float(self.truth(np.random.default_rng(1), 200_000).cumprod(1).sum(1).mean())


@dataclass
class Outcome:
    tokens_per_second: float
    steps: int
    proposed: int  # steps that drafted
    verified: int  # drafts


def simulate(
    planner: DraftPlanner,
    work: Workload,
    costs: StepCosts,
    steps: int = 600,
    *,
    overlapped: bool,
    seed: int = 0,
) -> Outcome:
    """The decode phase. In the overlapped loop a step is planned before the one ahead of it has settled."""
    rng = np.random.default_rng(seed)
    rows, k = work.sequences, work.k
    slots, most = np.arange(rows), np.full(rows, k)
    tokens, seconds, proposed, verified = 0, 0.0, 0, 0
    survivals: np.ndarray | None = None
    truth = np.zeros((rows, k))
    waiting: list[tuple] = []
    for slot in slots:
        planner.open(slot)
    for _ in range(steps):
        plan = planner.plan(slots, most)
        lengths = np.zeros(rows, np.int64)
        if survivals is not None:
            caps = torch.from_numpy(plan.caps)
            lengths = select_lengths(torch.from_numpy(survivals), caps, plan.budget).numpy()
        accepted = ((rng.random((rows, k)) < truth) & (np.arange(k) < lengths[:, None])).cumprod(1).sum(1)
        tokens += rows + int(accepted.sum())
        verified += int(lengths.sum())
        seconds += costs.verify.at(rows + int(lengths.sum())) + (costs.draft.at(rows) if plan.propose else 0.0)
        survivals = None
        if plan.propose:
            proposed += 1
            truth = work.truth(rng, rows)
            survivals = (truth**work.says).cumprod(1).astype(np.float32)
        waiting.append((slots, lengths, accepted, survivals))
        if len(waiting) > overlapped:
            planner.settle(*waiting.pop(0))
    return Outcome(tokens / seconds, steps, proposed, verified)
