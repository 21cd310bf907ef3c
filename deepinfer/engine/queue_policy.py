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
MANY_TENANTS = 1024  # remembered without hesitation
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

    def enter(self, tenant: str) -> int:
        """A sequence of the tenant runs -> a small number for it, kept in the sequence table: charges are vectors."""

    def leave(self, tenant: int) -> None:
        """It runs no more."""

    def charge_prefill(self, tenant: int, tokens: int) -> None: ...
    def charge_outputs(self, tenants: np.ndarray) -> None:
        """One output token each."""


def _rank(sequence: Sequence) -> tuple[bool, float, int, int]:
    """Within a tenant and priority: a preempted sequence before new work; earlier deadline; arrival."""
    request = sequence.request
    deadline = math.inf if request.params.deadline is None else sequence.arrival + request.params.deadline
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

    def enter(self, tenant: str) -> int:
        return 0

    def leave(self, tenant: int) -> None:
        pass

    def charge_prefill(self, tenant: int, tokens: int) -> None:
        pass

    def charge_outputs(self, tenants: np.ndarray) -> None:
        pass


class FairShare:
    """Priority first, and inside a priority the tenant that has been charged least (spec/engine.md 4.3).

    A tenant pays 1 per prefill token that was computed and 4 per output token, divided by its weight. The level at
    which service stands is that of whoever is being served; a tenant that comes, or comes back, starts there at least,
    so nobody saves up. Who waits long moves up: one priority per AGING_SECONDS. A tenant that neither waits nor runs
    and owes nothing is forgotten.
    """

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, int] = {}
        self._free: list[int] = []  # numbers of forgotten tenants
        self._queues: dict[tuple[int, int], list[Sequence]] = {}  # by tenant and priority; empty ones are dropped
        self._since: dict[Sequence, float] = {}  # waiting since, for aging
        self._new: list[Sequence] = []  # whose time of arrival is noted with the next walk
        self._level = 0.0
        self._charged = np.zeros(16)
        self._inverse_weight = np.ones(16)
        self._held = np.zeros(16, np.int64)  # sequences that wait or run
        self._num_held = 0

    def push(self, sequence: Sequence) -> None:
        tenant = self.enter(sequence.request.tenant)
        place = (tenant, sequence.params.priority)
        bisect.insort(self._queues.setdefault(place, []), sequence, key=_rank)
        self._new.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.request.tenant]
        place = (tenant, sequence.params.priority)
        self._queues[place].remove(sequence)
        if not self._queues[place]:
            del self._queues[place]
        if self._since.pop(sequence, None) is None:
            self._new.remove(sequence)
        self.leave(tenant)

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

    def enter(self, tenant: str) -> int:
        number = self._tenants.get(tenant)
        if number is None:
            number = self._tenants[tenant] = self._new_number()
            self._charged[number] = 0.0
            self._inverse_weight[number] = 1 / self._weights.get(tenant, 1.0)
        if not self._held[number]:
            self._charged[number] = max(self._charged[number], self._level)
        self._held[number] += 1
        self._num_held += 1
        return number

    def leave(self, tenant: int) -> None:
        self._held[tenant] -= 1
        self._num_held -= 1
        if not self._num_held:  # nobody is there who could be treated unfairly: all debts are forgotten
            self._level = float(self._charged.max())

    def _new_number(self) -> int:
        """Numbers are 0, 1, ...: those of self._tenants and those of self._free. Looks for tenants to forget only when
        the arrays would have to grow; from MANY_TENANTS on those go that owe little, too."""
        if not self._free and len(self._tenants) == len(self._charged):
            idle = self._held == 0
            many = len(self._tenants) >= MANY_TENANTS and idle.any()
            limit = max(self._level, float(np.median(self._charged[idle]))) if many else self._level
            idle &= self._charged <= limit
            for name in [name for name, number in self._tenants.items() if idle[number]]:
                self._free.append(self._tenants.pop(name))
        if self._free:
            return self._free.pop()
        if len(self._tenants) == len(self._charged):
            self._charged = np.concatenate((self._charged, np.zeros_like(self._charged)))
            self._inverse_weight = np.concatenate((self._inverse_weight, np.ones_like(self._inverse_weight)))
            self._held = np.concatenate((self._held, np.zeros_like(self._held)))
        return len(self._tenants)

    def charge_prefill(self, tenant: int, tokens: int) -> None:
        self._level = max(self._level, float(self._charged[tenant]))
        self._charged[tenant] += tokens * self._inverse_weight[tenant]

    def charge_outputs(self, tenants: np.ndarray) -> None:
        if len(tenants):
            self._level = max(self._level, float(self._charged[tenants].min()))
            counts = np.bincount(tenants, minlength=len(self._charged))
            self._charged += OUTPUT_WEIGHT * counts * self._inverse_weight


def make_policy(name: str) -> QueuePolicy:
    """By the name of EngineConfig.queue_policy."""
    return {"first-come": FirstCome, "fair": FairShare}[name]()
