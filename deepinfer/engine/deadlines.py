"""Requests that must be over, or must have begun to answer, by a certain time (spec/engine.md 4.9)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from deepinfer.engine.queue_policy import QueuePolicy
from deepinfer.engine.sequence import Sequence

SMOOTHING = 0.1  # share of a slower step in the estimate of the speed
SPARE = 64  # requests that have ended, beside as many as have not
LOOK_SECONDS = 0.05  # between two looks at who cannot make it


class Deadlines:
    """Times are seconds on the engine's clock. step_tokens: the most that a step computes.

    Giving a request up cannot be taken back, so the estimate of the speed is a hopeful one: it rises at once and falls
    slowly, only steps that prefill count, and of those only large ones, because a small step is slow per token.
    """

    def __init__(self, step_tokens: int) -> None:
        self._by_end: list[tuple[float, int]] = []  # heap of (time, request number), also of requests that have ended
        self._ends: dict[int, float] = {}  # by number, of those that have not
        self._num_first = 0  # waiting sequences with a ttft_deadline, at most
        self._step_tokens = step_tokens
        self._largest = 0  # prefill tokens of the largest step so far
        self._tokens_per_second = 0.0
        self._next_look = -math.inf

    def add(self, number: int, arrival: float, deadline: float | None, ttft_deadline: float | None) -> None:
        if deadline is not None:
            self._ends[number] = arrival + deadline
            heapq.heappush(self._by_end, (arrival + deadline, number))
        if ttft_deadline is not None:
            self._num_first += 1
            self._next_look = -math.inf

    def forget(self, number: int) -> None:
        """The request has ended. A server gives everybody an hour: what ended before that must not be kept so long."""
        self._ends.pop(number, None)
        if len(self._by_end) > 2 * len(self._ends) + SPARE:
            self._by_end = [(end, known) for known, end in self._ends.items()]
            heapq.heapify(self._by_end)

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """A step took so long, with so many rows of prompts in it."""
        if not prefill_tokens or seconds <= 0 or 2 * prefill_tokens < self._largest:
            return
        self._largest = max(self._largest, prefill_tokens)
        speed, old = prefill_tokens / seconds, self._tokens_per_second
        self._tokens_per_second = max(speed, old + SMOOTHING * (speed - old))

    def over(self, now: float) -> Iterator[int]:
        """Numbers of requests whose deadline has passed; each comes once."""
        while self._by_end and self._by_end[0][0] <= now:
            _, number = heapq.heappop(self._by_end)
            if self._ends.pop(number, None) is not None:
                yield number

    def hopeless(
        self, now: float, waiting: QueuePolicy, tokens_to_compute: Callable[[Sequence], int]
    ) -> list[Sequence]:
        """Waiting sequences whose first token cannot come in time, with the prompts before them to be computed. Looked
        for now and then: a look asks the cache about everybody who waits."""
        if not self._num_first or now < self._next_look:
            return []
        self._next_look = now + LOOK_SECONDS
        doomed, ahead, seen = [], 0, 0
        for sequence in waiting.candidates(now):
            own = tokens_to_compute(sequence)
            limit = sequence.params.ttft_deadline
            wishes = limit is not None and not sequence.preemptions and not sequence.index  # else it has begun
            seen += wishes
            if wishes and now + self._seconds(ahead + own) > sequence.arrival + (limit or 0.0):
                doomed.append(sequence)
            else:
                ahead += own
        self._num_first = seen - len(doomed)
        return doomed

    def _seconds(self, tokens: int) -> float:
        """How long so many prompt tokens take at least; 0 while no step was large enough to tell."""
        known = 2 * self._largest >= min(tokens, self._step_tokens)
        return tokens / self._tokens_per_second if known and self._tokens_per_second else 0.0
