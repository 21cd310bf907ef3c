"""What a step costs, and the number of drafts that pays best at that cost (spec/dspark.md sections 4.1 and 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLAT = 1.02  # a table that rises by less than this, from its first to its last point, tells nothing
Seconds = npt.NDArray[np.float64]


class CostCurve:
    """Seconds by size, never falling.

    points: {size: seconds} as measured. buckets: sizes that steps are padded to (graphs); up to the largest of them a
    step costs what the next bucket costs, and nothing is interpolated across it: what lies between the largest bucket
    and the first point above it costs what that point costs. Elsewhere straight lines; beyond the last point the last
    slope. ValueError: no points, a size below 1, seconds that are not positive numbers.
    """

    def __init__(self, points: Mapping[int, float], buckets: Iterable[int] = ()) -> None:
        if not points:
            raise ValueError("a cost curve needs at least one point")
        self.sizes = np.array(sorted(points), np.int64)
        seconds = np.array([points[int(size)] for size in self.sizes], np.float64)
        if self.sizes[0] < 1 or not np.isfinite(seconds).all() or (seconds <= 0).any():
            raise ValueError("a cost curve holds sizes of at least 1 and positive seconds")
        self.seconds = np.maximum.accumulate(seconds)  # a larger step that measured faster is noise
        self.buckets = np.array(sorted(set(buckets)), np.int64)
        self._table = self._evaluate(np.arange(1))

    @property
    def is_flat(self) -> bool:
        """Whether the curve says nothing about size: to trim by it would be to trim by noise."""
        return bool(self.seconds[-1] < FLAT * self.seconds[0])

    def up_to(self, size: int) -> Seconds:
        """Seconds of the sizes 0 .. size (0 costs as 1). A view of a table that grows when it must: do not write."""
        if size >= len(self._table):
            self._table = self._evaluate(np.arange(max(size + 1, 2 * len(self._table))))
        return self._table[: size + 1]

    def at(self, size: int) -> float:
        return float(self.up_to(size)[size])

    def _evaluate(self, sizes: npt.NDArray[np.int64]) -> Seconds:
        if not self.buckets.size:
            return _lines(sizes, self.sizes, self.seconds)
        limit = self.buckets[-1]
        padded = self.buckets[np.searchsorted(self.buckets, np.minimum(sizes, limit))]
        inside, above = self.sizes <= limit, self.sizes > limit
        steps = _lines(padded, self.sizes[inside], self.seconds[inside]) if inside.any() else np.zeros(len(sizes))
        if not above.any():
            beyond = _lines(sizes, self.sizes, self.seconds)
        else:
            first = self.sizes[above][0]
            beyond = _lines(np.maximum(sizes, first), self.sizes[above], self.seconds[above])
        return np.maximum.accumulate(np.where(sizes <= limit, steps, beyond))


def _lines(at: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], seconds: Seconds) -> Seconds:
    """Straight lines through the points, level before the first, the last slope beyond the last. One point alone
    grows in proportion to the size."""
    if len(sizes) == 1:
        return seconds[0] * np.maximum(at / sizes[0], 1.0)
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return np.interp(at, sizes, seconds) + slope * np.maximum(at - sizes[-1], 0)


@dataclass(frozen=True)
class StepCosts:
    """Measured at start, with the model that serves."""

    verify: CostCurve  # a target pass, by its rows
    draft: CostCurve  # a draft pass, by its sequences

    @property
    def are_flat(self) -> bool:
        return self.verify.is_flat


def choose_budget(
    gains: npt.NDArray[np.floating], samples: int, rows: int, verify: CostCurve, extra_seconds: float
) -> tuple[int, float]:
    """The number of drafts with the best rate of tokens, and that rate in tokens per second.

    gains [K + 1]: tokens that 0 .. K drafts are expected to give; samples: tokens that the step gives without them;
    rows: its rows without them; extra_seconds: what it costs beside the target pass. Of equal rates the fewest drafts.
    """
    rates = gains + float(samples)
    rates = rates / (verify.up_to(rows + len(gains) - 1)[rows:] + extra_seconds)
    best = int(rates.argmax())
    return best, float(rates[best])
