"""Index keys, queries, scores and the whole choice against the reference operations.

Scores: relative error below TOLERANCE against float64 of the stored codes (float32 sums). Records, choices and repeats
are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from twins import DEVICE, poisoned, relative_error

from deepinfer.kernels.reference import paging, quant, rope, selection
from deepinfer.kernels.triton import index_keys
from deepinfer.kernels.triton.index_plan import PASS, PLACE, SEEN, UNIT, UNITS, IndexPlan
from deepinfer.kernels.triton.index_scores import gathered_scores, paged_scores, score_memory
from deepinfer.kernels.triton.indexer import IndexQueries, choose_entries, plan_step, serves

CUDA = DEVICE.type == "cuda"
# Over all rows of a prefill 3.4e-6 was seen on an H200, 6e-8 in decode: it looks as if sums of FP8 products on tensor
# cores kept fewer bits than float32 where the scales of a key's groups lie far apart.
TOLERANCE = 1e-5 if CUDA else 1e-6
TOPK = 16


def uneven(*shape: int, octaves: int = 5) -> Tensor:
    """bf16 [..., 128] whose groups of 32 have different sizes."""
    sizes = torch.exp2(torch.randint(-octaves, 1, (*shape, 4), device=DEVICE).float()).repeat_interleave(32, -1)
    return (torch.randn(*shape, 128, device=DEVICE) * sizes).bfloat16()


# -- keys and queries ---------------------------------------------------------------------------------------------


def test_packed_keys_give_back_the_values_of_q4() -> None:
    torch.manual_seed(0)
    keys = torch.cat((uneven(50), uneven(10, octaves=11), torch.zeros(1, 128, device=DEVICE).bfloat16()))
    keys[3, 32:64] = 0.0
    keys[4, :96] = 0.0
    keys[5] *= 2.0**-90
    keys[6] *= 2.0**90
    record = index_keys.pack_keys(keys)
    assert record.shape == (61, index_keys.KEY_BYTES) and record.dtype == torch.uint8
    spread = quant.quantize_fp4_e8m0(keys)[1]
    fits = (spread.amax(1) / spread.masked_fill(spread < 2.0**-125, 1.0).amin(1)) <= 2.0**11
    assert fits.sum() > 50
    assert torch.equal(index_keys.unpack_keys(record)[fits], quant.fake_quantize_fp4_e8m0(keys.float())[fits])


def test_groups_too_small_for_a_code_are_rounded_beside_the_largest() -> None:
    torch.manual_seed(1)
    keys = torch.randn(20, 128, device=DEVICE)
    keys[:, 32:64] *= 2.0 ** -torch.arange(20, device=DEVICE).unsqueeze(1)
    exact, got = quant.fake_quantize_fp4_e8m0(keys), index_keys.unpack_keys(index_keys.pack_keys(keys))
    largest = keys.abs().amax(1, keepdim=True)
    assert ((got - exact).abs() <= largest * 2.0**-12).all()
    assert torch.equal(got[:8], exact[:8])
    codes, factors = index_keys.pack_queries(keys)
    assert torch.equal(index_keys.query_values(codes) * factors.unsqueeze(1), got)


@pytest.mark.parametrize("per_block", [64, 128])
def test_inserted_keys_stand_in_pages_and_nothing_else_changes(per_block: int) -> None:
    torch.manual_seed(2)
    keys = uneven(37, octaves=14)
    keys[7] = 0.0
    pool = torch.randint(0, 256, (5 * per_block, index_keys.KEY_BYTES), dtype=torch.uint8, device=DEVICE)
    twin = pool.clone()
    rows = torch.randperm(len(pool), device=DEVICE)[:37]
    index_keys.insert_keys(keys, pool, rows, per_block)
    record = index_keys.pack_keys(keys)
    index_keys.put_key_rows(twin, rows, per_block, record)
    assert torch.equal(pool, twin)
    assert torch.equal(index_keys.key_rows(pool, rows.int(), per_block), record)
    row = int(rows[0])
    page = pool.view(5, -1)[row // per_block]
    assert torch.equal(page[row % per_block * 64 :][:64], record[0, :64])
    assert torch.equal(page[per_block * 64 + row % per_block * 4 :][:4], record[0, 64:])


def test_a_pool_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="pool of index keys"):
        index_keys.insert_keys(uneven(1), torch.zeros(100, 68, dtype=torch.uint8), torch.zeros(1).long(), 64)


def test_queries_are_rotated_quantised_and_ordered_like_the_reference() -> None:
    torch.manual_seed(3)
    q = uneven(5, 32, octaves=3)
    q[1, 4] = 0.0
    weights = torch.randn(5, 32, device=DEVICE)
    frequencies = rope.rope_frequencies(64, 160000.0).to(DEVICE)
    cos, sin = rope.rope_angles(torch.tensor([0, 1, 77, 4096, 1_000_000], device=DEVICE), frequencies)
    found = index_keys.index_queries(q.flatten(1), weights, cos, sin, scale=0.015625)
    turned = rope.apply_rope(q, cos, sin)
    codes, factors = index_keys.pack_queries(turned)
    assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.weights, weights * 0.015625 * factors)
    values = index_keys.query_values(codes) * factors.unsqueeze(-1)
    assert torch.equal(values, quant.fake_quantize_fp4_e8m0(turned.float()))


# -- a step -------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Chunks of `lengths` rows from `starts` on, one sequence each; slot i is that of chunk i."""

    lengths: list[int]
    starts: list[int]
    per_block: int
    topk: int = TOPK

    def __post_init__(self) -> None:
        self.ratio = 128 // self.per_block
        count = len(self.lengths)
        pairs = list(zip(self.starts, self.lengths, strict=True))
        self.positions = torch.cat([torch.arange(s, s + n) for s, n in pairs]).to(DEVICE)
        self.slots = torch.repeat_interleave(torch.arange(count), torch.tensor(self.lengths)).to(DEVICE)
        self.row_starts = torch.tensor(self.starts, device=DEVICE)[self.slots]
        self.visible = (self.positions + 1) // self.ratio
        self.most = int(self.visible.max())
        blocks = -(-self.most // self.per_block)
        self.tables = (torch.randperm(count * blocks) + 1).view(count, blocks).to(DEVICE)
        places = paging.block_rows(
            self.tables, torch.arange(count, device=DEVICE), blocks * self.per_block, self.per_block
        )
        self.pool = torch.randint(
            0, 256, ((count * blocks + 1) * self.per_block, index_keys.KEY_BYTES), dtype=torch.uint8, device=DEVICE
        )
        record = index_keys.pack_keys(uneven(*places.shape, octaves=2))
        index_keys.put_key_rows(self.pool, places, self.per_block, record)
        self.keys = index_keys.unpack_keys(record)  # [chunks, entries, 128]
        n = len(self.positions)
        codes, factors = index_keys.pack_queries(uneven(n, 32, octaves=2))
        self.queries = IndexQueries(codes, torch.randn(n, 32, device=DEVICE) * factors)

    def plan(self, candidates: int | None = None, score_bytes: int = 1 << 30) -> IndexPlan:
        (plan,) = plan_step(
            self.positions, self.slots, self.row_starts, chunks=len(self.lengths), ratio=self.ratio, topk=self.topk,
            max_entries=self.most, candidate_blocks=candidates, score_bytes=score_bytes,
        )  # fmt: skip
        return plan

    def scores(self, plan: IndexPlan, candidates: Tensor | None = None, gluon: bool | None = None) -> list[Tensor]:
        """What the kernels write for every row (empty where no scores are needed); checks the maxima of 8 beside it.
        gluon: None = the kernel that the model would take."""
        found = [torch.empty(0, device=DEVICE)] * len(self.positions)
        for number in range(plan.passes):
            memory = poisoned(len(score_memory(plan)), dtype=torch.float32)
            if candidates is None or not plan.gathered:
                paged_scores(*self.queries, self.pool, self.tables, self.per_block, plan, number, memory, gluon=gluon)
            else:
                gathered_scores(*self.queries, self.pool, self.tables, self.per_block, candidates, plan, number, memory)
            for row in (plan.field(PASS) == number).nonzero().flatten().tolist():
                if units := int(plan.field(UNITS)[row]):
                    place = int(plan.field(PLACE)[row]) * UNIT
                    found[row] = memory[place : place + units * UNIT].clone()
                    best = memory[plan.units * UNIT + place // 8 :][: units * UNIT // 8]
                    assert torch.equal(best, found[row].view(-1, 8).amax(1))
        return found

    def expected(self, row: int) -> Tensor:
        """float64 scores of the entries that a row sees."""
        values = index_keys.query_values(self.queries.codes[row]).double()
        dots = values @ self.keys[self.slots[row], : self.visible[row]].double().t()
        return (dots.relu() * self.queries.weights[row].double().unsqueeze(1)).sum(0)


STEPS = {
    "decode, one block an entry row of 128": Step([1, 1, 1, 1], [300, 20, 700, 127], 128),
    "decode, pages of 64": Step([1, 1, 1], [300, 901, 2], 64),
    "verify": Step([6, 1, 3, 4], [200, 300, 400, 12], 128),
    "verify, pages of 64": Step([6, 3, 2], [611, 300, 16], 64),
    "prefill": Step([21], [240], 128),
} if not CUDA else {
    "decode": Step([1] * 64, [5000 * i + 1 for i in range(64)], 128, 512),
    "decode, pages of 64": Step([1] * 33, [777 * i for i in range(33)], 64, 512),
    "verify": Step([6, 1, 3, 4, 2, 5] * 8, [3000 * i + 13 for i in range(48)], 128, 512),
    "verify, pages of 64": Step([6] * 20, [9999 + 500 * i for i in range(20)], 64, 512),
    "prefill": Step([700, 333], [2000, 100], 128, 512),
    "prefill, pages of 64": Step([515], [40_000], 64, 512),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_scores_equal_float64_of_the_stored_codes(name: str) -> None:
    step = STEPS[name]
    plan = step.plan()
    found = step.scores(plan)
    assert sum(map(len, found)) > 0
    for row, scores in enumerate(found):
        seen = int(step.visible[row])
        if len(scores):
            assert relative_error(scores[:seen], step.expected(row)) < TOLERANCE
            assert scores[seen:].isneginf().all()
        else:
            assert seen <= step.topk


@pytest.mark.parametrize("name", STEPS)
def test_the_choice_is_that_of_the_reference_on_the_same_scores(name: str) -> None:
    step = STEPS[name]
    plan = step.plan()
    found = step.scores(plan)
    entries, blocks = choose_entries(step.queries, step.pool, step.tables, step.per_block, (plan,), publish=2048)
    assert blocks is not None
    for row, scores in enumerate(found):
        seen = int(step.visible[row])
        if seen <= step.topk:
            wanted = torch.arange(step.topk, device=DEVICE)
            wanted[seen:] = -1
        else:
            wanted = selection.top_entries(scores[None, :seen], step.topk)[0]
        assert torch.equal(entries[row].long(), wanted)
        held = blocks[row][blocks[row] >= 0]
        assert (held.diff() > 0).all() and len(held) == min(-(-seen // 8), 2048)
        assert seen == 0 or int(held[-1]) == (seen - 1) // 8


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device: the interpreter does not run Gluon")
@pytest.mark.parametrize("name", STEPS)
def test_both_kernels_give_the_same_bits(name: str) -> None:
    step = STEPS[name]
    plan, inside = step.plan(), step.plan(candidates=128)
    _, blocks = choose_entries(step.queries, step.pool, step.tables, step.per_block, (plan,), publish=2048)
    assert blocks is not None
    offered = blocks[:, :128].contiguous()
    for one, other in zip(step.scores(plan, gluon=False), step.scores(plan, gluon=True), strict=True):
        assert torch.equal(one, other)
    gathered = [step.scores(inside, offered, gluon=gluon) for gluon in (False, True)]
    for one, other in zip(*gathered, strict=True):
        assert torch.equal(one, other)


def test_scores_that_do_not_fit_at_once_are_made_in_passes() -> None:
    step = Step([6, 1, 2, 6], [200, 300, 130, 150], 128)
    whole, parts = step.plan(), step.plan(score_bytes=4 * 2048)
    assert whole.passes == 1 and parts.passes > 2
    for one, other in zip(step.scores(whole), step.scores(parts), strict=True):
        assert torch.equal(one, other)
    chosen = [choose_entries(step.queries, step.pool, step.tables, 128, (plan,))[0] for plan in (whole, parts)]
    assert torch.equal(*chosen)


def test_a_row_alone_has_the_same_scores_and_choice_as_in_company() -> None:
    step = Step([6, 1, 5, 2], [200, 250, 300, 128], 128)
    together = step.scores(step.plan())
    chosen, _ = choose_entries(step.queries, step.pool, step.tables, 128, (step.plan(),))
    for row in (0, 3, 5, 6, 9, 13):
        alone = IndexQueries(step.queries.codes[row : row + 1], step.queries.weights[row : row + 1])
        plans = plan_step(
            step.positions[row : row + 1], step.slots[row : row + 1], step.positions[row : row + 1], chunks=1, ratio=1,
            topk=TOPK, max_entries=int(step.visible[row]),
        )  # fmt: skip
        memory = poisoned(len(score_memory(plans[0])), dtype=torch.float32)
        paged_scores(*alone, step.pool, step.tables, 128, plans[0], 0, memory)
        seen = int(step.visible[row])
        assert torch.equal(memory[:seen], together[row][:seen])
        entries, _ = choose_entries(alone, step.pool, step.tables, 128, plans)
        assert torch.equal(entries[0], chosen[row])


@pytest.mark.parametrize(
    ("lengths", "first", "gathered"), [([1, 1, 1], 600, True), ([3, 1], 600, False), ([2, 1], 800, True)]
)
def test_candidates_limit_the_choice_of_the_layers_behind(lengths: list[int], first: int, gathered: bool) -> None:
    """Blocks kept by one layer's scores, entries by another's: the reference's masks and choice, the same scores. Rows
    that share their keys score all entries where these are few, and the candidates alone where they are many."""
    count = 32
    step = Step(lengths, [first, 40, 300][: len(lengths)], 128)
    plan, inside = step.plan(), step.plan(candidates=count)
    assert inside.inside and inside.gathered == gathered and not plan.inside
    source = step.scores(plan)
    _, blocks = choose_entries(step.queries, step.pool, step.tables, 128, (plan,), publish=count)
    assert blocks is not None
    step.queries = IndexQueries(
        step.queries.codes.view(torch.uint8).roll(1, 0).view(step.queries.codes.dtype),
        step.queries.weights.flip(0).contiguous(),
    )
    own, limited = step.scores(plan), step.scores(inside, blocks)
    entries, nothing = choose_entries(step.queries, step.pool, step.tables, 128, (inside,), candidates=blocks)
    assert nothing is None
    for row in range(len(own)):
        seen = int(step.visible[row])
        if seen <= TOPK:
            continue
        mask = selection.candidate_mask(
            source[row][None, :seen], step.visible[row : row + 1], block_size=8, topk_blocks=count
        )
        wanted = selection.top_entries(own[row][None, :seen].masked_fill(~mask, float("-inf")), TOPK)
        assert torch.equal(entries[row].long(), wanted[0])
        held = blocks[row][blocks[row] >= 0].long()
        assert int(inside.field(SEEN)[row]) == seen
        offered = own[row].view(-1, 8)[held].flatten() if gathered else own[row]
        assert torch.equal(limited[row][: len(offered)], offered)


def test_padding_rows_of_the_null_slot_choose_what_exists_and_harm_nobody() -> None:
    step = Step([1, 1, 1, 1], [500, 0, 0, 0], 128)
    step.tables[1:] = 0
    step.slots[2:] = 1
    step.queries.codes[1:].view(torch.uint8).fill_(0x7F)  # NaN
    step.queries.weights[1:] = float("nan")
    entries, blocks = choose_entries(step.queries, step.pool, step.tables, 128, (step.plan(),), publish=32)
    assert blocks is not None
    assert torch.equal(entries[0].long(), selection.top_entries(step.scores(step.plan())[0][None, :501], TOPK)[0])
    assert (entries[1:, 0] == 0).all() and (entries[1:, 1:] == -1).all()
    assert (blocks[1:, 0] == 0).all() and (blocks[1:, 1:] == -1).all()


def test_a_row_behind_the_promised_end_stays_in_its_memory() -> None:
    step = Step([1, 3], [200, 240], 128)
    plans = plan_step(step.positions, step.slots, step.row_starts, chunks=2, ratio=1, topk=TOPK, max_entries=150)
    assert plans[0].field(SEEN).tolist() == [150] * 4 and plans[0].units == 4 * 4
    entries, _ = choose_entries(step.queries, step.pool, step.tables, 128, plans)
    assert int(entries.max()) < 150


def test_what_is_served_is_said() -> None:
    assert serves(32, 128, 512, 8) and serves(32, 128, 512, 0)
    assert not serves(8, 64, 8, 4) and not serves(32, 128, 500, 8) and not serves(32, 128, 512, 4)
    step = STEPS["prefill"]
    with pytest.raises(ValueError, match="candidates go with a plan"):
        choose_entries(step.queries, step.pool, step.tables, 128, (step.plan(candidates=32),))
    with pytest.raises(ValueError, match="candidates go with a plan"):
        choose_entries(step.queries, step.pool, step.tables, 128, (step.plan(),), candidates=torch.zeros(21, 32).int())
