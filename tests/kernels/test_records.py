"""A packed record gives back the very values that the bfloat16 numerics computed with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels import select
from deepinfer.kernels.reference import quant, records

CASES = settings(max_examples=60, deadline=None)
KINDS = {
    "window": (records.pack_window, records.unpack_window, quant.fake_quantize_fp8, records.window_bytes),
    "compressed": (
        records.pack_compressed,
        records.unpack_compressed,
        quant.fake_quantize_fp4_e4m3,
        records.compressed_bytes,
    ),
    "key": (records.pack_key, records.unpack_key, quant.fake_quantize_fp4_e8m0, records.key_bytes),
}
by_kind = pytest.mark.parametrize("kind", KINDS)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, and -0.0 is not 0.0."""
    return torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))


@by_kind
@CASES
@given(scale=st.floats(-30, 8), spread=st.floats(0, 6), rows=st.integers(1, 5), seed=st.integers(0, 9999))
def test_rounded_values_come_back_bit_for_bit_at_any_size(kind, scale, spread, rows, seed):
    pack, unpack, fake, size = KINDS[kind]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 128, generator=g) * 2.0**scale * torch.exp2(-spread * torch.rand(rows, 128, generator=g))
    rounded = fake(x.bfloat16())
    packed = pack(rounded)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, size(128))
    assert same_bits(unpack(packed), rounded)
    assert torch.equal(pack(unpack(packed)), packed)


def test_every_scale_and_every_code_of_a_compressed_record_survives():
    """All 126 positive e4m3 scales times all groups whose largest code is 6 or 4: the second kind is what a scale that
    was rounded up leaves, and where a second rounding would lose."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for largest in (6.0, 4.0):
        codes = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, largest, -0.5, -1, -1.5, -2, -3, -4, -largest, -0.0])
        values = scales.unsqueeze(1) * codes
        assert same_bits(records.unpack_compressed(records.pack_compressed(values)), values)


def test_a_scale_that_was_rounded_up_is_found_again():
    """amax / 6 = 1.55 smallest steps, the nearest scale is 2 of them, and 9.3 / 2 rounds to code 4: from the largest
    value, 8, one division by 6 gives scale 1, at which 8 does not exist."""
    step = 2.0**-9
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([9.3, -6.1, 1.0]) * step
    rounded = quant.fake_quantize_fp4_e4m3(x)
    assert rounded.max() == 8 * step
    assert not torch.equal(quant.fake_quantize_fp4_e4m3(rounded), rounded)  # rounding twice loses
    assert same_bits(records.unpack_compressed(records.pack_compressed(rounded)), rounded)


@by_kind
def test_zeros_and_the_largest_values_survive(kind):
    pack, unpack, fake, _ = KINDS[kind]
    for x in (torch.zeros(1, 64), torch.full((1, 64), -0.0), torch.full((1, 64), 3e4), torch.full((2, 64), -1e-6)):
        assert same_bits(unpack(pack(fake(x))), fake(x))


def test_records_have_the_sizes_of_the_release():
    assert [records.window_bytes(512), records.compressed_bytes(512), records.key_bytes(128)] == [528, 288, 68]


def test_attention_and_index_scores_over_packed_pools_are_those_over_rounded_values():
    g = torch.Generator().manual_seed(3)
    window = quant.fake_quantize_fp8(torch.randn(40, 64, generator=g).bfloat16())
    compressed = quant.fake_quantize_fp4_e4m3(torch.randn(50, 64, generator=g).bfloat16())
    keys = quant.fake_quantize_fp4_e8m0(torch.randn(30, 64, generator=g).bfloat16())
    q, sink = torch.randn(3, 4, 64, generator=g).bfloat16(), torch.randn(4, generator=g)
    near = torch.randint(-1, 40, (3, 16), generator=g)
    far = torch.randint(-1, 50, (3, 8), generator=g)
    plain = select.sparse_attention(q, window, near, compressed, far, sink, 0.1)
    packed_pools = records.pack_window(window), records.pack_compressed(compressed)
    packed = select.sparse_attention(q, packed_pools[0], near, packed_pools[1], far, sink, 0.1)
    assert torch.equal(plain, packed)
    queries, weights = q[:2].unsqueeze(1), torch.randn(2, 1, 4, generator=g).bfloat16()
    rows, visible = torch.randint(0, 30, (2, 20), generator=g), torch.tensor([[20], [7]])
    plain = select.index_scores(queries, keys, rows, weights, visible)
    packed = select.index_scores(queries, records.pack_key(keys), rows, weights, visible)
    assert torch.equal(plain, packed)


def test_what_an_empty_index_points_at_is_never_read():
    """-1 reads no row at all: not even the NaN that an unwritten record may hold."""
    pool = torch.randn(4, 16)
    pool[0] = float("nan")
    q, sink = torch.randn(1, 4, 16), torch.zeros(4)
    indices = torch.tensor([[1, 2, -1]])
    for run in (select.sparse_attention, _on_the_reference_path):
        got = run(q, pool, indices, None, None, sink, 1.0)
        assert torch.equal(got, run(q, pool, indices[:, :2], None, None, sink, 1.0))


def _on_the_reference_path(*arguments) -> torch.Tensor:
    with select.reference_only():
        return select.sparse_attention(*arguments)
