"""Builds a step: who computes which tokens. First come, first served, with continuous batching.

There are no phases: every sequence has known tokens and computed tokens, and a step hands out counts until computed
catches up (spec/engine.md 4.1). Three rules keep it free of deadlock:
- a sequence enters only if a slot and the blocks of its whole prompt are free, so a prefill never stops half way;
- when blocks run out in decode, the youngest running sequence gives its up, so the oldest always moves;
- the oldest alone always fits: the door refuses what exceeds max_model_len, and EngineConfig holds one such sequence.
"""

import bisect
from typing import NamedTuple

from deepinfer.cache import Cache, CacheFullError
from deepinfer.config import EngineConfig
from deepinfer.engine.request import Sequence, Status


class ScheduledChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence, whose last `num_logits` rows come back as logits."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    samples: bool  # its last row chooses the sequence's next token


class Scheduler:
    """Owns the queues, the slots and the blocks; knows nothing of tokens' meaning or of time."""

    def __init__(self, config: EngineConfig, cache: Cache) -> None:
        self.config = config
        self.cache = cache
        self.waiting: list[Sequence] = []  # by order: priority, arrival
        self.running: list[Sequence] = []  # by order; each holds a slot
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks, at most max_num_batched_tokens tokens. Empty only if nobody waits or runs."""
        chunks = self._decodes()
        budget = self.config.max_num_batched_tokens - len(chunks)
        for chunk in self._prefills(budget):
            chunks.append(chunk)
            budget -= chunk.num_tokens
        while budget > 0 and (sequence := self._admit()) is not None:
            chunk = self._prefill_chunk(sequence, budget)
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks

    def fork(self, parent: Sequence, children: list[Sequence]) -> list[Sequence]:
        """Gives children of a just computed prompt the parent's blocks; returns those that got a slot.

        The others queue and compute the prompt themselves: n may be larger than what fits at once.
        """
        assert parent.slot is not None
        started = []
        for child in children:
            try:
                child.slot = self.cache.fork(parent.slot)
            except CacheFullError:
                self.add(child)
                continue
            child.num_computed = parent.num_computed
            child.status = Status.DECODE
            bisect.insort(self.running, child, key=lambda s: s.order)
            started.append(child)
        return started

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out of whatever it is in and frees what it holds."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.slot is not None:
            self._release(sequence)
        sequence.status = Status.FINISHED

    def _decodes(self) -> list[ScheduledChunk]:
        chunks = []
        for sequence in list(self.running):  # oldest first: whoever is preempted below was not scheduled yet
            if sequence.status is Status.DECODE and self._grow(sequence):
                chunks.append(ScheduledChunk(sequence, sequence.num_computed, 1, 1, True))
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for one more token, at the expense of the youngest; False if that was the sequence itself."""
        assert sequence.slot is not None
        while True:
            try:
                self.cache.reserve(sequence.slot, sequence.num_computed + 1)
                return True
            except CacheFullError:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, in its old place; prompt and output will be computed again."""
        self._release(sequence)
        self.num_preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.cache.close(sequence.slot)
        sequence.slot = None
        sequence.num_computed = 0

    def _prefills(self, budget: int) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        for sequence in self.running:
            if sequence.status is Status.PREFILL and budget > 0:
                chunks.append(self._prefill_chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        return chunks

    def _admit(self) -> Sequence | None:
        """Starts the head of the queue if a slot and the blocks of all its known tokens are free, else nobody.

        Nobody overtakes the head: a long prompt must not starve behind short ones.
        """
        if not self.waiting or not self.cache.num_free_slots:
            return None
        sequence = self.waiting[0]
        # 1 % of the blocks stay free for the growth of those that run: filling up to the brim only buys preemptions.
        spare = max(1, self.cache.num_blocks // 100) if self.running else 0
        if self.cache.num_free_blocks - self.cache.blocks_for(sequence.num_tokens) < spare:
            return None
        sequence.slot = self.cache.open()
        self.cache.reserve(sequence.slot, sequence.num_tokens)
        del self.waiting[0]
        sequence.status = Status.PREFILL
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        return sequence

    def _prefill_chunk(self, sequence: Sequence, budget: int) -> ScheduledChunk:
        start = sequence.num_computed
        size = min(budget, sequence.num_tokens - start)
        wanted = 0
        if sequence.scores_prompt:
            size = min(size, self.config.prompt_logprobs_chunk)
            wanted = size
        samples = start + size == sequence.num_tokens
        return ScheduledChunk(sequence, start, size, max(wanted, int(samples)), samples)
