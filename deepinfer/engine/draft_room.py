"""How many drafts the decodes of a step may verify: their limits, the budget of tokens and the blocks say how many they
may, the planner (speculation/planner.py) says within that how many they should.

Drafts come last. A sequence never loses its blocks so that another one verifies more, and a prefill that could run gets
a block of tokens in every step.
"""

from __future__ import annotations

import numpy as np

from deepinfer.cache import CacheFullError
from deepinfer.cache.manager import CacheManager
from deepinfer.config import BLOCK_SIZE
from deepinfer.engine.plan_builder import PlanBuilder
from deepinfer.engine.table import SequenceTable
from deepinfer.speculation.planner import DraftPlanner


class DraftRoom:
    """drafts: of one sequence in one step, at most."""

    def __init__(self, drafts: int, manager: CacheManager, table: SequenceTable, planner: DraftPlanner) -> None:
        self._drafts = drafts
        self._manager = manager
        self._table = table
        self._planner = planner

    def hold(self, builder: PlanBuilder, prefill_tokens: int) -> tuple[np.ndarray, int]:
        """Sets tokens of the budget aside, before prefills get the rest -> what `fill` needs to know.

        prefill_tokens: that prefills could compute in this step. Of these a block goes before all drafts.
        """
        slots, table = builder.decode_slots, self._table
        # A step in flight adds a token at least. Drafts beyond the limit would be of no use.
        most = np.minimum(table.limit[slots] - table.least[slots] - 1, self._drafts)
        held = max(0, min(int(most.sum()), builder.budget - min(prefill_tokens, BLOCK_SIZE)))
        builder.budget -= held
        return most, held

    def fill(self, builder: PlanBuilder, most: np.ndarray, held: int) -> np.ndarray:
        """The rest is in the plan -> drafts of each decode at most, int64 [decodes]; there are blocks for them."""
        plan = self._planner.plan(
            builder.decode_slots,
            most,
            other_rows=builder.num_prefill_tokens,
            other_samples=builder.num_other_draws,
            room=held + builder.budget,
        )
        caps = self._reserve(builder.decode_slots, np.minimum(plan.caps, most))
        builder.draft(caps, plan.budget, plan.propose)
        return caps

    def _reserve(self, slots: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Blocks for the rows, where some are free; else no more drafts than the slot's blocks hold."""
        table, capacity = self._table, self._manager.capacity
        ends = np.minimum(table.total[slots] + caps, table.limit[slots])
        for at in (ends > capacity[slots]).nonzero()[0].tolist():
            slot = int(slots[at])
            try:
                self._manager.reserve(slot, int(ends[at]))
            except CacheFullError:
                caps[at] = capacity[slot] - table.total[slot]
        return caps
