"""The whole choice at the released model's shapes against the reference operations from end to end: equal indices.

Keys and queries hold -1, 0 and 1, head weights quarters: every product and sum is exact in float32 and in the tensor
core, whatever the order. So scores are equal, and most of them are equal to others: ties decide nearly every row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twins import DEVICE

from deepinfer.kernels.reference import indexer, selection
from deepinfer.kernels.triton import index_keys
from deepinfer.kernels.triton.indexer import choose_entries, index_queries, plan_step

CUDA = DEVICE.type == "cuda"
TOPK, CANDIDATES = (512, 2048) if CUDA else (16, 32)
EDGES = [0, 1, 511, 512, 513, 8191, 8192, 8193, 16383, 16384, 16385, 32767, 32768, 32769, 131071, 131072]
LENGTHS = EDGES if CUDA else [0, 17, 257]
FEW = [length for length in LENGTHS if length <= 3 * 8 * CANDIDATES]  # rows that share keys score all of these
KINDS: dict[str, tuple[int, list[int]]] = (
    {"decode": (1, LENGTHS), "verify": (6, LENGTHS), "verify, few": (6, FEW), "prefill": (13, LENGTHS)}
    if CUDA
    else {"decode": (1, LENGTHS), "verify, few": (3, FEW)}
)
PAGES = [(kind, per_block) for kind in KINDS for per_block in ((128, 64) if CUDA else (64,))]


def small(*shape: int, share: float) -> Tensor:
    """-1, 0 or 1, the first of these and the last each with half the share."""
    chance = torch.rand(*shape, device=DEVICE)
    return (chance < share / 2).float() - (chance > 1 - share / 2).float()


class Sources:
    """Two index sources over one sequence a length; the rows of a chunk end with the one that sees `length` entries."""

    def __init__(self, rows: int, lengths: list[int], per_block: int) -> None:
        ratio = 128 // per_block
        self.per_block, self.ratio, self.chunks = per_block, ratio, len(lengths)
        ends = torch.tensor(lengths) * ratio - int(ratio == 1)  # a position that sees so many: (p + 1) // ratio
        firsts = (ends - rows + 1).clamp_min(0)
        self.positions = torch.cat([torch.arange(a, b + 1) for a, b in zip(firsts, ends.clamp_min(0), strict=True)])
        counts = ends.clamp_min(0) - firsts + 1
        self.slots = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        self.starts = firsts[self.slots].to(DEVICE)
        self.positions, self.slots = self.positions.to(DEVICE), self.slots.to(DEVICE)
        self.seen = (self.positions + 1) // ratio
        self.most = int(self.seen.max())
        blocks = -(-self.most // per_block)
        self.tables = (torch.randperm(len(lengths) * blocks, device=DEVICE) + 1).view(len(lengths), blocks)
        self.keys, self.pools = [], []
        for share in (0.05, 0.3):
            keys = small(blocks * per_block, 128, share=share).bfloat16()
            pool = torch.full(
                ((len(lengths) * blocks + 1) * per_block, index_keys.KEY_BYTES), 255, dtype=torch.uint8, device=DEVICE
            )
            number = torch.arange(len(keys), device=DEVICE)
            for slot, length in enumerate(lengths):  # the same keys for all, each as far as its sequence goes
                places = self.tables[slot][number // per_block] * per_block + number % per_block
                index_keys.insert_keys(keys[:length], pool, places[:length], per_block)
            self.keys.append(keys.float())
            self.pools.append(pool)
        n = len(self.positions)
        flat = torch.ones(n, 32, device=DEVICE), torch.zeros(n, 32, device=DEVICE)
        self.q = [small(n, 32, 128, share=0.5) for _ in self.keys]
        self.weights = [torch.randint(-8, 9, (n, 32), device=DEVICE) / 4 for _ in self.keys]
        self.queries = [index_queries(q.bfloat16(), w, *flat) for q, w in zip(self.q, self.weights, strict=True)]

    def choose(self, source: int, candidates: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        plans = plan_step(
            self.positions, self.slots, self.starts, chunks=self.chunks, ratio=self.ratio, topk=TOPK,
            max_entries=self.most, candidate_blocks=None if candidates is None else CANDIDATES,
        )  # fmt: skip
        return choose_entries(
            self.queries[source], self.pools[source], self.tables, self.per_block, plans,
            publish=CANDIDATES if candidates is None else 0, candidates=candidates,
        )  # fmt: skip

    def scores(self, source: int, row: int) -> Tensor:
        """The reference's, float32 [1, entries that the row sees]."""
        keys, one = self.keys[source][: self.seen[row]], slice(row, row + 1)
        return indexer.index_scores(self.q[source][one, None], keys[None], self.weights[source][one, None])[0]


@pytest.mark.parametrize(("kind", "per_block"), PAGES)
def test_the_choice_equals_the_reference_from_end_to_end(kind: str, per_block: int) -> None:
    torch.manual_seed(per_block)
    step = Sources(*KINDS[kind], per_block)
    entries, blocks = step.choose(0)
    assert blocks is not None
    inside, nothing = step.choose(1, blocks)
    assert nothing is None
    for row, seen in enumerate(step.seen.tolist()):
        if seen == 0:
            assert (entries[row] == -1).all() and (inside[row] == -1).all() and (blocks[row] == -1).all()
            continue
        scores = step.scores(0, row)
        assert torch.equal(entries[row].long(), selection.top_entries(scores, TOPK)[0])
        mask = selection.candidate_mask(scores, step.seen[row : row + 1], block_size=8, topk_blocks=CANDIDATES)
        held = torch.zeros(-(-seen // 8), dtype=torch.bool, device=DEVICE)
        held[blocks[row][blocks[row] >= 0].long()] = True
        assert torch.equal(held.repeat_interleave(8)[:seen], mask[0])
        own = step.scores(1, row).masked_fill(~mask, float("-inf"))
        assert torch.equal(inside[row].long(), selection.top_entries(own, TOPK)[0])
