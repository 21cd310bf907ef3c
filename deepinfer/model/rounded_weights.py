"""What a model's weights lost when they were laid out for the GPU kernels: nothing, or it is said."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class RoundedWeights:
    """Counts of one model: FP8 values that one factor a row could not hold (`triton/quantize.py`), and FP4 groups of 32
    that lay too far below their row's largest (`triton/experts_layout.py`)."""

    def __init__(self) -> None:
        self.values = self.all_values = self.all_groups = 0
        self._groups: list[Tensor] = []  # on the device: who loads does not wait for each

    def add_values(self, changed: int, count: int) -> None:
        """A dense weight of `count` values."""
        self.values += changed
        self.all_values += count

    def add_groups(self, rounded: Tensor, count: int) -> None:
        """An expert of `count` groups, of which int64 [] were rounded."""
        self._groups.append(rounded)
        self.all_groups += count

    @property
    def groups(self) -> int:
        return int(torch.stack(self._groups).sum()) if self._groups else 0

    def describe(self) -> str | None:
        """One line, None where every weight is the checkpoint's to the bit."""
        groups = self.groups
        parts = [
            f"{count:,} of {whole:,} {name} ({count / whole:.2g} of them)"
            for count, whole, name in (
                (self.values, self.all_values, "FP8 values"),
                (groups, self.all_groups, "FP4 groups of 32"),
            )
            if count
        ]
        if not parts:
            return None
        return f"weights rounded for the GPU kernels, whose rows have one scale: {', '.join(parts)}"

    def tell(self) -> None:
        """A warning, where something was rounded."""
        if (line := self.describe()) is not None:
            logger.warning("%s", line)
