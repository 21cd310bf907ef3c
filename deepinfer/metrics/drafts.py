"""How well drafting goes: how many drafts were verified, how many of them were kept, and whether the confidence that
chose them was right (spec/dspark.md 7). The same object for a step, a request, and an engine since its start.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

BINS = 20  # of predicted probability, equal widths


@dataclass(slots=True)
class DraftStats:
    """Counts over rounds. A round is one sequence's part in one decode step: drafts are verified, 0 of them where none
    were at hand, the first of them are kept, and the model's own token follows, unless a draft ended the sequence."""

    rounds: int = 0
    drafted: int = 0
    """Drafts that were verified."""
    accepted: int = 0
    """Of them, those that became output."""
    verified_at: list[int] = field(default_factory=list)
    """[k]: rounds that verified a first draft, a second, ..."""
    accepted_at: list[int] = field(default_factory=list)
    """[k]: rounds that kept it."""
    bin_counts: list[int] = field(default_factory=lambda: [0] * BINS)
    """Verified drafts by the predicted probability that they and all before them are kept."""
    bin_predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Sum of these predictions."""
    bin_accepted: list[int] = field(default_factory=lambda: [0] * BINS)
    """How many of them were kept."""

    @property
    def verify_length(self) -> float:
        """Drafts verified per round."""
        return self.drafted / self.rounds if self.rounds else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per round: the drafts that were kept and the model's own one. 0 without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Kept drafts over verified ones. It rises when fewer are verified, so it says little by itself."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: by how much predictions miss the share of drafts that is kept, over 20 bins."""
        count = sum(self.bin_counts)
        misses = zip(self.bin_predicted, self.bin_accepted, strict=True)
        return sum(abs(predicted - accepted) for predicted, accepted in misses) / count if count else 0.0

    def lengths(self) -> list[int]:
        """[k + 1]: rounds that verified exactly 0, 1, ... drafts."""
        reached = [self.rounds, *self.verified_at, 0]
        return [here - further for here, further in itertools.pairwise(reached)]

    def observe(self, drafted: np.ndarray, accepted: np.ndarray, predicted: np.ndarray) -> None:
        """Takes in rounds: whole numbers [m] each, and float [m, k] predictions, NaN where there is no draft to judge.

        A few operations on arrays, whatever m is.
        """
        count, k = predicted.shape
        if not count:
            return
        columns = np.arange(k)
        judged = ~np.isnan(predicted)
        kept = (columns < accepted[:, None])[judged]
        values = predicted[judged].astype(np.float64)
        bins = np.clip((values * BINS).astype(np.int64), 0, BINS - 1)
        self.rounds += count
        self.drafted += int(drafted.sum())
        self.accepted += int(accepted.sum())
        _add(self.verified_at, (columns < drafted[:, None]).sum(0))
        _add(self.accepted_at, (columns < accepted[:, None]).sum(0))
        _add(self.bin_counts, np.bincount(bins, minlength=BINS))
        _add(self.bin_predicted, np.bincount(bins, values, BINS))
        _add(self.bin_accepted, np.bincount(bins[kept], minlength=BINS))

    def merge(self, other: DraftStats) -> None:
        """Adds what somebody else counted."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        for name in ("verified_at", "accepted_at", "bin_counts", "bin_predicted", "bin_accepted"):
            _add(getattr(self, name), getattr(other, name))


def _add(total: list, more: np.ndarray | list) -> None:
    """total += more, in place and as plain numbers; the shorter one counts as followed by zeros."""
    values = more.tolist() if isinstance(more, np.ndarray) else more
    total += [0] * (len(values) - len(total))
    for at, value in enumerate(values):
        total[at] += value
