"""In which order waiting sequences start. One small object per policy; the scheduler only walks its candidates."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

import numpy as np

from deepinfer.engine.sequence import Sequence

AGING_SECONDS = 30.0  # a waiting sequence moves up one priority for every so many seconds
OUTPUT_WEIGHT = 4  # cost of an output token in prefill tokens (spec/engine.md 4.3)


class QueuePolicy(Protocol):
    """Holds the waiting sequences."""

    def push(self, sequence: Sequence) -> None: ...
    def remove(self, sequence: Sequence) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""

    def candidates(self, now: float) -> Iterator[Sequence]:
        """All of them, in the order in which they should start. Must not be changed while it is walked."""

    def tenant_index(self, tenant: str) -> int:
        """A small number for the tenant, kept in the sequence table so that charges are vectors."""

    def charge_prefill(self, tenant: int, tokens: int) -> None: ...
    def charge_outputs(self, tenants: np.ndarray) -> None:
        """One output token each."""


def _rank(sequence: Sequence) -> tuple[bool, float, int, int]:
    """Within a tenant and priority: a preempted sequence before new work; earlier deadline; arrival."""
    request = sequence.request
    deadline = math.inf if request.params.deadline is None else request.params.deadline - request.age
    return (sequence.preemptions == 0, deadline, request.number, sequence.index)


class FirstCome:
    """Priority, then arrival. A preempted sequence is older than what came after it, so it returns to its place."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._queue, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        at = bisect.bisect_left(self._queue, sequence.order, key=lambda s: s.order)
        assert self._queue[at] is sequence
        del self._queue[at]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def candidates(self, now: float) -> Iterator[Sequence]:
        return iter(self._queue)

    def tenant_index(self, tenant: str) -> int:
        return 0

    def charge_prefill(self, tenant: int, tokens: int) -> None:
        pass

    def charge_outputs(self, tenants: np.ndarray) -> None:
        pass


class FairShare:
    """Priority first, and inside a priority the tenant that has been charged least (spec/engine.md 4.3).

    A tenant pays 1 per prefill token that was computed and 4 per output token, divided by its weight. One that comes
    back after a pause starts at the level of the least charged tenant that is waiting, so nobody saves up. Who waits
    long moves up: one priority per AGING_SECONDS.
    """

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, int] = {}
        self._queues: dict[tuple[int, int], list[Sequence]] = {}  # by tenant and priority; empty ones are dropped
        self._since: dict[Sequence, float] = {}  # waiting since, for aging
        self._new: list[Sequence] = []  # whose time of arrival is noted with the next walk
        self._charged = np.zeros(0)
        self._inverse_weight = np.zeros(0)

    def push(self, sequence: Sequence) -> None:
        tenant = self.tenant_index(sequence.request.tenant)
        waiting = {other for other, _ in self._queues}
        if waiting and tenant not in waiting and not sequence.preemptions:
            self._charged[tenant] = max(self._charged[tenant], min(self._charged[other] for other in waiting))
        bisect.insort(self._queues.setdefault((tenant, sequence.params.priority), []), sequence, key=_rank)
        self._new.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        place = (self.tenant_index(sequence.request.tenant), sequence.params.priority)
        self._queues[place].remove(sequence)
        if not self._queues[place]:
            del self._queues[place]
        if self._since.pop(sequence, None) is None:
            self._new.remove(sequence)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._queues.values())

    def candidates(self, now: float) -> Iterator[Sequence]:
        self._since.update(dict.fromkeys(self._new, now))
        self._new.clear()
        heap = [self._key(place, 0, now) for place in self._queues]
        heapq.heapify(heap)
        while heap:
            *_, place, at = heap[0]
            queue = self._queues[place]
            yield queue[at]
            if at + 1 < len(queue):
                heapq.heapreplace(heap, self._key(place, at + 1, now))
            else:
                heapq.heappop(heap)

    def _key(self, place: tuple[int, int], at: int, now: float) -> tuple:
        sequence = self._queues[place][at]
        risen = int((now - self._since[sequence]) / AGING_SECONDS)
        is_new, *rest = _rank(sequence)
        return (place[1] - risen, is_new, self._charged[place[0]], *rest, place, at)

    def tenant_index(self, tenant: str) -> int:
        if tenant not in self._tenants:
            self._tenants[tenant] = len(self._tenants)
            # a new tenant starts where the least charged one stands
            start = self._charged.min() if len(self._charged) else 0.0
            self._charged = np.append(self._charged, start)
            self._inverse_weight = np.append(self._inverse_weight, 1 / self._weights.get(tenant, 1.0))
        return self._tenants[tenant]

    def charge_prefill(self, tenant: int, tokens: int) -> None:
        self._charged[tenant] += tokens * self._inverse_weight[tenant]

    def charge_outputs(self, tenants: np.ndarray) -> None:
        counts = np.bincount(tenants, minlength=len(self._charged))
        self._charged += OUTPUT_WEIGHT * counts * self._inverse_weight


def make_policy(name: str) -> QueuePolicy:
    """By the name of EngineConfig.queue_policy."""
    return {"first-come": FirstCome, "fair": FairShare}[name]()
