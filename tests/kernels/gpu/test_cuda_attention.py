"""Attention in CUDA C++ against float64 over the same records, the reference and Triton's kernel: with inputs that are
meant to break it, and that the result of a row hangs on nothing but its own operands.

The stated error is 1.9e-3 of the norm of random results, of which their rounding to bf16 takes 1.65e-3. Every number of
every result is held to what its own operands allow (`attention_cases.assert_right`).
"""

from __future__ import annotations

import random

import pytest
import torch
from attention_cases import NAN_RECORD, ON_GPU, Case, Exact, assert_right, cuda_problem
from torch import Tensor
from twins import DEVICE, relative_error

from deepinfer.kernels.reference import records

problem = cuda_problem()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(problem is not None, reason=f"the CUDA kernels: {problem}")]

if problem is None:
    from deepinfer.kernels.cuda.attention import sparse_attention
    from deepinfer.kernels.triton import attention as triton_attention

HEADS, DIM = 64, 512
TOLERANCE = 1.9e-3
OFFICIAL = 3.2e-3  # from the official rounding points: rounds probabilities to bf16, and the result as well
SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count if ON_GPU else 132


def real(rows: int, window: int = 128, selected: int = 512, seed: int = 0, holes: float = 0.2) -> Case:
    return Case(rows, window, selected, HEADS, DIM, seed, holes)


def run(case: Case, dtype: torch.dtype = torch.int32, *, invariant: bool = False) -> Tensor:
    return case.run(sparse_attention, dtype, invariant=invariant)


def both(case: Case) -> list[Tensor]:
    """Lists as they are cut for the number of rows, and never cut."""
    return [run(case), run(case, invariant=True)]


@pytest.mark.parametrize("rows", [*range(1, 18), SMS // 4, SMS // 3, SMS // 2, SMS - 1, SMS, SMS + 1, 2 * SMS + 1])
def test_any_number_of_rows(rows: int) -> None:
    case = real(rows, seed=rows, holes=0.2 * (rows % 2))
    expected = case.exact()
    for invariant in (False, True):
        out = run(case, invariant=invariant)
        assert_right(out, expected)
        assert relative_error(out, expected.out) < TOLERANCE
        assert relative_error(out, case.expected(torch.float32)) < TOLERANCE
        assert relative_error(out, case.expected()) < OFFICIAL
        for dtype in (torch.int32, torch.int64, torch.int32):
            assert torch.equal(run(case, dtype, invariant=invariant), out)
    for row in {0, rows // 2, rows - 1}:  # `out` is the invariant one: whatever the rows beside it
        assert torch.equal(run(case.only([row]), invariant=True)[0], out[row])
    shuffled = torch.randperm(rows, device=DEVICE)
    assert torch.equal(run(case.only(shuffled), invariant=True), out[shuffled])


@pytest.mark.parametrize("window", [0, 1, 63, 64, 65, 127, 128, 133])
@pytest.mark.parametrize("selected", [0, 1, 63, 64, 65, 70, 511, 512])
def test_lists_of_any_length(window: int, selected: int) -> None:
    for rows, holes in ((5, 0.0), (SMS + 8, 0.3)):
        case = real(rows, window, selected, seed=window + selected, holes=holes)
        expected = case.exact()
        for out in both(case):
            assert_right(out, expected)


@pytest.mark.parametrize("rows", [5, SMS + 1])
def test_it_is_triton_s(rows: int) -> None:
    case = real(rows)
    by_triton = case.run(triton_attention.sparse_attention)
    for out in both(case):
        assert relative_error(out, by_triton) < OFFICIAL


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes_lists_and_queries(seed: int) -> None:
    draw = random.Random(seed)
    rows = draw.choice([draw.randint(1, 16), draw.randint(17, SMS), draw.randint(SMS, 3 * SMS)])
    case = real(rows, draw.randint(0, 140), draw.randint(0, 600), seed, draw.choice([0.0, 0.1, 0.9]))
    case.q *= draw.choice([0.1, 1.0, 10.0])
    case.sink *= draw.choice([0.0, 1.0, 10.0])
    for lists in case.lists:  # lists that end somewhere
        ends = torch.randint(0, lists.shape[1] + 1, (rows, 1), device=DEVICE)
        lists[torch.arange(lists.shape[1], device=DEVICE) >= ends] = -1
    expected = case.exact()
    for out in both(case):
        assert_right(out, expected)


@pytest.mark.parametrize("sink", [0.0, float("-inf")])
@pytest.mark.parametrize("selected", [0, 512])
def test_rows_without_keys_are_zero(selected: int, sink: float) -> None:
    case = real(6, selected=selected)
    case.sink[:] = sink
    for lists in case.lists:
        lists[[0, 3, 5]] = -1
    for out in both(case):
        assert (out[[0, 3, 5]] == 0).all()
        assert_right(out, case.exact())


@pytest.mark.parametrize("rows_at_once", [1, 5, 40])
def test_tiles_without_keys(rows_at_once: int) -> None:
    """Each tile of 64 alone, each one missing, and any of them."""
    alone = torch.eye(10, dtype=torch.bool, device=DEVICE)
    full = torch.cat((alone, ~alone, torch.rand(20, 10, device=DEVICE) < 0.5)).repeat_interleave(64, dim=1)
    case = real(40, holes=0.5)
    for lists, kept in zip(case.lists, full.split((128, 512), dim=1), strict=True):
        lists[~kept] = -1
    expected = case.exact()
    parts = [case.only(part) for part in torch.arange(40, device=DEVICE).split(rows_at_once)]
    for invariant in (False, True):
        assert_right(torch.cat([run(part, invariant=invariant) for part in parts]), expected)


@pytest.mark.parametrize(("window", "selected"), [(128, 512), (133, 70), (65, 1), (133, 0), (0, 65)])
def test_one_key_at_any_place(window: int, selected: int) -> None:
    """Row n has one key, at place n of its lists, and a sink."""
    case = real(window + selected, window, selected, holes=0.0)
    places = torch.eye(window + selected, dtype=torch.bool, device=DEVICE)
    for lists, here in zip(case.lists, places.split((window, selected), dim=1), strict=True):
        lists[~here] = -1
    expected = case.exact()
    for out in both(case):
        assert_right(out, expected)
    for few in torch.arange(window + selected, device=DEVICE).split(8)[::4]:
        assert_right(run(case.only(few)), Exact(*(x[few] for x in expected)))


@pytest.mark.parametrize("rows", [3, SMS + 1])
def test_all_keys_equal(rows: int) -> None:
    """One record that both formats hold exactly, and no sink: the result is the key, bit for bit."""
    case = real(rows, holes=0.1)
    steps = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6], device=DEVICE)
    key = steps[torch.randint(0, 7, (DIM,), device=DEVICE)] * (torch.randint(0, 2, (DIM,), device=DEVICE) * 2 - 1)
    key[::16] = 6.0  # of each group of a scale: so that the scale is 1
    for pool, lists, pack in zip(case.pools, case.lists, (records.pack_window, records.pack_compressed), strict=True):
        pool[1] = pack(key)
        lists[lists >= 0] = 1
    out = both(case)
    for one in out:
        assert_right(one, case.exact())
    case.sink[:] = float("-inf")
    for one in both(case):
        assert torch.equal(one, key.bfloat16().expand_as(one))


@pytest.mark.parametrize("factor", [0.0, 1e-6, 1e-3, 30.0, 1000.0, 1e5])
def test_huge_and_tiny_logits(factor: float) -> None:
    case = real(7, seed=5)
    case.q = (case.q * factor).clamp(-65_280, 65_280)  # 1e5: nearly all of them are at the limit of FP16
    for out in both(case):
        assert_right(out, case.exact())


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("factor", [0.5, 4.0, 30.0])
def test_logits_that_rise_or_fall_along_the_lists(factor: float, falling: bool) -> None:
    """A maximum that grows tile by tile, little or much, or that stands in the first tile."""
    case = real(6, holes=0.0)
    case.q = (case.q[:, :1] * factor).expand(-1, HEADS, -1).contiguous()
    for n, unpack in enumerate((records.unpack_window, records.unpack_compressed)):
        keys = unpack(case.pools[n][case.lists[n]])
        logits = torch.bmm(keys, case.q[:, 0].float().unsqueeze(2)).squeeze(2)
        case.lists[n] = case.lists[n].gather(1, logits.argsort(1, descending=falling))
    for out in both(case):
        assert_right(out, case.exact())


@pytest.mark.parametrize("value", [65_536.0, -65_536.0, 3e38, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rows", [6, SMS + 6])
def test_queries_beyond_fp16_make_their_row_nan_and_no_other(value: float, rows: int) -> None:
    case = real(rows, seed=1)
    clean = both(case)
    case.q[2, 7, 100] = case.q[rows - 2, 63, 511] = case.q[rows - 2, 0, 0] = value
    others = [row for row in range(rows) if row not in (2, rows - 2)]
    for out, before in zip(both(case), clean, strict=True):
        assert out[2, 7].isnan().all()
        assert out[rows - 2, [0, 63]].isnan().all()
        assert torch.equal(out[others], before[others])


@pytest.mark.parametrize("value", [65_536.0, -65_536.0])
def test_queries_beyond_fp16_are_seen_where_all_logits_are_on_one_side(value: float) -> None:
    """A logit of minus infinity for every key would be a row without keys."""
    case = real(3, 1, 0, holes=0.0)
    case.pools[0][case.lists[0][:, 0]] = records.pack_window(torch.full((DIM,), 2.0, device=DEVICE))
    case.q[1, 5, 9] = value
    for out in both(case):
        assert out[1, 5].isnan().all()
        assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("sink", [float("-inf"), -80.0, 60.0, 80.0, 1e4, -1e4])
def test_extreme_sinks(sink: float) -> None:
    case = real(9, seed=2)
    case.sink[::2] = sink
    case.q[1] *= 30.0
    case.q[2] *= 1e-3
    expected = case.exact()
    for out in both(case):
        assert_right(out, expected)


def test_records_that_no_list_names_are_not_read() -> None:
    case = real(SMS + 1, seed=3)
    outs = both(case)
    for byte in (NAN_RECORD, 0):
        case.pools = [blank_beside(pool, lists, byte) for pool, lists in zip(case.pools, case.lists, strict=True)]
        assert all(torch.equal(*pair) for pair in zip(both(case), outs, strict=True))


def blank_beside(pool: Tensor, lists: Tensor, byte: int) -> Tensor:
    kept = lists[lists >= 0].unique()
    blank = torch.full_like(pool, byte)
    blank[kept] = pool[kept]
    return blank


@pytest.mark.parametrize("requests", [1, 2, 64])
def test_block_of_drafts(requests: int) -> None:
    """Five queries of a request over its 128 window keys and the block's own five, every one of which sees them all."""
    case = real(5 * requests, 133, 0, holes=0.0)
    case.lists[0] = case.lists[0][::5].repeat_interleave(5, dim=0)
    expected = case.exact()
    for out in both(case):
        assert_right(out, expected)
        assert relative_error(out, case.expected()) < OFFICIAL


def test_every_code_and_scale_of_a_compressed_record() -> None:
    case = real(9, 0, 512)
    pool = case.pools[1]
    pool[:] = torch.randint(0, 256, pool.shape, device=DEVICE)
    pool[:, DIM // 2 :] %= 127  # e4m3 scales: positive numbers
    case.q *= 1e-3
    for out in both(case):
        assert_right(out, case.exact())


def test_window_scales_that_are_held_exactly() -> None:
    """Every code times every power of two from 2^-8 to 2^14, with queries that FP16 holds exactly as well."""
    case = real(9, 133, 0)
    pool = case.pools[0]
    pool[:] = torch.randint(0, 256, pool.shape, device=DEVICE)
    pool[pool % 128 == 127] = 1  # NaN is no code
    pool[:, DIM:] = torch.randint(127 - 8, 127 + 15, pool[:, DIM:].shape, device=DEVICE)
    case.q = ((case.q * 2.0**10).round() * 2.0**-24).to(torch.bfloat16)
    for out in both(case):
        assert_right(out, case.exact())
    pool[:, DIM:] = 127 + 14
    for out in both(case):
        assert_right(out, case.exact())


@pytest.mark.parametrize("scales", [(127 - 20, 127 - 20), (0, 127 - 9)])
def test_window_scales_below_that_are_held_to_an_absolute_error(scales: tuple[int, int]) -> None:
    """2^-18 of a value. (Every scale of the second range: together with compressed records, and alone.)"""
    for selected in (0, 70):
        case = real(9, 133, selected)
        scale_bytes = case.pools[0][:, DIM:]
        scale_bytes[:] = torch.randint(scales[0], scales[1] + 1, scale_bytes.shape, device=DEVICE)
        expected = case.exact()
        for out in both(case):
            assert_right(out, expected)
