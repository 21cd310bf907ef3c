"""A histogram of plain numbers: no lock, one bisection per value, so that a step loop can afford it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# spec/serving.md 6.1
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_GAP_SECONDS = (0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)  # 1, 2, 5, ... 1M
# not in the specification
REQUEST_SECONDS = (*FIRST_TOKEN_SECONDS, 120.0, 300.0, 600.0, 1800.0)  # whole answers take longer than first tokens
STEP_SECONDS = (0.0005, 0.001, *TOKEN_GAP_SECONDS)  # a tiny model's step is faster than any token gap worth a bucket
PHASE_SECONDS = (5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 8e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
COMPILE_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)


@dataclass(slots=True)
class Histogram:
    """Counts of values by upper bound (inclusive), one more count for what lies above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """[bounds + 1]: (upper bound as text, values at or below it), the last one "+Inf"."""
        pairs, below = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            pairs.append((bound, below))
        return pairs
