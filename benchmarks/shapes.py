"""The shapes that are timed. The tests run the model at the same ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One step of the engine: `batch` sequences that have `context` tokens each and add `new` tokens each."""

    figure: str
    batch: int
    context: int
    new: int

    @property
    def rows(self) -> int:
        """Tokens that the step computes."""
        return self.batch * self.new

    def __str__(self) -> str:
        return f"{self.batch} x {self.new:,}" if self.new > 1 else f"batch {self.batch}, context {self.context:,}"


def cpu_shapes(prefill: int = 2048, context: int = 512, batches: tuple[int, ...] = (1, 8, 32)) -> list[Shape]:
    """One prompt in one step, and decode steps of several batches."""
    return [Shape("prefill", 1, 0, prefill), *(Shape("decode", batch, context, 1) for batch in batches)]
