"""Which program scores what: the work of an index source, laid out on the device from the rows' positions.

Rows of a chunk that follow each other are scored in groups of up to `width`, which share the loads of their keys. A
group's keys are cut into units of 128 entries; every unit has a cost, and programs take equal shares of the running
sum of costs, so they end together whatever the lengths are, and a graph captured for a million entries only works for
those that there are. Each row gets a place for its scores. Where all rows' scores do not fit into the given memory,
groups are dealt out to `passes` that use the same memory one after the other; how many passes there can be depends on
shapes only, and a pass that nobody needs costs an empty launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import launch

UNIT = 128  # entries; the scores' smallest piece of work
STORED = 4  # a row's scores take multiples of this many units, so that maxima of 512 entries have places of their own
TOGETHER, SHARED = 6, 4  # rows of a group: a token and five drafts; of a long chunk
WHOLE = 2.5  # times as many entries as candidates: up to here, groups of rows score them all and share their keys
MOST_ROWS = 4096  # rows of one plan; the kernel holds them in one program

# Rows of `IndexPlan.rows`.
VISIBLE = tl.constexpr(0)  # entries that the row may see; of a gathered plan: that it is offered
SLOT = tl.constexpr(1)
COUNT = tl.constexpr(2)  # rows of the group that starts here, 0 = the row belongs to one before it
UNITS = tl.constexpr(3)  # of the group
PLACE = tl.constexpr(4)  # where the row's scores lie, in units
COST_END = tl.constexpr(5)  # running sum of costs behind the row
PASS = tl.constexpr(6)
SEEN = tl.constexpr(7)  # entries that the row may see, also in a gathered plan
FIELDS = 8
HEADER = tl.constexpr(4)  # numbers 0, 4, 8, 12, then where each pass begins in the running sum, and its end


@dataclass(frozen=True)
class IndexPlan:
    """rows int32 [8, N] and header int32 [4 + passes + 1], as the constants above say. width: rows of a group at most
    (1, 4 or 6). units: capacity of the scores' memory. inside: rows choose from candidate blocks. gathered: and have
    scores of those alone. offered: entries that a row has scores of at most."""

    rows: Tensor
    header: Tensor
    width: int
    passes: int
    units: int
    inside: bool
    gathered: bool
    offered: int
    topk: int

    def field(self, which: tl.constexpr) -> Tensor:
        """One of the constants above for every row, int32 [N]."""
        return self.rows[which.value]


def plan_rows(
    positions: Tensor,
    slots: Tensor,
    starts: Tensor,
    *,
    chunks: int,
    ratio: int,
    topk: int,
    max_entries: int,
    candidate_blocks: int | None = None,
    memory: int = 512 << 20,
) -> IndexPlan:
    """positions, slots, starts int [N], N <= 4,096: position of each row, slot of its sequence, position of its chunk's
    first row. chunks: how many chunks there are room for; with as many as rows, every row is a group of its own.
    max_entries: no row sees more. candidate_blocks: how many blocks of 8 entries each row chooses from, where it does
    not choose from everything. memory: bytes that scores may take (more where one group needs more).
    """
    n = positions.shape[0]
    if not 0 < n <= MOST_ROWS:
        raise ValueError(f"an index plan takes 1 to {MOST_ROWS} rows, not {n}")
    inside = candidate_blocks is not None
    together = chunks < n
    gathered = candidate_blocks is not None and not (together and max_entries <= WHOLE * 8 * candidate_blocks)
    offered = min(max_entries, 8 * (candidate_blocks or 0)) if gathered else max_entries
    width = 1 if gathered or not together else SHARED if n > 16 * chunks else TOGETHER
    row_units = triton.cdiv(triton.cdiv(offered, UNIT), STORED) * STORED
    share = max(memory // (UNIT * 4), width * row_units)  # units of one pass, before the group that crosses its end
    passes = max(1, triton.cdiv(n * row_units, share))  # rows that see nothing are told so, too
    units = n * row_units if passes == 1 else share + width * row_units
    rows = torch.empty((FIELDS, n), dtype=torch.int32, device=positions.device)
    header = torch.empty(HEADER.value + passes + 1, dtype=torch.int32, device=positions.device)
    launch(
        _plan,
        (1,),
        positions,
        slots,
        starts,
        rows,
        header,
        n,
        share,
        topk,
        max_entries,
        8 * (candidate_blocks or 0),
        RATIO=ratio,
        WIDTH=width,
        PASSES=passes,
        GATHERED=gathered,
        BLOCK=triton.next_power_of_2(max(n, 16)),
        num_warps=4 if n <= 512 else 16,
    )
    return IndexPlan(rows, header, width, passes, units, inside, gathered, offered, topk)


@triton.jit
def _plan(
    positions, slots, starts, rows, header, n, share, topk, limit, offer,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, PASSES: tl.constexpr, GATHERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK)
    real = r < n
    position = tl.load(positions + r, mask=real, other=0).to(tl.int32)
    slot = tl.load(slots + r, mask=real, other=0).to(tl.int32)
    place = position - tl.load(starts + r, mask=real, other=0).to(tl.int32)  # in the chunk
    seen = tl.where(real, tl.minimum((position + 1) // RATIO, limit), 0)  # never more than there is memory for
    visible = seen
    if GATHERED:
        visible = tl.minimum((seen + 7) // 8 * 8, offer)
    k = tl.minimum(place % WIDTH, r)  # number of the row in its group; a plan may begin inside one
    count = real.to(tl.int32)
    most = visible
    for d in tl.static_range(1, WIDTH):
        other = r + d
        inside = (other < n) & (place % WIDTH + d < WIDTH)
        their_position = tl.load(positions + other, mask=inside, other=-1).to(tl.int32)
        their_slot = tl.load(slots + other, mask=inside, other=-1).to(tl.int32)
        their_place = their_position - tl.load(starts + other, mask=inside, other=0).to(tl.int32)
        same = inside & (their_slot == slot) & (their_place == place + d)
        count += same.to(tl.int32)
        most = tl.where(same, tl.minimum((their_position + 1) // RATIO, limit), most)
    units = tl.where(most > topk, (most + 127) // 128, 0)  # all are chosen where there are no more: no scores
    stored = (units + 3) // 4 * 4
    begin = tl.cumsum(stored, 0) - stored - k * stored  # of the group
    leader = (k == 0) & real
    count = tl.where(leader, count, 0)
    unit_cost = 1
    if WIDTH > 1:
        unit_cost = 2 + (count > 2).to(tl.int32) + (count > 4).to(tl.int32)
    cost = tl.where(leader, units * unit_cost, 0)
    number = begin // share
    row = rows + r
    tl.store(row + VISIBLE * n, visible, mask=real)
    tl.store(row + SLOT * n, slot, mask=real)
    tl.store(row + COUNT * n, count, mask=real)
    tl.store(row + UNITS * n, units, mask=real)
    tl.store(row + PLACE * n, begin - number * share + k * stored, mask=real)
    tl.store(row + COST_END * n, tl.cumsum(cost, 0), mask=real)
    tl.store(row + PASS * n, number, mask=real)
    tl.store(row + SEEN * n, seen, mask=real)
    tl.store(header + tl.arange(0, 4), 4 * tl.arange(0, 4))
    for p in tl.static_range(PASSES + 1):
        tl.store(header + HEADER + p, tl.sum(tl.where(number < p, cost, 0), 0))
