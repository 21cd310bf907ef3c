"""Lightning indexer on a GPU: from queries and paged keys to the entries that every row of a step attends to.

A step makes one plan per ratio (`plan_step`), and one more for layers that choose inside candidate blocks; all index
sources use it. Nothing here waits for the device, and shapes depend on shapes alone: a captured graph serves any
lengths up to `max_entries`. A row's result is the same bits in any company.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.triton.index_keys import DIM, HEADS, IndexQueries, index_queries, insert_keys
from deepinfer.kernels.triton.index_plan import MOST_ROWS, IndexPlan, plan_rows
from deepinfer.kernels.triton.index_scores import gathered_scores, paged_scores, score_memory
from deepinfer.kernels.triton.index_select import BLOCK_ENTRIES, select_candidates, select_entries

__all__ = ["IndexQueries", "StepPlan", "choose_entries", "index_queries", "insert_keys", "plan_step", "serves"]

StepPlan = tuple[IndexPlan, ...]
"""Plans of rows 0 .. 4,095, 4,096 .. 8,191 and so on."""

SCORE_BYTES = 512 << 20  # of scores at once: 64 rows of 1M entries, or 4,096 of 32K, in one pass


def serves(heads: int, dim: int, topk: int, block_size: int) -> bool:
    """Whether these kernels serve an indexer of this shape; block_size: of candidates, 0 = there are none."""
    return (heads, dim) == (HEADS, DIM) and topk >= 16 and topk & (topk - 1) == 0 and block_size in (0, BLOCK_ENTRIES)


def plan_step(
    positions: Tensor,
    slots: Tensor,
    starts: Tensor,
    *,
    chunks: int,
    ratio: int,
    topk: int,
    max_entries: int,
    candidate_blocks: int | None = None,
    score_bytes: int = SCORE_BYTES,
) -> StepPlan:
    """positions, slots, starts int [N] (`starts`: position of the first row of the row's chunk), rows of a chunk next
    to each other. chunks: chunks that the step has room for. max_entries: no row sees more entries, by the shape of the
    tables or because the host knows. candidate_blocks: blocks of 8 that rows choose from, None = from all they see.
    score_bytes: memory for scores; rows beyond it wait for their turn (`index_plan`).
    """
    return tuple(
        plan_rows(
            positions[first : first + MOST_ROWS],
            slots[first : first + MOST_ROWS],
            starts[first : first + MOST_ROWS],
            chunks=chunks,
            ratio=ratio,
            topk=topk,
            max_entries=max_entries,
            candidate_blocks=candidate_blocks,
            memory=score_bytes,
        )
        for first in range(0, len(positions), MOST_ROWS)
    )


def choose_entries(
    queries: IndexQueries,
    pool: Tensor,
    tables: Tensor,
    per_block: int,
    plans: StepPlan,
    *,
    publish: int = 0,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The best entries of every row -> int32 [N, topk], ascending, -1 = empty; all it sees where those are no more.

    queries: of `index_queries`, N rows. pool uint8 [pool rows, 68]: keys as `insert_keys` writes them. tables int
    [slots, blocks]: block of every `per_block` entries; blocks behind a sequence's end are not looked at. publish: also
    choose this many candidate blocks of 8 entries -> int32 [N, publish], ascending, -1 = empty. candidates: choose
    inside these blocks, such a tensor; `plans` must have been made for as many.
    """
    n, device = len(queries.codes), pool.device
    entries = torch.empty((n, plans[0].topk), dtype=torch.int32, device=device)
    blocks = torch.empty((n, publish), dtype=torch.int32, device=device) if publish else None
    if (candidates is not None) != plans[0].inside:
        raise ValueError("candidates go with a plan made for them, and only with such a one")
    memory = score_memory(max(plans, key=lambda plan: plan.units))
    for part, plan in enumerate(plans):
        rows = slice(part * MOST_ROWS, min((part + 1) * MOST_ROWS, n))
        codes, weights = queries.codes[rows], queries.weights[rows]
        offered = None if candidates is None else candidates[rows]
        for number in range(plan.passes):
            if offered is None or not plan.gathered:
                paged_scores(codes, weights, pool, tables, per_block, plan, number, memory)
            else:
                gathered_scores(codes, weights, pool, tables, per_block, offered, plan, number, memory)
            select_entries(memory, plan, number, entries[rows], offered)
            if blocks is not None:
                select_candidates(memory, plan, number, blocks[rows])
    return entries, blocks
