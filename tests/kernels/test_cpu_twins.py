"""Every CPU kernel against its reference, on odd shapes and edges. Both run float32.

Tolerance: 2e-6 of the largest value for sums of up to 1,024 terms (another order of addition moves them by about 1e-6,
the exponential by 2e-7); choices must be equal.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels import select
from deepinfer.kernels.argmax import argmax
from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.cpu.build import library
from deepinfer.kernels.cpu.linear import linear_packed, pack, unpack
from deepinfer.kernels.layer_weights import HyperWeights, MoeWeights, OutputWeights, QueryWeights
from deepinfer.kernels.philox import uniforms_float32
from deepinfer.kernels.weights import DenseWeight, LooseExperts, PackedExperts, PackedWeight, loose

pytestmark = pytest.mark.skipif(library().handle is None, reason=library().explanation)
CASES = settings(max_examples=25, deadline=None)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-3)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@CASES
@given(rows=st.integers(1, 40), inner=st.integers(1, 70), outputs=st.integers(1, 50), seed=st.integers(0, 99))
def test_packed_product_equals_the_plain_one_at_any_shape(rows, inner, outputs, seed):
    weight = draw(seed, outputs, inner).to(torch.bfloat16).float()
    x = draw(seed + 1, rows, inner + 3)[:, :inner]  # a row stride of its own
    panels = pack(weight)
    assert torch.equal(unpack(panels, outputs), weight)
    # Beside the largest sum of magnitudes: terms that cancel leave a small value with the rounding of large ones.
    off = (linear_packed(x, panels, outputs) - x @ weight.t()).abs().max()
    assert off <= 1e-6 * (x.abs() @ weight.abs().t()).max()


@CASES
@given(rows=st.integers(2, 300), seed=st.integers(0, 99), data=st.data())
def test_a_row_of_the_packed_product_does_not_depend_on_the_other_rows(rows, seed, data):
    panels, x = pack(draw(seed, 40, 64).to(torch.bfloat16).float()), draw(seed + 1, rows, 64)
    one = data.draw(st.integers(0, rows - 1))
    assert torch.equal(linear_packed(x, panels, 40)[one], linear_packed(x[one : one + 1], panels, 40)[0])


def test_a_weight_that_bfloat16_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="not exact in bfloat16"):
        pack(torch.tensor([[1.0 + 2**-12]]))


@CASES
@given(
    rows=st.integers(1, 9),
    window=st.integers(1, 33),
    chosen=st.integers(0, 20),
    heads=st.sampled_from([4, 8]),
    size=st.sampled_from([16, 64]),
    seed=st.integers(0, 99),
)
def test_sparse_attention_equals_the_reference_with_empty_rows_and_large_sinks(rows, window, chosen, heads, size, seed):
    g = torch.Generator().manual_seed(seed)
    q, pool, kv = draw(seed, rows, heads, size), draw(seed + 1, 50, size), draw(seed + 2, 30, size)
    lists = torch.randint(-1, 50, (rows, window), generator=g), torch.randint(-1, 30, (rows, chosen), generator=g)
    lists[0][0], lists[1][0] = -1, -1  # a query with no key at all
    sink = draw(seed + 3, heads) * 30
    arguments = (q, pool, lists[0], kv if chosen else None, lists[1] if chosen else None, sink, size**-0.5)
    got = select.sparse_attention(*arguments)
    with select.reference_only():
        close(got, select.sparse_attention(*arguments))
    assert got[0].eq(0).all()


@CASES
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 5),
    entries=st.integers(1, 130),
    heads=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_index_scores_equal_the_reference_and_hide_what_is_not_visible(batch, rows, entries, heads, seed):
    g = torch.Generator().manual_seed(seed)
    queries, weights, pool = (
        draw(seed, batch, rows, heads, 32),
        draw(seed + 1, batch, rows, heads),
        draw(seed + 2, 90, 32),
    )
    key_rows = torch.randint(0, 90, (batch, entries), generator=g)
    visible = torch.randint(0, entries + 1, (batch, rows), generator=g)
    arguments = (queries, pool, key_rows, weights, visible)
    got = select.index_scores(*arguments)
    with select.reference_only():
        expected = select.index_scores(*arguments)
    assert torch.equal(got.isneginf(), expected.isneginf())
    # terms of both signs cancel, so the error is held against the sum of their sizes
    sizes = (weights.abs().sum(-1).max() * queries.norm(dim=-1).max() * pool.norm(dim=-1).max()).item()
    assert (got - expected).nan_to_num(0.0).abs().max() <= 1e-6 * sizes


@CASES
@given(rows=st.integers(1, 6), entries=st.integers(1, 60), k=st.integers(1, 70), seed=st.integers(0, 999))
def test_the_best_entries_are_chosen_and_ties_go_to_the_lower_position(rows, entries, k, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (rows, entries), generator=g).float()  # five values: ties everywhere
    scores[torch.rand(rows, entries, generator=g) < 0.3] = float("-inf")
    got = select.top_entries(scores, k)
    with select.reference_only():
        assert torch.equal(got, select.top_entries(scores, k))
    for row, chosen in zip(scores, got, strict=True):  # a third opinion: a stable sort
        order = [i for i in row.sort(descending=True, stable=True).indices.tolist() if not row[i].isneginf()]
        assert sorted(order[:k]) == chosen[chosen >= 0].tolist()


def narrow(seed: int, *shape: int) -> torch.Tensor:
    """A weight that bfloat16 holds exactly, small enough to keep activations near 1."""
    return (draw(seed, *shape) * shape[-1] ** -0.5).to(torch.bfloat16).float()


def packed(weight: torch.Tensor) -> PackedWeight:
    return PackedWeight(pack(weight), weight.shape[0])


@CASES
@given(
    rows=st.integers(1, 70),
    experts=st.integers(1, 6),
    limit=st.sampled_from([0.5, 10.0]),
    vision=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mixture_of_experts_equals_the_reference_with_experts_that_nobody_chose(rows, experts, limit, vision, seed):
    width, inner, topk = 64, 32, min(2, experts)
    shapes = ((inner, width), (inner, width), (width, inner))
    bank = [tuple(DenseWeight(narrow(seed + 10 * n + i, *s)) for i, s in enumerate(shapes)) for n in range(experts + 1)]
    up = torch.stack([torch.cat((pack(w1.dense()), pack(w3.dense()))) for w1, w3, _ in bank])
    down = torch.stack([pack(w2.dense()) for _, _, w2 in bank])
    gate, bias = narrow(seed + 5, experts, width) * 4, draw(seed + 6, experts)
    options = {"topk": topk, "scale": 1.5, "normalize": topk > 1, "temperature": 1.25, "limit": limit}
    fast = MoeWeights(packed(gate), bias, PackedExperts(up, down), **options)
    plain = MoeWeights(DenseWeight(gate), bias, LooseExperts(bank[:-1], bank[-1]), **options)
    x, row_bias = draw(seed, rows, width), draw(seed + 7, rows, experts) if vision else None
    y, ids, weights, scores = select.moe(x, fast, row_bias)
    expected = select.moe(x, plain, row_bias)
    assert torch.equal(ids, expected[1])
    close(y, expected[0], 4e-6)  # two products and a sigmoid in a row
    close(weights, expected[2])
    close(scores, expected[3])
    alone = select.moe(x[-1:], fast, None if row_bias is None else row_bias[-1:])
    assert torch.equal(alone[0][0], y[-1])  # batch mates change nothing
    for one, other in zip(loose(fast.experts).routed, bank, strict=False):
        assert all(torch.equal(a.dense(), b.dense()) for a, b in zip(one, other, strict=True))


@CASES
@given(rows=st.integers(1, 120), groups=st.sampled_from([1, 2]), seed=st.integers(0, 99))
def test_projections_around_attention_equal_the_reference_whatever_the_batch(rows, groups, seed):
    width, rank, heads, head_dim, rope_dim = 40, 24, 4, 32, 16
    shapes = {"wq_a": (rank, width), "wq_b": (heads * head_dim, rank), "wkv": (head_dim, width)}
    matrices = {name: narrow(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    sizes = {"heads": heads, "head_dim": head_dim, "rope_dim": rope_dim}
    rest = {"q_norm": draw(seed + 3, rank), "kv_norm": draw(seed + 4, head_dim), "eps": 1e-20, **sizes}
    fast = QueryWeights(**{name: packed(m) for name, m in matrices.items()}, **rest)
    plain = QueryWeights(**{name: DenseWeight(m) for name, m in matrices.items()}, **rest)
    x, angle = draw(seed + 5, rows, width), draw(seed + 6, rows, rope_dim // 2)
    cos, sin = angle.cos(), angle.sin()
    got = select.query_and_window(x, fast, cos, sin)
    with select.reference_only():
        for a, b in zip(got, select.query_and_window(x, plain, cos, sin), strict=True):
            close(a, b, 4e-6)
    last = select.query_and_window(x[-1:], fast, cos[-1:], sin[-1:])
    assert all(torch.equal(one[0], many[-1]) for one, many in zip(last, got, strict=True))
    assert torch.equal(select.window_latents(x, fast, cos, sin), got[2])  # alone: the same bits

    wo_a = [narrow(seed + 7 + g, rank, heads // groups * head_dim) for g in range(groups)]
    wo_b = narrow(seed + 9, width, groups * rank)
    o = draw(seed + 10, rows, heads, head_dim)
    output = OutputWeights([packed(m) for m in wo_a], packed(wo_b), **sizes)
    y = select.grouped_output(o.clone(), output, cos, sin)
    with select.reference_only():
        close(
            y,
            select.grouped_output(
                o, OutputWeights([DenseWeight(m) for m in wo_a], DenseWeight(wo_b), **sizes), cos, sin
            ),
            4e-6,
        )
    assert torch.equal(select.grouped_output(o[-1:].clone(), output, cos[-1:], sin[-1:])[0], y[-1])


@CASES
@given(rows=st.integers(1, 9), extreme=st.booleans(), with_update=st.booleans(), seed=st.integers(0, 99))
def test_hyper_connections_equal_the_reference(rows, extreme, with_update, seed):
    width = 48
    stream, fn = draw(seed, rows, 4, width), draw(seed + 1, 4 * width, 24) / 10
    base, norm = draw(seed + 3, 24) * (20 if extreme else 1), draw(seed + 5, width)
    weights = HyperWeights(fn, draw(seed + 2, 3), base, norm, iterations=20, eps=1e-6, norm_eps=1e-20)
    pre, post = draw(seed + 6, rows, 4).sigmoid(), draw(seed + 7, rows, 4).sigmoid()
    update = (draw(seed + 4, rows, width), post, draw(seed + 8, rows, 4, 4).softmax(-1)) if with_update else None
    got = select.hyper_step(stream, update, pre, weights)
    with select.reference_only():
        expected = select.hyper_step(stream, update, pre, weights)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 2e-5)  # 40 normalisations in a row; the official vectors allow 5e-6 absolute
    if update is not None:
        expanded = select.hyper_expand(stream, *update)
        assert torch.equal(expanded, got[0])


@CASES
@given(rows=st.integers(1, 6), blocks=st.integers(1, 9), topk=st.integers(1, 9), seed=st.integers(0, 999))
def test_candidate_blocks_equal_the_reference_and_hold_the_newest(rows, blocks, topk, seed):
    g = torch.Generator().manual_seed(seed)
    entries = 4 * blocks - int(torch.randint(0, 4, (1,), generator=g))
    visible = torch.randint(0, entries + 1, (rows,), generator=g)
    scores = torch.randint(-2, 3, (rows, entries), generator=g).float()
    scores[torch.arange(entries) >= visible.unsqueeze(1)] = float("-inf")
    got = select.candidate_mask(scores, visible, block_size=4, topk_blocks=topk)
    with select.reference_only():
        assert torch.equal(got, select.candidate_mask(scores, visible, block_size=4, topk_blocks=topk))
    for row, seen in enumerate(visible.tolist()):
        assert seen == 0 or bool(got[row, seen - 1])
        assert not got[row, seen:].any()
    allowed = select.top_entries(scores, 3, got)
    with select.reference_only():
        assert torch.equal(allowed, select.top_entries(scores, 3, got))


def test_rows_of_a_pool_are_copied_whatever_their_type():
    for dtype in (torch.float32, torch.bfloat16):
        pool = draw(1, 9, 5).to(dtype)
        before = pool.clone()
        select.copy_rows(pool, torch.tensor([1, 0]), torch.tensor([7, 8]))
        assert torch.equal(pool, before[[8, 7, *range(2, 9)]])


@CASES
@given(rows=st.integers(1, 9), dead=st.booleans(), seed=st.integers(0, 99))
def test_engram_pairs_norms_and_rotations_equal_the_reference(rows, dead, seed):
    width = 32
    stream, kv, weight = draw(seed, rows, 4, width), draw(seed + 1, rows, 5 * width), draw(seed + 2, 4, width)
    mask = torch.arange(rows) % 2 == 0 if dead else None
    first, second, norm = draw(seed + 3, rows, 2, width), draw(seed + 4, rows, 2, width) * 5, draw(seed + 5, width)
    angle = draw(seed + 6, rows, 8)

    def run() -> list[torch.Tensor]:
        return [
            select.engram_inject(stream, kv, weight, mask, 1e-20),
            select.compress_pairs(first, second, norm, 1e-20, torch.float32),
            select.rms_norm(first[:, 0], norm, 1e-20),
            select.apply_rope(stream, angle.cos(), angle.sin()),
            select.apply_rope(first[:, 0], angle.cos(), angle.sin(), inverse=True),
        ]

    got = run()
    with select.reference_only():
        for a, b in zip(got, run(), strict=True):
            close(a, b)
    if dead:
        assert torch.equal(got[0][0], stream[0])


@CASES
@given(rows=st.integers(1, 4), width=st.integers(1, 70), chosen=st.booleans(), seed=st.integers(0, 999))
def test_random_numbers_are_the_same_bits_as_the_reference(rows, width, chosen, seed):
    g = torch.Generator().manual_seed(seed)
    key = tuple(torch.randint(0, 2**32, (rows,), generator=g) for _ in range(2))
    positions = torch.randint(0, 2**20, (rows,), generator=g)
    ids = torch.randint(0, 129280, (rows, width), generator=g) if chosen else None
    got = uniforms_float32(key, 2, positions, ids, width, slot=3)
    with select.reference_only():
        assert torch.equal(got, uniforms_float32(key, 2, positions, ids, width, slot=3))


def test_rows_of_an_engram_table_are_every_code_times_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat_interleave(256, 0)  # 2,048 rows: all pairs
    scales = torch.arange(256, dtype=torch.uint8).repeat(8).unsqueeze(1)
    ids = torch.arange(2048).view(2, 1024)
    got, fine = cpu.table_rows(codes.data_ptr(), scales.data_ptr(), ids, 2048, 32)
    expected = codes.view(torch.float8_e4m3fn).float() * scales.view(torch.float8_e8m0fnu).float()
    number = expected.isfinite()
    assert torch.equal(got.view(2048, 32)[number], expected[number])
    assert not fine  # codes 0x7f and 0xff and scale 255 are among them
    assert cpu.table_rows(codes.data_ptr(), scales.data_ptr(), torch.tensor([0]), 2048, 32)[1]
    for outside in (-1, 2048):
        assert not cpu.table_rows(codes.data_ptr(), scales.data_ptr(), torch.tensor([outside]), 2048, 32)[1]


@CASES
@given(
    size=st.sampled_from([1, 4, 128]),
    chunks=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 140)), min_size=1, max_size=4),
    per_block=st.sampled_from([64, 128]),
    seed=st.integers(0, 99),
)
def test_rows_of_pools_are_the_same_as_the_references(size, chunks, per_block, seed):
    g = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(start, start + length) for start, length in chunks])
    lengths = torch.tensor([length for _, length in chunks])
    starts = torch.tensor([start for start, _ in chunks]).repeat_interleave(lengths)
    slots = torch.randperm(5, generator=g)[: len(chunks)].repeat_interleave(lengths)
    tables = torch.randint(0, 50, (5, 10), generator=g)
    entries = torch.randint(-1, 9 * per_block, (len(positions), 7), generator=g)
    count = int(torch.randint(0, 9 * per_block, (1,), generator=g))
    floors = (starts - torch.randint(0, 2 * size, (1,), generator=g)).clamp_min(0)
    ring = size + int(torch.randint(0, 7, (1,), generator=g))

    def run() -> list[torch.Tensor]:
        return [
            select.window_rows(positions, slots, starts, floors, size, ring, 5 * ring),
            select.entry_rows(tables, slots, entries, per_block),
            select.block_rows(tables, slots[:3], count, per_block),
        ]

    got = run()
    with select.reference_only():
        for a, b in zip(got, run(), strict=True):
            assert torch.equal(a, b)
    # every row sees what lies between its floor and itself, and the newest key is its own entry, just staged
    seen = (positions - floors + 1).clamp_max(size)
    assert torch.equal((got[0] >= 0).sum(1), seen)
    newest = got[0].gather(1, seen.unsqueeze(1) - 1).squeeze(1)
    assert torch.equal(newest, 5 * ring + torch.arange(len(positions)))


@CASES
@given(
    chunks=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=4),
    lookback=st.integers(1, 4),
    drafts=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_histories_of_tokens_are_the_same_as_the_references(chunks, lookback, drafts, seed):
    g = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(start, start + length) for start, length in chunks])
    lengths = torch.tensor([length for _, length in chunks])
    starts = torch.tensor([start for start, _ in chunks]).repeat_interleave(lengths)
    owners = torch.randperm(5, generator=g)[: len(chunks)]
    ids = torch.randint(-1, 50, (len(positions),), generator=g)
    known = torch.randint(-1, 50, (5, 30), generator=g)  # what every slot's sequence holds, by position
    size = lookback + drafts
    store = torch.full((5, size), -7)
    for slot, (start, _) in zip(owners.tolist(), chunks, strict=True):
        for position in range(max(0, start - size), start):
            store[slot, position % size] = known[slot, position]
    slots = owners.repeat_interleave(lengths)
    known[slots, positions] = ids
    stores = [store.clone(), store.clone()]
    got = select.token_history(ids, positions, slots, starts, stores[0], lookback)
    with select.reference_only():
        assert torch.equal(got, select.token_history(ids, positions, slots, starts, stores[1], lookback))
    assert torch.equal(*stores)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        expected = [int(known[slot, position - s]) if position >= s else -1 for s in range(lookback + 1)]
        assert got[row].tolist() == expected
    for slot, (start, length) in zip(owners.tolist(), chunks, strict=True):
        for position in range(max(0, start + length - size), start + length):
            assert stores[0][slot, position % size] == known[slot, position]


def test_a_row_of_nan_is_chosen_for_within_bounds_and_alone():
    """Something upstream broke one sequence: its row chooses anything, the others what they would have chosen."""
    nan, entries, width, inner = float("nan"), 40, 32, 16
    scores = draw(1, 4, entries)
    broken = scores.clone()
    broken[1], broken[2, ::3] = nan, nan
    visible = torch.tensor([40, 40, 40, 7])
    for run in (
        lambda s: select.top_entries(s, 6),
        lambda s: select.candidate_mask(s, visible, block_size=4, topk_blocks=3),
    ):
        got = run(broken)
        assert torch.equal(got[[0, 3]], run(scores)[[0, 3]])
        with select.reference_only():
            assert torch.equal(got, run(broken))
    assert (select.top_entries(broken, 6)[1] == -1).all()
    assert not (select.top_entries(broken, 6)[2] % 3 == 0).any()
    bank = PackedExperts(
        torch.stack([pack(narrow(i, 2 * inner, width)) for i in range(5)]),
        torch.stack([pack(narrow(9 + i, width, inner)) for i in range(5)]),
    )
    weights = MoeWeights(
        gate=packed(narrow(20, 4, width)),
        bias=draw(21, 4),
        experts=bank,
        topk=2,
        scale=1.5,
        normalize=True,
        temperature=1.0,
        limit=10.0,
    )
    x = draw(22, 3, width)
    spoilt = x.clone()
    spoilt[1] = nan
    y, ids, _, _ = select.moe(spoilt, weights)
    assert torch.equal(y[[0, 2]], select.moe(x, weights)[0][[0, 2]])
    assert y[1].isnan().all() and ((ids >= 0) & (ids < 4)).all() and ids[1].unique().numel() == 2


@CASES
@given(
    rows=st.integers(1, 30), k=st.integers(1, 5), vocab=st.integers(1, 600), rank=st.integers(1, 40),
    seed=st.integers(0, 99), odd=st.sampled_from([None, float("nan"), float("inf"), -float("inf")]),
)  # fmt: skip
def test_the_chain_of_greedy_drafts_equals_product_sum_and_argmax_one_after_the_other(rows, k, vocab, rank, seed, odd):
    embed, head = (draw(seed + i, vocab, rank).to(torch.bfloat16) for i in range(2))
    logits = draw(seed + 2, rows, k, vocab).mul(2).round()  # with equal values among them
    if seed % 2:
        head.zero_()  # then only the logits decide, by ties
    if odd is not None:
        logits.view(-1)[:: 1 + vocab // 3] = odd
    anchors = torch.arange(rows) % vocab
    packed = PackedWeight(pack(head.float()), vocab)
    drafts, embeddings = select.markov_chain(anchors, embed, packed, logits)
    before, kept = anchors, logits.clone()
    for i in range(k):
        assert torch.equal(embeddings[:, i], embed[before].float())
        z = logits[:, i] + select.project(embeddings[:, i], packed, rounded=False)  # bit for bit what the kernel adds
        assert torch.equal(drafts[:, i], argmax(z))
        before = drafts[:, i]
    assert torch.equal(logits.nan_to_num(), kept.nan_to_num())
    with select.reference_only():
        other, rows_before = select.markov_chain(anchors, embed, packed, logits)
    if seed % 2:  # no sum whose order could decide
        assert torch.equal(other, drafts) and torch.equal(rows_before, embeddings)


@CASES
@given(
    rows=st.integers(1, 12), vocab=st.integers(1, 200), seed=st.integers(0, 99),
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0]), banned=st.sampled_from([0.0, 0.9, 1.0]),
)  # fmt: skip
def test_masked_rows_equal_the_reference_where_bans_leave_nothing_and_behind_nan(rows, vocab, seed, density, banned):
    g = torch.Generator().manual_seed(seed)
    raw = draw(seed, rows, vocab)
    raw[:, ::5], raw[:, 3::11] = -torch.inf, torch.inf
    logits = raw.masked_fill(torch.rand(rows, vocab, generator=g) < banned, -torch.inf) + 1
    logits[0, -1] = raw[-1, 0] = torch.nan
    chosen = torch.randperm(rows, generator=g)[: 1 + seed % rows]
    bits = torch.rand(len(chosen), (vocab + 31) // 32 * 32, generator=g) < density  # some beyond the vocabulary
    masks = (bits.view(len(chosen), -1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)
    got, expected, before = logits.clone(), logits.clone(), logits.clone()
    select.constrain_rows(got, raw, chosen, masks)
    with select.reference_only():
        select.constrain_rows(expected, raw, chosen, masks)
    assert torch.equal(got.nan_to_num(nan=7.5), expected.nan_to_num(nan=7.5))
    for row in range(rows):
        if row not in chosen.tolist():
            assert torch.equal(got[row].nan_to_num(), before[row].nan_to_num())
    for at, row in enumerate(chosen.tolist()):
        allowed = bits[at, :vocab]
        assert (got[row][~allowed] == -torch.inf).all()
        kept = (before[row][allowed] != -torch.inf).any()
        own = before[row][allowed] if kept else raw[row][allowed].clamp(min=torch.finfo(torch.float32).min)
        assert torch.equal(got[row][allowed].nan_to_num(), own.nan_to_num())
