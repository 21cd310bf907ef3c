"""What it costs the host to schedule drafts: plan, selection and bookkeeping of a step, in microseconds.

python benchmarks/draft_scheduling.py
"""

from __future__ import annotations

import json
import time

import numpy as np
import torch

from deepinfer.speculation.budget import CostCurve, StepCosts
from deepinfer.speculation.planner import DraftPlanner
from deepinfer.speculation.selection import select_lengths

# Of a machine on which drafts pay at every batch size, so that the whole decision is taken in each step.
COSTS = StepCosts(
    CostCurve({1: 9.0e-3, 64: 10e-3, 512: 16e-3, 1024: 30e-3, 2048: 60e-3}), CostCurve({1: 0.5e-3, 256: 1.0e-3})
)


def scheduling_cost(sequences: int, k: int = 5, steps: int = 400) -> dict[str, float]:
    """Median microseconds per step: `plan` and `select` (on the device where that is no CPU) and `settle`."""
    rng = np.random.default_rng(0)
    planner = DraftPlanner(sequences, k, varlen=True, costs=COSTS)
    slots, most = np.arange(sequences), np.full(sequences, k)
    for slot in slots:
        planner.open(int(slot))
    spent: dict[str, list[float]] = {"plan": [], "select": [], "settle": []}
    for _ in range(steps):
        chances = rng.beta(3.0, 1.0, (sequences, k)).astype(np.float32)
        survivals = chances.cumprod(1)
        device = torch.from_numpy(survivals)
        begin = time.perf_counter()
        plan = planner.plan(slots, most)
        planned = time.perf_counter()
        lengths = select_lengths(device, torch.from_numpy(plan.caps), plan.budget).numpy()
        selected = time.perf_counter()
        accepted = np.minimum((rng.random((sequences, k)) < chances).cumprod(1).sum(1), lengths)
        accounting = time.perf_counter()
        planner.settle(slots, lengths, accepted, survivals)
        settled = time.perf_counter()
        for name, seconds in zip(spent, (planned - begin, selected - planned, settled - accounting), strict=True):
            spent[name].append(seconds)
    return {name: round(float(np.median(values)) * 1e6, 1) for name, values in spent.items()}


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({sequences: scheduling_cost(sequences) for sequences in (1, 4, 16, 64, 256)}, indent=1))


if __name__ == "__main__":
    main()
