"""Routed experts: their layout, their plan, both products and the sum, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twins import DEVICE, poisoned, relative_error

from deepinfer.kernels.reference.experts import expert_forward, routed_experts, swiglu
from deepinfer.kernels.reference.quant import dequantize_fp4_groups, quantize_fp8, unpack_fp4
from deepinfer.kernels.triton import experts_plan, moe
from deepinfer.kernels.triton.experts import Tile, experts_down, experts_up
from deepinfer.kernels.triton.experts_combine import combine_experts
from deepinfer.kernels.triton.experts_layout import ShuffledBank, ShuffledMatrix, pair_rows, shuffle, unpair_rows
from deepinfer.kernels.triton.experts_plan import ExpertPlan, plan_buffers, plan_experts
from deepinfer.kernels.triton.experts_rows import kernel_order, plan_and_quantize, quantize_for_experts
from deepinfer.kernels.triton.experts_shared import swiglu as shared_swiglu
from deepinfer.kernels.triton.quantize import fold_fp8, fold_groups, quantize_rows

ON_GPU = DEVICE.type == "cuda"
LIMIT = 10.0
# Of bfloat16 outputs, against float64: rounding alone is 1.65e-3, the tensor core's own sums over 512 of K make it
# 1.67e-3, one chain over all of K 1.96e-3.
EXACT, CHAINED = 1.8e-3, 2.2e-3


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(6)


def fp4(random: torch.Generator, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Random packed codes and E8M0 scales that spread over 6 octaves."""
    codes = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8, generator=random)
    scales = torch.randint(116, 123, (rows, width // 32), dtype=torch.uint8, generator=random)
    return codes.to(DEVICE), scales.to(DEVICE)


def bank_of(random: torch.Generator, experts: int, inner: int, width: int) -> ShuffledBank:
    bank = ShuffledBank.empty(experts, inner, width, DEVICE)
    for expert in range(experts):
        rounded = bank.write(expert, fp4(random, inner, width), fp4(random, inner, width), fp4(random, width, inner))
        assert int(rounded) == 0
    return bank


def choose(random: torch.Generator, tokens: int, experts: int, topk: int) -> Tensor:
    return torch.rand(tokens, experts, generator=random).topk(topk).indices.int().to(DEVICE)


def activations(random: torch.Generator, tokens: int, width: int) -> Tensor:
    amplitudes = torch.exp(0.7 * torch.randn(width, generator=random))
    return (torch.randn(tokens, width, generator=random) * amplitudes).bfloat16().to(DEVICE)


def by_slot(values: Tensor, plan: ExpertPlan) -> Tensor:
    """[S, D] by sorted place -> by slot."""
    return values[plan.places.long()]


# -- layout -------------------------------------------------------------------------------------------------------


def test_shuffled_weights_are_the_same_weights(random: torch.Generator) -> None:
    bank = ShuffledBank.empty(2, 192, 256, DEVICE)  # 192: padded to 256 channels
    parts = fp4(random, 192, 256), fp4(random, 192, 256), fp4(random, 256, 192)
    bank.write(1, *parts)
    for stored, part in zip(bank.dense(1), parts, strict=True):
        assert torch.equal(stored, dequantize_fp4_groups(*part))
    assert bank.up.rows == 512 and bank.down.columns == 256
    assert bank.up.dense(1)[384:].eq(0).all(), "channels of the padding are zero"
    assert bank.up.dense(0).eq(0).all(), "an expert that was not written is zero"


def test_groups_far_below_their_row_are_rounded_and_counted(random: torch.Generator) -> None:
    packed, scales = fp4(random, 64, 256)
    scales[:] = 120
    scales[0, 1] = 109  # 11 octaves: exact
    scales[1, 2] = 108  # 12: rounded to steps of the scale above
    scales[2, 3], packed[2, 48:64] = 60, 0x80  # 60, but nothing but zeros (one of two with a sign)
    codes, steps, factors, rounded = shuffle(packed, scales)
    assert int(rounded) == 1
    matrix = ShuffledMatrix(codes[None], steps[None], factors[None])
    dense, exact = matrix.dense(0), dequantize_fp4_groups(packed, scales)
    group = slice(64, 96)
    step = 2.0 ** (109 - 127)
    assert (dense[1, group] - exact[1, group]).abs().max() <= step / 4, "half a step of e2m1 near zero"
    assert not torch.equal(dense[1, group], exact[1, group])
    dense[1, group] = exact[1, group]
    assert torch.equal(dense, exact)


def test_paired_rows_come_apart_again() -> None:
    gate, up = torch.arange(32).view(16, 2), torch.arange(32, 64).view(16, 2)
    pairs = pair_rows(gate, up)
    assert torch.equal(pairs[:8], gate[:8]) and torch.equal(pairs[8:16], up[:8])
    assert all(torch.equal(a, b) for a, b in zip(unpair_rows(pairs), (gate, up), strict=True))


def test_dimensions_that_do_not_fit_the_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        ShuffledMatrix.empty(1, 96, 128, DEVICE)


# -- plan ---------------------------------------------------------------------------------------------------------


def check_plan(plan: ExpertPlan, ids: Tensor, experts: int, first: int) -> None:
    numbers = ids.flatten().long() - first
    here = (numbers >= 0) & (numbers < experts)
    numbers = torch.where(here, numbers, experts)
    order = numbers.argsort(stable=True)[: int(here.sum())]
    assert torch.equal(plan.order[: len(order)].long(), order)
    places = torch.full_like(numbers, -1)
    places[order] = torch.arange(len(order), device=DEVICE)
    assert torch.equal(plan.places.long(), places)
    blocks, start = [], 0
    for expert, count in enumerate(numbers.bincount(minlength=experts)[:experts].tolist()):
        blocks += [[expert, start + at, min(plan.block_rows, count - at), 0] for at in range(0, count, plan.block_rows)]
        start += count
    assert plan.blocks[: len(blocks)].tolist() == blocks
    assert plan.blocks[len(blocks) :, 0].eq(-1).all()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "total", "experts", "first", "topk"), [(7, 12, 12, 0, 6), (40, 24, 8, 16, 3), (1, 4, 4, 0, 4)]
)
def test_plan_sorts_slots_by_expert(
    random: torch.Generator, tokens: int, total: int, experts: int, first: int, topk: int, rows: int
) -> None:
    ids = choose(random, tokens, total, topk)
    check_plan(plan_experts(ids, experts, rows, first), ids, experts, first)


def test_plan_of_one_crowded_expert_and_of_nobody_here() -> None:
    ids = torch.full((50, 3), 5, dtype=torch.int64, device=DEVICE)
    check_plan(plan_experts(ids, 8, 16), ids, 8, 0)
    check_plan(plan_experts(ids, 8, 16, 8), ids, 8, 8)


def test_plan_of_many_slots_counts_first(random: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # the real sizes take the interpreter a minute
        monkeypatch.setattr(experts_plan, "SMALL_SLOTS", 32)
        monkeypatch.setattr(experts_plan, "LARGE_CHUNK", 32)
    ids = choose(random, 3000 if ON_GPU else 30, 24, 6)
    check_plan(plan_experts(ids, 16, 32, 4), ids, 16, 4)


def test_plan_together_with_rows_is_the_same(random: torch.Generator) -> None:
    ids, x = choose(random, 5, 8, 3), activations(random, 5, 256)
    plan, rows = plan_and_quantize(ids, plan_buffers(ids, 8, 16), x)
    check_plan(plan, ids, 8, 0)
    alone = quantize_for_experts(x)
    assert torch.equal(rows.codes.view(torch.uint8), alone.codes.view(torch.uint8))
    assert torch.equal(rows.scale, alone.scale)


def test_rows_are_the_folded_ones_in_kernel_order(random: torch.Generator) -> None:
    x = activations(random, 3, 384)
    rows, expected = quantize_for_experts(x), fold_groups(*quantize_fp8(x))
    assert torch.equal(rows.codes.float(), kernel_order(expected.codes.float()))
    assert torch.equal(rows.scale, expected.scale)


# -- products -----------------------------------------------------------------------------------------------------

SIZES = (48, 2304, 5120) if ON_GPU else (3, 128, 256)
TOKENS = (64, 700) if ON_GPU else (9,)
# Rows of a block, and the tile; 128 rows in exact sums: in two parts, and (None) by the kernel with roles for warps.
TILES = [
    (16, Tile(128, 16, 6, 4)),
    (32, Tile(128, 32, 6, 4)),
    (64, Tile(128, 64, 4, 4)),
    (128, Tile(128, 64, 3, 4)),
    (128, Tile(128, 128, 4, 4)),
    (128, None),
]


@pytest.fixture(scope="module")
def bank() -> ShuffledBank:
    return bank_of(torch.Generator().manual_seed(7), *SIZES)


def expected_parts(x: Tensor, ids: Tensor, weights: Tensor, bank: ShuffledBank, wide: bool) -> tuple[Tensor, Tensor]:
    """Activations [S, inner] and outputs [S, D] by slot; NaN for experts that are not looked at."""
    slots, topk = ids.numel(), ids.shape[1]
    act, out = poisoned(slots, bank.inner, dtype=torch.float64), poisoned(slots, bank.width, dtype=torch.float64)
    rounded = x.double()
    if not wide:
        rounded = fold_groups(*quantize_fp8(x)).dense().double()
    for expert in sorted({0, bank.experts // 2, bank.experts - 1}):
        chosen = (ids.flatten() == expert).nonzero().flatten()
        w1, w3, w2 = (weight.double() for weight in bank.dense(expert))
        rows = rounded[chosen // topk]
        gate, up = (rows @ w1.t()).bfloat16(), (rows @ w3.t()).bfloat16()
        values = (swiglu(gate, up, LIMIT) * weights.flatten()[chosen, None]).bfloat16()
        act[chosen] = values.double()
        taken = values.double() if wide else fold_groups(*quantize_fp8(values)).dense().double()
        out[chosen] = taken @ w2.t()
    return act, out


@pytest.mark.parametrize("wide", [False, True], ids=["W4A8", "W4A16"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "chained"])
@pytest.mark.parametrize(("rows", "tile"), TILES if ON_GPU else [TILES[0], TILES[3], TILES[4]])
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_are_right_and_the_same_every_time(
    random: torch.Generator, bank: ShuffledBank, tokens: int, rows: int, tile: Tile | None, exact: bool, wide: bool
) -> None:
    if tile is not None and tile.rows == 128 and (exact or wide):
        pytest.skip("only chained sums over FP8 rows have tiles of 128")
    topk = 6 if ON_GPU else 2
    x, ids = activations(random, tokens, bank.width), choose(random, tokens, bank.experts, topk)
    weights = torch.rand(tokens, topk, generator=random).to(DEVICE)
    plan = plan_experts(ids, bank.experts, rows)
    act, out = expected_parts(x, ids, weights, bank, wide)
    seen = ~act[:, 0].isnan()
    tolerance = EXACT if exact else CHAINED
    first = None
    for _ in range(3 if ON_GPU else 1):
        up = poisoned(ids.numel(), bank.inner, dtype=torch.bfloat16)
        down = poisoned(ids.numel(), bank.width, dtype=torch.bfloat16)
        experts_up(
            x if wide else quantize_for_experts(x), plan, weights, bank.up, LIMIT, exact=exact, tile=tile, out=up
        )
        assert not up.isnan().any()
        assert relative_error(by_slot(up, plan)[seen], act[seen]) < 2 * tolerance  # two products and a rounded act
        between = act.float().bfloat16()[plan.order.long()].nan_to_num(0)  # so that errors do not add up
        experts_down(
            between if wide else quantize_for_experts(between), plan, bank.down, exact=exact, tile=tile, out=down
        )
        assert not down.isnan().any()
        assert relative_error(by_slot(down, plan)[seen], out[seen]) < tolerance
        first = (up, down) if first is None else first
        assert torch.equal(up, first[0]) and torch.equal(down, first[1])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [40, 384, 700, 2048])  # 5, 48, 88 and 256 rows an expert
def test_warps_with_roles_give_the_same_bits(random: torch.Generator, bank: ShuffledBank, tokens: int) -> None:
    x, ids = quantize_for_experts(activations(random, tokens, bank.width)), choose(random, tokens, bank.experts, 6)
    ids[: tokens // 2, 0] = torch.where((ids[: tokens // 2] == 0).any(1), ids[: tokens // 2, 0], 0)  # one is crowded
    weights = torch.rand(tokens, 6, generator=random).to(DEVICE)
    plan, other = plan_experts(ids, bank.experts, 128), plan_experts(ids, bank.experts, 64)
    act = experts_up(x, other, weights, bank.up, LIMIT, tile=TILES[2][1])
    down = experts_down(quantize_for_experts(act), other, bank.down, tile=TILES[2][1])
    for _ in range(3):
        out = poisoned(ids.numel(), bank.inner, dtype=torch.bfloat16)
        assert torch.equal(experts_up(x, plan, weights, bank.up, LIMIT, out=out), act)
        out = poisoned(ids.numel(), bank.width, dtype=torch.bfloat16)
        assert torch.equal(experts_down(quantize_for_experts(act), plan, bank.down, out=out), down)


def test_a_row_does_not_depend_on_the_batch(random: torch.Generator, bank: ShuffledBank) -> None:
    tokens, topk = (2300, 6) if ON_GPU else (8, 2)  # 287 rows an expert
    x, ids = activations(random, tokens, bank.width), choose(random, tokens, bank.experts, topk)
    weights = torch.rand(tokens, topk, generator=random).to(DEVICE)
    together = moe.routed_experts(x, ids, weights, bank, LIMIT, exact=True)
    for count in (1, 5, 64, 900) if ON_GPU else (1,):
        part = slice(2, 2 + count)
        alone = moe.routed_experts(x[part], ids[part], weights[part], bank, LIMIT, exact=True)
        assert torch.equal(alone, together[part]), count


def test_large_activations_are_clamped(random: torch.Generator, bank: ShuffledBank) -> None:
    x, ids = activations(random, 2, bank.width) * 1000, choose(random, 2, bank.experts, 1)
    weights = torch.ones(2, 1, device=DEVICE)
    plan = plan_experts(ids, bank.experts, 16)
    act = experts_up(quantize_for_experts(x), plan, weights, bank.up, LIMIT)
    assert act.abs().max() == 100  # silu(10) * 10 in bfloat16
    assert (act == 0).any(), "silu of a gate far below zero"


# -- the sum, and all of it ---------------------------------------------------------------------------------------


def test_outputs_are_added_by_rising_expert(random: torch.Generator) -> None:
    tokens, topk, width = 3, 4, 300
    ids = choose(random, tokens, 9, topk)
    plan = plan_experts(ids, 6, 16, 2)  # experts 2..7
    routed = poisoned(tokens * topk, width, dtype=torch.bfloat16)
    values = torch.randn(tokens * topk, width, generator=random).bfloat16().to(DEVICE) * 100
    shared = torch.randn(tokens, width, generator=random).bfloat16().to(DEVICE)
    expected = torch.zeros(tokens, width, device=DEVICE)
    for token in range(tokens):
        for expert, choice in sorted((int(number), at) for at, number in enumerate(ids[token])):
            if 2 <= expert < 8:
                slot = token * topk + choice
                routed[plan.places[slot]] = values[slot]
                expected[token] += values[slot].float()
    assert torch.equal(combine_experts(routed, plan, shared, topk), (expected + shared.float()).bfloat16())
    assert torch.equal(combine_experts(routed, plan, None, topk, dtype=torch.float32), expected)


def test_shared_activation_is_the_references(random: torch.Generator) -> None:
    x = (torch.randn(3, 384, generator=random) * 6).bfloat16().to(DEVICE)
    gate, up = x.chunk(2, 1)
    expected = fold_groups(*quantize_fp8(swiglu(gate, up, LIMIT).bfloat16()))
    assert relative_error(shared_swiglu(x, LIMIT).dense(), expected.dense()) < 2e-3  # a code at a rounding edge: 1/16


@pytest.mark.parametrize("tokens", [1, 16, 384] if ON_GPU else [4])
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
def test_mixture_equals_the_reference(random: torch.Generator, bank: ShuffledBank, tokens: int, skewed: bool) -> None:
    topk = 2
    x = activations(random, tokens, bank.width)
    ids = choose(random, tokens, 2 if skewed else bank.experts, topk)  # skewed: everybody to the first two
    weights = torch.rand(tokens, topk, generator=random).to(DEVICE)
    inner, width = bank.inner, bank.width

    def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        codes = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn).to(DEVICE)
        scales = torch.randint(115, 120, (rows // 32, columns // 32), dtype=torch.uint8, generator=random).to(DEVICE)
        codes, factors, _ = fold_fp8(codes, scales)
        return codes, factors, codes.float() * factors[:, None]

    up, down = fp8(2 * inner, width), fp8(width, inner)
    shared = moe.shared_expert(quantize_rows(x), (up[:2], down[:2]), LIMIT)
    y = moe.routed_experts(x, ids, weights, bank, LIMIT, shared=shared)
    expected = routed_experts(x, ids.long(), weights, bank.dense, LIMIT)
    w1, w3 = up[2].chunk(2)
    expected += expert_forward(x, w1, w3, down[2], LIMIT, None).float()
    # bfloat16 of the sum. On a GPU sums differ in the last bits, so that some activations fall on the other side of a
    # rounding edge: 1e-4 of them in front of FP8's steps of 1/16 makes sqrt(1e-4 / 16) = 2.5e-3, and more in a row.
    assert relative_error(y, expected) < (1e-2 if ON_GPU else 2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_captured_mixture_follows_its_inputs(random: torch.Generator, bank: ShuffledBank) -> None:
    x, ids = activations(random, 64, bank.width), choose(random, 64, bank.experts, 6)
    weights = torch.rand(64, 6, generator=random).to(DEVICE)
    moe.routed_experts(x, ids, weights, bank, LIMIT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe.routed_experts(x, ids, weights, bank, LIMIT)
    for other in (choose(random, 64, bank.experts, 6), torch.arange(6, device=DEVICE).int().expand(64, 6)):
        ids.copy_(other)
        graph.replay()
        assert torch.equal(y, moe.routed_experts(x, ids, weights, bank, LIMIT))


def test_codes_are_not_changed_by_a_view_of_another_type(random: torch.Generator) -> None:
    packed, scales = fp4(random, 64, 128)
    signed = shuffle(packed.view(torch.int8), scales)
    assert all(torch.equal(a, b) for a, b in zip(signed, shuffle(packed, scales), strict=True))
    assert unpack_fp4(packed).max() == 15
