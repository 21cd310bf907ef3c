"""The line that a running engine writes each N steps, for a person who watches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from deepinfer.metrics.drafts import DraftStats
from deepinfer.metrics.stats import StepStats


class LogLine:
    """Sums up the steps since the last line. every: steps per line, 0 = never. clock: seconds, monotonic."""

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = every
        self._clock = clock
        self._step = 0
        self._start_interval()

    def _start_interval(self) -> None:
        self._since = self._clock()
        self._prefill = self._decode = self._queries = self._hits = self._preempted = self._steps = 0
        self._busy = self._idle = 0.0
        self._drafts = DraftStats()

    def observe(self, step: StepStats) -> str | None:
        """Takes in one step; returns the line when it is due. Steps that computed nothing are not counted."""
        if not self.every or step.kind == "empty":
            return None
        if not self._steps:
            # the first step of an interval began `seconds` ago; a pause without work before it is nobody's slowness
            self._since = max(self._since, self._clock() - step.seconds)
        self._step += 1
        self._steps += 1
        self._prefill += step.prefill_tokens + step.replay_tokens
        self._decode += step.decode_tokens
        if step.drafts is not None:
            self._decode += step.drafts.accepted
            self._drafts.merge(step.drafts)
        self._queries += step.prefix_queries
        self._hits += step.prefix_hits
        self._preempted += step.preemptions_recompute + step.preemptions_offload
        self._busy += step.device_seconds
        self._idle += step.idle_seconds
        if self._step % self.every:
            return None
        line = self._line(step)
        self._start_interval()
        return line

    def _line(self, step: StepStats) -> str:
        seconds = self._clock() - self._since
        return " | ".join(
            (
                f"step {self._step}",
                f"running {step.running}, waiting {step.waiting}",
                f"prefill {_rate(self._prefill, seconds)}, decode {_rate(self._decode, seconds)} tokens/s",
                f"cache {_share(step.blocks_used, step.blocks_total)} used, {_share(self._hits, self._queries)} hits",
                f"preempted {self._preempted}",
                f"device idle {_share(self._idle, self._busy + self._idle)}",
                *self._drafting(),
            )
        )

    def _drafting(self) -> Iterator[str]:
        drafts = self._drafts
        if drafts.rounds:
            yield (
                f"drafts: {drafts.verify_length:.2f} verified, {drafts.accept_length:.2f} tokens per round, "
                f"{_share(drafts.accepted, drafts.drafted)} accepted"
            )


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds > 0 else "-"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
