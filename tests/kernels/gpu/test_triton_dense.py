"""Triton's FP8 products against float64 products of the same operands.

What is left is the rounding of the result to bf16 (1.65e-3 of a random one) and, on a GPU, the short accumulator of FP8
products, which the kernels leave every 128 or 256 values of K.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twins import DEVICE, relative_error

from deepinfer.kernels.reference import quant
from deepinfer.kernels.reference.rope import apply_rope, rope_angles, rope_frequencies
from deepinfer.kernels.triton import dense, dense_wide, grouped_output, norm
from deepinfer.kernels.triton.dense import Tile
from deepinfer.kernels.triton.dense_wide import WideTile
from deepinfer.kernels.triton.quantize import Fp8Rows, fold_fp8, fold_groups
from deepinfer.kernels.triton.rope import split_order

BF16_ROUNDING = 2e-3
ON_GPU = DEVICE.type == "cuda"

Weight = tuple[Tensor, Tensor]


def some_rows(rows: int, width: int, seed: int = 0) -> Fp8Rows:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    codes = fold_groups(*quant.quantize_fp8(x.to(torch.bfloat16)))
    return Fp8Rows(codes.codes.to(DEVICE), codes.scale.to(DEVICE))


def some_weight(outputs: int, width: int, seed: int = 1) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(outputs, width, generator=generator) * 60).to(torch.float8_e4m3fn)
    tiles = (-(-outputs // 32), -(-width // 32))
    scales = torch.randint(117, 121, tiles, generator=generator).to(torch.uint8)
    folded, factors, _ = fold_fp8(codes, scales)
    return folded.to(DEVICE), factors.to(DEVICE)


def dense_weight(weight: Weight) -> Tensor:
    codes, factors = weight
    return codes.double() * factors.double().unsqueeze(1)


def exact(rows: Fp8Rows, weight: Weight) -> Tensor:
    return rows.dense().double() @ dense_weight(weight).t()


def some_angles(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    cos, sin = rope_angles(torch.arange(rows) * 7919 + 3, rope_frequencies(dim, 10000.0))
    return cos.to(DEVICE), sin.to(DEVICE)


SMALL = [(1, 64, 128), (5, 96, 160), (17, 40, 320), (33, 130, 64)]
LARGE = [(1, 1792, 5120), (8, 32768, 1280), (37, 5120, 8192), (130, 4608, 5120), (384, 5120, 2304), (700, 4096, 1280)]
LARGE += [(100, 5120, 8192), (200, 4424, 1312), (333, 1792, 5120), (500, 4608, 5120), (192, 25600, 6144)]  # wide tiles


@pytest.mark.parametrize("shape", LARGE if ON_GPU else SMALL)
def test_products_of_any_shape_are_exact_up_to_the_rounding_of_the_result(shape: tuple[int, int, int]) -> None:
    count, outputs, width = shape
    rows, weight = some_rows(count, width), some_weight(outputs, width)
    out = dense.fp8_linear(rows, *weight)
    assert out.dtype == torch.bfloat16 and out.shape == (count, outputs)
    assert relative_error(out, exact(rows, weight)) < BF16_ROUNDING


@pytest.mark.parametrize("tile", [Tile(32, 16, 64, 1, 2, 4), Tile(32, 16, 64, 3, 2, 4), Tile(64, 32, 32, 4, 2, 4)])
def test_any_tile_gives_the_same_product(tile: Tile) -> None:
    rows, weight = some_rows(19, 224), some_weight(72, 224)
    for _ in range(1 if not ON_GPU else 10):
        out = dense._product(rows, *weight, tile)
        out = dense.add_parts(out) if tile.splits > 1 else out
        assert relative_error(out, exact(rows, weight)) < BF16_ROUNDING


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_alone_has_the_bits_that_it_has_among_others(splits: int) -> None:
    rows, weight = some_rows(20, 128), some_weight(32, 128)
    tile = Tile(32, 32, 32, splits, 2, 4)
    together = dense._product(rows, *weight, tile)
    for row in (0, 19):
        alone = Fp8Rows(rows.codes[row : row + 1], rows.scale[row : row + 1])
        assert torch.equal(dense._product(alone, *weight, tile._replace(tokens=16))[..., 0, :], together[..., row, :])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: hours in the interpreter")
@pytest.mark.parametrize(("outputs", "width"), [(1792, 5120), (32768, 1280), (5120, 2304)])
def test_bits_do_not_depend_on_the_number_of_rows(outputs: int, width: int) -> None:
    rows, weight = some_rows(600, width), some_weight(outputs, width)
    whole = dense.fp8_linear(rows, *weight, invariant=True)
    for count in (1, 8, 33, 65, 100, 128, 192, 256, 384, 512):
        part = dense.fp8_linear(Fp8Rows(rows.codes[:count], rows.scale[:count]), *weight, invariant=True)
        assert torch.equal(part, whole[:count])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="Gluon is not interpreted")
@pytest.mark.parametrize("tile", dense_wide.TILES)
@pytest.mark.parametrize(("outputs", "width", "depth", "splits"), [(1792, 5120, 256, 4), (4480, 1280, 128, 1)])
def test_wide_tiles_give_the_bits_of_decode(tile: WideTile, outputs: int, width: int, depth: int, splits: int) -> None:
    rows, weight = some_rows(333, width), some_weight(outputs, width)
    expected = dense._product(rows, *weight, Tile(64, 64, depth, splits, 3, 4))
    for _ in range(5):
        poison = torch.full_like(expected, float("nan"))
        del poison  # what is allocated next stands where it stood
        out = dense_wide.wide_product(rows, *weight, tile, depth=depth, splits=splits)
        assert torch.equal(out, expected)
    few = dense_wide.wide_product(Fp8Rows(rows.codes[:70], rows.scale[:70]), *weight, tile, depth=depth, splits=splits)
    assert torch.equal(few, expected[..., :70, :])


def test_tiles_for_some_hundred_rows_fill_the_processors() -> None:
    # Rounds over 132 processors x 64 x 64 pieces of a tile, by hand: wo_b, 384 rows: 120 tiles of 4 in one round.
    assert dense_wide.choose_wide(384, 5120, 1) == WideTile(2, 2)
    assert dense_wide.choose_wide(128, 5120, 1) == WideTile(2, 1)  # 80 tiles of 2, not 40 of 4
    assert dense_wide.choose_wide(512, 5120, 1) == WideTile(3, 2)  # 120 tiles of 6, not two rounds of 4
    assert dense_wide.choose_wide(384, 32768, 1) == WideTile(3, 2)  # four rounds of 6 or six of 4
    assert dense_wide.choose_wide(256, 32768, 1) == WideTile(2, 2)
    assert dense_wide.choose_wide(384, 1792, 1, halves=True) == WideTile(2, 2)
    assert dense.library_rows(25600, 6144) == 193 and dense.library_rows(32768, 1280) == 513
    assert dense.whole(384, 1792) and not dense.whole(256, 1792) and not dense.whole(384, 512)
    assert not dense_wide.serves(some_weight(130, 256)[0], 256)  # no whole tiles


def test_no_rows_give_no_rows() -> None:
    assert dense.fp8_linear(some_rows(2, 64), *some_weight(32, 64))[:0].shape == (0, 32)
    empty = Fp8Rows(some_rows(2, 64).codes[:0], some_rows(2, 64).scale[:0])
    assert dense.fp8_linear(empty, *some_weight(32, 64)).shape == (0, 32)


def test_parts_of_a_cut_sum_and_the_norms_that_add_them() -> None:
    count, rank, head_dim = (40, 1280, 512) if ON_GPU else (3, 64, 32)
    width = 5120 if ON_GPU else 4096
    rows, weight = some_rows(count, width), some_weight(rank + head_dim, width)
    cos, sin = some_angles(count, 16)
    q_norm, kv_norm = torch.ones(rank, device=DEVICE), torch.ones(head_dim, device=DEVICE)
    parts = dense.split_sums(rows, *weight)
    assert parts.dim() == 3 and parts.dtype == torch.float32
    whole = dense.fp8_linear(rows, *weight)
    cut = norm.query_norms(parts, q_norm, kv_norm, 1e-20, cos, sin)
    one = norm.query_norms(whole, q_norm, kv_norm, 1e-20, cos, sin)
    assert torch.equal(cut[0], one[0]) and torch.equal(cut[2], one[2])
    assert torch.equal(cut[1].codes.float(), one[1].codes.float()) and torch.equal(cut[1].scale, one[1].scale)


@pytest.mark.parametrize("count", [5, 40] if not ON_GPU else [1, 40, 128, 192, 384, 512])
def test_queries_leave_rotated_as_a_product_and_a_rotation_leave_them(count: int) -> None:
    heads, head_dim, width, dim = (64, 512, 1280, 64) if ON_GPU else (2, 64, 64, 32)
    rows, weight = some_rows(count, width), some_weight(heads * head_dim, width)
    order = split_order(head_dim)
    codes = weight[0].view(torch.uint8).unflatten(0, (heads, head_dim))[:, order].flatten(0, 1)
    factors = weight[1].unflatten(0, (heads, head_dim))[:, order].flatten()
    split = codes.view(torch.float8_e4m3fn).contiguous(), factors.contiguous()
    cos, sin = some_angles(count, dim)
    plain = dense.fp8_linear(rows, *weight, invariant=True).unflatten(1, (heads, head_dim))
    expected = apply_rope(plain, cos, sin)[..., order]
    assert torch.equal(dense.fp8_queries(rows, *split, cos, sin, head_dim, invariant=True), expected)
    if not ON_GPU:  # its own tile is too deep for so small a head: once more with one that turns in the product
        tile = Tile(32, 16, 32, 1, 2, 4)
        turned = dense._product(rows, *split, tile, turn=(cos, sin, head_dim)).unflatten(1, (heads, head_dim))
        assert torch.equal(turned, expected)


def output_case(count: int, heads: int, head_dim: int, groups: int, rank: int) -> tuple[Tensor, Weight, Tensor]:
    """o in natural order, the weight as stored, and the same in natural order (float64 [groups, rank, K])."""
    o = torch.randn(count, heads, head_dim, generator=torch.Generator().manual_seed(7)).to(DEVICE, torch.bfloat16)
    codes, factors = some_weight(groups * rank, heads // groups * head_dim, seed=8)
    order = grouped_output.column_order(head_dim).to(DEVICE)
    stored = codes.view(torch.uint8).unflatten(1, (-1, head_dim))[..., order].flatten(1).contiguous()
    natural = dense_weight((codes, factors)).unflatten(0, (groups, rank))
    return o, (stored.view(torch.float8_e4m3fn), factors), natural


SHAPES = (
    [(1, 2, 128, 1, 32), (5, 8, 128, 2, 48), (3, 2, 256, 1, 32), (2, 1, 512, 1, 32)]
    if not ON_GPU
    else [(n, 64, 512, 8, 1024) for n in (1, 37, 64, 300, 700)]
)


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_turned_back_and_go_through_their_groups_matrix(shape: tuple[int, int, int, int, int]) -> None:
    count, _, head_dim, groups, rank = shape
    o, weight, natural = output_case(*shape)
    cos, sin = some_angles(count, 64 if ON_GPU else 32)
    turned = apply_rope(o, cos, sin, inverse=True).double().view(count, groups, -1)
    expected = torch.einsum("ngk,grk->ngr", turned, natural).flatten(1)
    split = o[..., split_order(head_dim).to(DEVICE)].contiguous()
    for _ in range(5 if ON_GPU else 1):
        out = grouped_output.grouped_output(split.clone(), *weight, cos, sin, groups)
        assert out.shape == (count, groups * rank) and out.dtype == torch.bfloat16
        assert relative_error(out, expected) < BF16_ROUNDING
    rotated = grouped_output.rope_split_(split.clone(), cos, sin, inverse=True)
    rows = grouped_output.grouped_rows(split.clone(), *weight, cos, sin, groups)
    same = fold_groups(*quant.quantize_fp8(out))
    assert torch.equal(rows.codes.float(), same.codes.float()) and torch.equal(rows.scale, same.scale)
    library = grouped_output.library_product(rotated, grouped_output.widen(*weight), groups)
    assert relative_error(library, expected) < BF16_ROUNDING
    alone = grouped_output.grouped_output(split[:1].clone(), *weight, cos[:1], sin[:1], groups, invariant=True)
    among = grouped_output.grouped_output(split.clone(), *weight, cos, sin, groups, invariant=True)
    assert torch.equal(alone, among[:1])


def test_a_head_that_is_no_whole_number_of_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        grouped_output.column_order(192)
