"""Lightning indexer at the released model's shapes, for `kernels.py`: logits and the exact choice, in one figure.

Keys of own requests come from memory (64 x 131,072 entries are 570 MB). Checked: logits of some rows against the
float64 product of the stored codes, and choices against the reference's on the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_cases import KernelCase, Prepared
from torch import Tensor

from deepinfer.kernels.reference import paging, selection
from deepinfer.kernels.triton import index_keys, indexer
from deepinfer.kernels.triton.index_plan import PLACE, UNIT
from deepinfer.kernels.triton.index_scores import paged_scores, score_memory
from deepinfer.kernels.triton.indexer import IndexQueries, StepPlan

HEADS, DIM, TOPK, CANDIDATES = 32, 128, 512, 2048
TOLERANCE = 1e-6  # of logits: float32 sums
FLOPS = 2 * HEADS * DIM  # a query and a key
FLOOR_US = 55.7  # 64 queries, 131,072 keys at 1,233 TFLOP/s


@dataclass
class Request:
    """`rows` rows behind `context` entries in each of `requests` sequences; tables with room for `room` entries."""

    requests: int
    rows: int
    context: int
    device: torch.device
    per_block: int = 128
    room: int = 0

    def __post_init__(self) -> None:
        ratio = 128 // self.per_block
        blocks = -(-self.context // self.per_block)
        total = self.requests * blocks
        self.pool = torch.zeros(
            (total + 1) * self.per_block, index_keys.KEY_BYTES, dtype=torch.uint8, device=self.device
        )
        sizes = torch.exp(0.5 * torch.randn(4, device=self.device)).repeat_interleave(32)
        for first in range(self.per_block, len(self.pool), 1 << 20):
            places = torch.arange(first, min(first + (1 << 20), len(self.pool)), device=self.device)
            keys = (torch.randn(len(places), DIM, device=self.device) * sizes).bfloat16()
            index_keys.insert_keys(keys, self.pool, places, self.per_block)
        room = max(self.room, self.context)
        self.tables = torch.zeros(self.requests, -(-room // self.per_block), dtype=torch.int64, device=self.device)
        self.tables[:, :blocks] = (torch.randperm(total, device=self.device) + 1).view(self.requests, blocks)
        n = self.requests * self.rows
        row = torch.arange(n, device=self.device)
        self.slots = row // self.rows
        self.starts = torch.full_like(row, self.context * ratio - self.rows)
        self.positions = self.starts + row % self.rows
        self.most, self.ratio = room, ratio
        angles = 100 * torch.rand(n, 32, device=self.device)
        self.queries = index_keys.index_queries(
            torch.randn(n, HEADS * DIM, device=self.device).bfloat16(),
            torch.randn(n, HEADS, device=self.device),
            angles.cos(),
            angles.sin(),
            scale=DIM**-0.5 * HEADS**-0.5,
        )

    def plan(self, candidates: int | None = None) -> StepPlan:
        return indexer.plan_step(
            self.positions, self.slots, self.starts, chunks=self.requests, ratio=self.ratio, topk=TOPK,
            max_entries=self.most, candidate_blocks=candidates,
        )  # fmt: skip

    def choose(
        self, plans: StepPlan, publish: int = 0, candidates: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return indexer.choose_entries(
            self.queries, self.pool, self.tables, self.per_block, plans, publish=publish, candidates=candidates
        )

    def scores(self, row: int) -> Tensor:
        """The kernel's logits of the entries that a row sees."""
        one = slice(row, row + 1)
        plans = indexer.plan_step(
            self.positions[one], self.slots[one], self.positions[one], chunks=1, ratio=self.ratio, topk=TOPK,
            max_entries=self.most,
        )  # fmt: skip
        memory = score_memory(plans[0]).fill_(float("nan"))
        alone = IndexQueries(self.queries.codes[one], self.queries.weights[one])
        paged_scores(*alone, self.pool, self.tables, self.per_block, plans[0], 0, memory)
        place = int(plans[0].field(PLACE)[0]) * UNIT
        return memory[place : place + self.seen(row)]

    def seen(self, row: int) -> int:
        return (int(self.positions[row]) + 1) // self.ratio

    def check(self, publish: int = 0, inside: bool = False) -> float:
        """The worst error of four rows' logits; 1.0 where a choice differs from the reference's on these logits."""
        blocks = self.choose(self.plan(), publish=CANDIDATES)[1] if inside else None
        entries, published = self.choose(self.plan(CANDIDATES if inside else None), publish, blocks)
        worst = 0.0
        n = len(self.positions)
        for row in {0, n // 3, n // 2 + 1, n - 1} & set(range(n)):
            seen, scores = self.seen(row), self.scores(row)
            some = slice(max(0, seen - 16384), seen)
            places = paging.block_rows(self.tables, self.slots[row : row + 1], seen, self.per_block)[0, some]
            keys = index_keys.unpack_keys(index_keys.key_rows(self.pool, places, self.per_block)).double()
            dots = (index_keys.query_values(self.queries.codes[row]).double() @ keys.t()).relu()
            expected = (dots * self.queries.weights[row].double().unsqueeze(1)).sum(0)
            worst = max(worst, float((scores[some].double() - expected).norm() / expected.norm()))
            visible = torch.tensor([seen], device=self.device)
            offered = scores
            if inside or publish:
                mask = selection.candidate_mask(scores[None], visible, block_size=8, topk_blocks=CANDIDATES)[0]
                kept = blocks if published is None else published
                assert kept is not None
                held = torch.zeros(-(-seen // 8), dtype=torch.bool, device=self.device)
                held[kept[row][kept[row] >= 0].long()] = True
                if not torch.equal(held.repeat_interleave(8)[:seen], mask):
                    return 1.0
                offered = scores.masked_fill(~mask, float("-inf")) if inside else scores
            if not torch.equal(selection.top_entries(offered[None], TOPK)[0], entries[row].long()):
                return 1.0
        return worst


def choice_case(
    name: str, requests: int, rows: int, context: int, target: float | None, *, per_block: int = 128, room: int = 0,
    publish: int = 0, inside: bool = False, note: str = "",
) -> KernelCase:  # fmt: skip
    n = requests * rows
    scored = min(context, 8 * CANDIDATES) if inside else context
    keys = min(n * scored if inside else requests * scored, requests * context) * index_keys.KEY_BYTES

    def make(device: torch.device) -> Prepared:
        request = Request(requests, rows, context, device, per_block, room)
        plans = request.plan(CANDIDATES if inside else None)
        blocks = request.choose(request.plan(), publish=CANDIDATES)[1] if inside else None
        return Prepared(
            lambda copy: request.choose(plans, publish, blocks),
            check=lambda: request.check(publish, inside),
            tolerance=TOLERANCE,
        )

    return KernelCase(
        name=f"indexer, {name}",
        area="indexer",
        shape={"queries": n, "requests": requests, "entries": context, "scored": scored},
        make=make,
        bytes=keys + n * (HEADS * DIM + 4 * HEADS + 4 * TOPK),
        flops=FLOPS * n * scored,
        rate="fp8",
        target_us=target,
        note=note,
    )


def row_case(name: str, rows: int, nbytes: int, keys: bool) -> KernelCase:
    def make(device: torch.device) -> Prepared:
        angles = torch.rand(rows, 32, device=device)
        if keys:
            pool = torch.zeros(1 << 16, index_keys.KEY_BYTES, dtype=torch.uint8, device=device)
            places = torch.randperm(len(pool), device=device)[:rows]
            x = torch.randn(rows, DIM, device=device).bfloat16()

            def check() -> float:
                index_keys.insert_keys(x, pool.fill_(255), places, 128)
                return float(not torch.equal(index_keys.key_rows(pool, places, 128), index_keys.pack_keys(x)))

            return Prepared(lambda copy: index_keys.insert_keys(x, pool, places, 128), check=check, tolerance=0.0)
        q = torch.randn(rows, HEADS * DIM, device=device).bfloat16()
        weights, cos, sin = torch.randn(rows, HEADS, device=device), angles.cos(), angles.sin()
        return Prepared(lambda copy: index_keys.index_queries(q, weights, cos, sin))

    return KernelCase(name=f"indexer, {name}", area="indexer", shape={"rows": rows}, make=make, bytes=rows * nbytes)


def cases() -> list[KernelCase]:
    many = 131072
    return [
        choice_case("64 requests, own 131,072 entries", 64, 1, many, 185.0),
        choice_case("64 queries, shared 131,072 entries", 1, 64, many, 1.4 * FLOOR_US + 35),
        choice_case("64 queries, shared 1,048,576 entries", 1, 64, 8 * many, 8 * 1.4 * FLOOR_US + 35),
        choice_case("64 queries inside 2,048 candidate blocks", 64, 1, many, 60.0, inside=True),
        choice_case("64 x 6 rows inside candidates of 32,768 entries", 64, 6, many // 4, None, inside=True),
        choice_case("64 requests, 131,072 entries, and candidates", 64, 1, many, None, publish=CANDIDATES),
        choice_case("64 requests x 6 rows, own 131,072 entries", 64, 6, many, None),
        choice_case("64 requests x 6 rows, own 32,768 entries", 64, 6, many // 4, None),
        choice_case("64 x 6 rows, 16,384 entries of ratio 2", 64, 6, many // 8, None, per_block=64),
        choice_case("64 requests, 10,240 entries, room for 1,048,576", 64, 1, 10240, None, room=8 * many),
        choice_case("prefill of 2,048 rows behind 32,768 entries", 1, 2048, many // 4, None),
        row_case("queries of 64 rows", 64, HEADS * DIM * 3, keys=False),
        row_case("queries of 4,096 rows", 4096, HEADS * DIM * 3, keys=False),
        row_case("keys of 64 entries", 64, DIM * 2 + 68, keys=True),
        row_case("keys of 4,096 entries", 4096, DIM * 2 + 68, keys=True),
    ]
