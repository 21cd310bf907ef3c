"""Requests that must be over, or must have begun to answer, by a certain time (spec/engine.md 4.9)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from deepinfer.engine.queue_policy import QueuePolicy
from deepinfer.engine.sequence import Sequence

SMOOTHING = 0.1  # share of the newest step in the estimate of the speed


class Deadlines:
    """Times are seconds on the engine's clock."""

    def __init__(self) -> None:
        self._by_end: list[tuple[float, int]] = []  # heap of (time, request number)
        self._num_first = 0  # waiting sequences with a ttft_deadline, at most
        self._tokens_per_second = math.inf  # until a step was measured nothing is given up

    def add(self, number: int, arrival: float, deadline: float | None, ttft_deadline: float | None) -> None:
        if deadline is not None:
            heapq.heappush(self._by_end, (arrival + deadline, number))
        self._num_first += ttft_deadline is not None

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if tokens and seconds > 0:
            speed = tokens / seconds
            old = self._tokens_per_second
            self._tokens_per_second = speed if math.isinf(old) else old + SMOOTHING * (speed - old)

    def over(self, now: float) -> Iterator[int]:
        """Numbers of requests whose deadline has passed; each comes once."""
        while self._by_end and self._by_end[0][0] <= now:
            yield heapq.heappop(self._by_end)[1]

    def hopeless(self, now: float, waiting: QueuePolicy, arrivals: dict[int, float]) -> list[Sequence]:
        """Waiting sequences whose first token cannot come in time, with the prompts before them to be computed."""
        if not self._num_first:
            return []
        doomed, ahead, seen = [], 0, 0
        for sequence in waiting.candidates(now):
            ahead += sequence.num_known
            limit = sequence.params.ttft_deadline
            if limit is None or sequence.preemptions or sequence.index:
                continue  # no wish, or its computation has begun
            seen += 1
            if now + ahead / self._tokens_per_second > arrivals[sequence.request.number] + limit:
                doomed.append(sequence)
                ahead -= sequence.num_known
        self._num_first = seen - len(doomed)
        return doomed
