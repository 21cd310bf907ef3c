"""Triton's quantisers, norms and rotations against the reference: codes, scales and rotated values are its bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twins import DEVICE, relative_error

from deepinfer.kernels.reference import norm as reference_norm
from deepinfer.kernels.reference import quant
from deepinfer.kernels.reference import rope as reference_rope
from deepinfer.kernels.triton import norm, quantize, rope
from deepinfer.kernels.triton.quantize import Fp8Rows
from deepinfer.kernels.triton.records import insert_window

EPS = 1e-20


def rows_with_edges(rows: int, width: int, seed: int) -> Tensor:
    """bf16 [rows, width] whose groups differ by octaves; a row of zeros, a tiny one, one with an empty group, a huge
    value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.exp(1.5 * torch.randn(width, generator=generator))
    x[0] = 0
    x[1] *= 1e-7
    x[2, :32] = 0
    x[3, -1] = 1e30
    return x.to(DEVICE, torch.bfloat16)


def assert_same_rows(out: Fp8Rows, x: Tensor) -> None:
    """out is Q8 of x, folded."""
    expected = quantize.fold_groups(*quant.quantize_fp8(x))
    assert torch.equal(out.scale, expected.scale)
    assert torch.equal(out.codes.float(), expected.codes.float())


def assert_within_one_step(out: Tensor, expected: Tensor) -> None:
    """bf16 values next to each other at most (float32 sums in another order), and few of those."""
    assert out.dtype == expected.dtype and out.shape == expected.shape
    gap = (out.float() - expected.float()).abs()
    assert bool((gap <= 2.0**-7 * expected.float().abs()).all())
    assert float((gap > 0).float().mean()) < 0.01


@pytest.mark.parametrize("width", [32, 96, 1280])
def test_codes_and_scales_are_the_references_moved_to_one_scale_per_row(width: int) -> None:
    x = rows_with_edges(6, width, seed=width)
    assert_same_rows(quantize.quantize_rows(x), x)


def test_rows_of_a_wider_tensor_and_no_rows_at_all() -> None:
    wide = rows_with_edges(5, 128, seed=1)
    assert_same_rows(quantize.quantize_rows(wide[:, 64:]), wide[:, 64:])
    assert quantize.quantize_rows(wide[:0]).codes.shape == (0, 128)


def test_a_width_that_does_not_fit_the_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="40 values"):
        quantize.quantize_rows(torch.zeros(1, 40, device=DEVICE, dtype=torch.bfloat16))


def test_folding_changes_an_operand_by_less_than_1e_6() -> None:
    x = torch.randn(64, 1280, generator=torch.Generator().manual_seed(0))
    x *= torch.exp(0.7 * torch.randn(1280, generator=torch.Generator().manual_seed(1)))
    codes, scale = quant.quantize_fp8(x.to(torch.bfloat16))
    assert relative_error(quantize.fold_groups(codes, scale).dense(), quant.dequantize_fp8(codes, scale)) < 1e-6


@pytest.mark.parametrize("shape", [(64, 96), (50, 70), (3, 33)])
def test_a_folded_weight_is_the_stored_one_where_scales_are_near_and_counts_what_is_not(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    tiles = [-(-size // 32) for size in shape]
    codes = (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)
    near = torch.randint(118, 121, tiles, generator=generator).to(torch.uint8)
    folded, factors, changed = quantize.fold_fp8(codes, near)
    values = quant.dequantize_fp8_tiles(codes, near)
    different = int((folded.float() * factors.unsqueeze(1) != values).sum())
    assert changed == different
    assert relative_error(folded.float() * factors.unsqueeze(1), values) < 1e-4
    assert bool((folded.float().abs().amax(1) > 200).all())  # no row has an octave of room left

    equal = torch.full(tiles, 119, dtype=torch.uint8)
    folded, factors, changed = quantize.fold_fp8(codes, equal)
    assert changed == 0
    assert torch.equal(folded.float() * factors.unsqueeze(1), quant.dequantize_fp8_tiles(codes, equal))


def test_tiles_of_a_weight_that_are_far_below_the_rows_largest_are_counted_as_changed() -> None:
    codes = torch.full((32, 64), 1.125).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 107]], dtype=torch.uint8)  # the second 32 x 32 is 2^-20 of the first
    folded, factors, changed = quantize.fold_fp8(codes, scales)
    assert changed == 32 * 32
    assert torch.equal(folded.float()[:, :32] * factors.unsqueeze(1), codes.float()[:, :32])
    assert not folded.float()[:, 32:].any()


def test_a_power_of_two_is_its_own_and_zero_becomes_one() -> None:
    x = torch.tensor([0.0, 1.0, 1.01, 0.25, 3.0])
    assert quantize.power_of_two_above(x).tolist() == [1.0, 1.0, 2.0, 0.25, 4.0]


@pytest.mark.parametrize("width", [64, 1280])
def test_norms_and_the_codes_of_the_rounded_norm(width: int) -> None:
    x = rows_with_edges(6, width, seed=2)[:5]
    x[3, -1] = 1.0
    weight = torch.randn(width, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected = reference_norm.rms_norm(x, weight, EPS)
    assert_within_one_step(norm.rms_norm(x, weight, EPS), expected)
    heads = norm.rms_norm(x.unsqueeze(1), weight, EPS)
    assert heads.shape == (5, 1, width) and torch.equal(heads.squeeze(1), norm.rms_norm(x, weight, EPS))
    normed, rows = quantize.rms_norm_quantize(x, weight, EPS)
    assert_within_one_step(normed, expected)
    assert_same_rows(rows, normed)


def angles(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(rows) * 7919
    cos, sin = reference_rope.rope_angles(positions, reference_rope.rope_frequencies(dim, 10000.0))
    return cos.to(DEVICE), sin.to(DEVICE)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "dim"), [(3, 32, 16), (17, 64, 64)])
def test_rotations_in_natural_and_in_split_order(heads: int, head_dim: int, dim: int, inverse: bool) -> None:
    cos, sin = angles(4, dim)
    x = torch.randn(4, heads, head_dim, generator=torch.Generator().manual_seed(heads)).to(DEVICE, torch.bfloat16)
    expected = reference_rope.apply_rope(x, cos, sin, inverse=inverse)
    natural = rope.apply_rope(x, cos, sin, inverse=inverse)
    row_alone = rope.apply_rope(x[:, 0].contiguous(), cos, sin, inverse=inverse)
    order = rope.split_order(head_dim).to(DEVICE)
    split = rope.rope_split_(x[..., order].contiguous(), cos, sin, inverse=inverse)
    for out, want in ((natural, expected), (row_alone, expected[:, 0]), (split, expected[..., order])):
        assert torch.equal(out, want)


@pytest.mark.parametrize("splits", [0, 3])
def test_norms_behind_the_merged_projection(splits: int) -> None:
    rank, head_dim, rows = 96, 64, 4
    generator = torch.Generator().manual_seed(4)
    cos, sin = angles(rows, 16)
    q_norm, kv_norm = (torch.randn(size, generator=generator).to(DEVICE) for size in (rank, head_dim))
    merged = torch.randn(max(splits, 1), rows, rank + head_dim, generator=generator).to(DEVICE, torch.bfloat16)
    given = merged.float() if splits else merged[0]
    summed = merged.float().sum(0).to(torch.bfloat16)

    latent, codes, window = norm.query_norms(given, q_norm, kv_norm, EPS, cos, sin)

    expected = reference_norm.rms_norm(summed[:, :rank].contiguous(), q_norm, EPS)
    turned = reference_rope.apply_rope(reference_norm.rms_norm(summed[:, rank:], kv_norm, EPS), cos, sin)
    assert_within_one_step(latent, expected)
    assert relative_error(window, turned) < 1e-4  # a norm that was rounded the other way is seen in both of a pair
    assert_same_rows(codes, latent)
    pools = [torch.full((rows + 2, head_dim + head_dim // 32), 7, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    insert_window(window, pools[0], torch.arange(1, rows + 1, device=DEVICE))
    again, _, places = norm.query_norms(given, q_norm, kv_norm, EPS, cos, sin, pools[1][1:-1])
    assert places.data_ptr() == pools[1][1:].data_ptr()
    assert torch.equal(*pools)
    assert torch.equal(again, latent)
