"""From the queue to the first token: a sequence takes a slot and blocks, and its known tokens are computed."""

from __future__ import annotations

from collections.abc import Callable, Sized

import numpy as np

from deepinfer.cache import CacheFullError
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.prefix import PrefixHit
from deepinfer.config import BLOCK_SIZE, EngineConfig
from deepinfer.engine.drafting import every_request_is_reproducible
from deepinfer.engine.plan import Admission, Fork, PromptScore
from deepinfer.engine.plan_builder import PlanBuilder
from deepinfer.engine.prefix_planner import PrefixPlanner
from deepinfer.engine.queue_policy import QueuePolicy
from deepinfer.engine.sequence import Sequence, Status
from deepinfer.engine.table import SequenceTable
from deepinfer.speculation.constraint import Constraint


class Prefills:
    """The scheduler says who starts and who goes on; here is what that takes.

    stop_ids: the token ids that end a sequence, asked once when it starts. run: told who has which slot now, and as
    what. running: those that have one.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: CacheManager,
        table: SequenceTable,
        waiting: QueuePolicy,
        prefixes: PrefixPlanner,
        *,
        stop_ids: Callable[[Sequence], set[int]],
        run: Callable[[Sequence, int, Status], None],
        running: Sized,
    ) -> None:
        self.unforked: list[Sequence] = []  # completions that found no room beside their prompt, within one step
        self._config, self._manager, self._table = config, manager, table
        self._waiting, self._prefixes = waiting, prefixes
        self._stop_ids, self._run, self._running = stop_ids, run, running
        self._all_reproducible = every_request_is_reproducible(config.seed, config.batch_invariant)
        self._admitted = (0, 0)  # prompt tokens of sequences that started, and those of them that the cache had

    def take_admitted(self) -> tuple[int, int]:
        """Prompt tokens of the sequences that started since the last call, and those of them that the cache had."""
        admitted, self._admitted = self._admitted, (0, 0)
        return admitted

    def start(
        self, sequence: Sequence, hit: PrefixHit, reserve: int, constraint: Constraint | None, builder: PlanBuilder
    ) -> None:
        """A slot, blocks for `reserve` tokens, and what the cache has of the prompt. constraint: its own."""
        slot = self._manager.open()
        request, table = sequence.request, self._table
        table.occupy(
            slot,
            sequence.token_ids,
            number=request.number,
            index=sequence.index,
            limit=sequence.limit,
            stops=self._stop_ids(sequence),
        )
        table.tenant[slot] = self._waiting.enter(request.tenant)
        if sequence.ticket is not None:
            self._manager.reserve(slot, reserve)
            self._manager.restore(sequence.ticket, slot, sequence.token_ids)
            sequence.ticket = None
            table.start_at(slot, sequence.offloaded, 0)
        else:
            if self._prefixes.enabled and not sequence.scores_prompt:
                self._manager.adopt(slot, hit, sequence.token_ids)
                table.start_at(slot, hit.replay_start, hit.length)
            self._manager.reserve(slot, reserve)
            sequence.hit = hit
        if not sequence.preemptions:
            tokens, cached = self._admitted
            self._admitted = (tokens + sequence.num_known, cached + hit.replay_start)
        builder.admissions.append(
            Admission(
                slot,
                sequence.token_ids,
                len(request.prompt_token_ids),
                request.params,
                sequence.seed,
                limit=sequence.limit,
                reproducible=self._all_reproducible or request.params.seq_seed is not None,
                constraint=constraint,
            )
        )
        self._run(sequence, slot, Status.PREFILL)

    def advance(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """The next chunk of its known tokens; the last one also draws the next token."""
        slot, table, hit = sequence.slot, self._table, sequence.hit
        assert slot is not None
        start, end = int(table.computed[slot]), int(table.prefill_end[slot])
        size = self._chunk_size(sequence, start, end, builder.budget)
        stop = start + size
        scoring = sequence.scores_prompt and sequence.scored < len(sequence.request.prompt_token_ids)
        num_logits = size if scoring else int(stop == end)
        keep_from = max(end - self._config.keep_tokens, hit.replay_start, 0) if self._config.truncation else 0
        first_row = builder.prefill(
            slot,
            start,
            size,
            num_logits,
            window_floor=hit.replay_start if hit.window_entry is None else 0,
            write_from=hit.length,
            keep_from=0 if sequence.scores_prompt else keep_from,
        )
        table.schedule_chunks(np.array([slot]), np.array([start]), np.array([stop]))
        self._waiting.charge_prefill(int(table.tenant[slot]), size)
        if scoring:
            self._score(sequence, start, stop, first_row, builder)
        if stop == end:
            self._end(sequence, first_row + num_logits - 1, builder)

    def _chunk_size(self, sequence: Sequence, start: int, end: int, budget: int) -> int:
        """Up to the budget, and to the next place where a window is to be saved. A chunk that does not end the prompt
        ends at a multiple of 128 where it can: shapes repeat, and no pair of a compressor stays open between chunks."""
        size = min(budget, end - start)
        if self._config.long_prefill_tokens is not None and (len(self._waiting) or len(self._running) > 1):
            size = min(size, self._config.long_prefill_tokens)
        if sequence.scores_prompt:
            size = min(size, self._config.prompt_logprobs_chunk)
        if start + size < end and (whole := (start + size) // BLOCK_SIZE * BLOCK_SIZE) > start:
            size = whole - start
        wanted = [b for b in sequence.boundaries if start < b < start + size]
        return min(wanted) - start if wanted else size

    def _end(self, sequence: Sequence, row: int, builder: PlanBuilder) -> None:
        """All known tokens are scheduled: it draws from this row, and its other completions start from the same."""
        slot = sequence.slot
        assert slot is not None
        self._run(sequence, slot, Status.DECODE)
        self._table.least[slot] += 1
        self._table.total[slot] += 1
        builder.draw(slot, row)
        for child in [s for s in sequence.siblings if s.status is Status.FORKING]:
            try:
                child_slot, edits = self._manager.fork(slot, int(self._table.prefill_end[slot]))
            except CacheFullError:
                self.unforked.append(child)  # it computes the prompt itself: n may be larger than what fits at once
                continue
            self._table.branch(slot, child_slot, child.index)
            child.chain = sequence.chain.copy()
            self._waiting.enter(child.request.tenant)
            builder.fork(Fork(slot, child_slot, child.seed, edits), row)
            self._run(child, child_slot, Status.DECODE)

    def _score(self, sequence: Sequence, start: int, stop: int, first_row: int, builder: PlanBuilder) -> None:
        """Prompt tokens that the chunk's rows predict and that were not scored before. Row i predicts token start + i +
        1; the row at the prompt's end predicts output."""
        prompt = sequence.request.prompt_token_ids
        begin, end = sequence.scored, min(stop + 1, len(prompt))
        if begin < end:
            tokens = np.asarray(prompt[begin:end], np.int64)
            row = first_row + begin - 1 - start
            builder.score(PromptScore(sequence, row, tokens, sequence.params.prompt_logprobs or 0))
            sequence.scored = end
