"""How attention in CUDA C++ is launched: from lists as they lie, on any stream, in graphs, beside other launches, into
memory that was something else; and what it refuses.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import ON_GPU, Case, assert_right, cuda_problem, natural, poison_freed_memory
from torch import Tensor
from twins import DEVICE

problem = cuda_problem()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(problem is not None, reason=f"the CUDA kernels: {problem}")]

if problem is None:
    from deepinfer.kernels.cuda.attention import serves, sparse_attention

HEADS, DIM = 64, 512
SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count if ON_GPU else 132


def real(rows: int, window: int = 128, selected: int = 512, seed: int = 0) -> Case:
    return Case(rows, window, selected, HEADS, DIM, seed)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [5, SMS + 1])
def test_lists_may_be_slices_and_rows_may_share_one(rows: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = real(rows, 70, 133)
    q, pool, window, kv_pool, chosen, sink, scale = case.inputs(dtype, kv_dtype)
    out = sparse_attention(q, pool, window, kv_pool, chosen, sink, scale)
    assert_right(natural(out), case.exact())
    wider = [torch.zeros(rows, lists.shape[1] + 8, dtype=lists.dtype, device=DEVICE) for lists in (window, chosen)]
    slices = [wide[:, 3:-5] for wide in wider]  # beside them: record 0, which is NAN_RECORD
    for part, lists in zip(slices, (window, chosen), strict=True):
        part.copy_(lists)
    beside = torch.cat((q, q), dim=1)[:, :HEADS]
    assert torch.equal(sparse_attention(beside, pool, slices[0], kv_pool, slices[1], sink, scale), out)
    shared = [lists[:1].expand(rows, -1) for lists in (window, chosen)]
    own = [lists.contiguous() for lists in shared]
    assert torch.equal(*(sparse_attention(q, pool, w, kv_pool, k, sink, scale) for w, k in (shared, own)))


@pytest.mark.parametrize("rows", [1, 6, SMS + 1])
@pytest.mark.parametrize("selected", [0, 512])
def test_a_graph_gives_the_bits_of_a_launch(rows: int, selected: int) -> None:
    first, second = (real(rows, selected=selected, seed=seed).inputs(torch.int32) for seed in (0, 4))
    expected = [sparse_attention(*inputs) for inputs in (first, second)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [sparse_attention(*first), sparse_attention(*first, invariant=True)]
    for inputs, right in zip((first, second), expected, strict=True):
        for held, new in zip(first, inputs, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(outs[0], right)
        assert torch.equal(outs[1], sparse_attention(*first, invariant=True))


def test_launches_of_all_kinds_behind_each_other_know_nothing_of_each_other() -> None:
    cases = [
        real(rows, *widths, seed=rows) for rows in (1, 6, 40, SMS + 1) for widths in ((128, 512), (133, 0), (0, 65))
    ]
    inputs = [case.inputs(torch.int32) for case in cases]
    right = []
    for one in inputs:
        right.append(sparse_attention(*one))
        torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            found = [sparse_attention(*one) for _ in range(4) for one in inputs]
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(found, right * 4, strict=True))


@pytest.mark.parametrize("rows", [1, 6, SMS + 1])
def test_inputs_may_be_written_right_before_and_right_behind_a_launch(rows: int) -> None:
    cases = [real(rows, seed=4 * seed).inputs() for seed in range(6)]  # of the same pools
    right = [sparse_attention(*inputs) for inputs in cases]
    torch.cuda.synchronize()
    held = [x.clone() if isinstance(x, Tensor) else x for x in cases[0]]
    spoiled = [torch.full_like(x, 0xFF if x.dtype == torch.uint8 else -1) for x in held[:-1]]
    found = []
    for inputs in cases * 5:
        for target, new in zip(held[:-1], inputs[:-1], strict=True):
            target.copy_(new)
        found.append(sparse_attention(*held))
        for target, new in zip(held[:-1], spoiled, strict=True):
            target.copy_(new)
    assert all(torch.equal(*pair) for pair in zip(found, right * 5, strict=True))


@pytest.mark.parametrize("rows", [1, 6, SMS // 4, SMS + 1])
@pytest.mark.parametrize("selected", [0, 512])
def test_hundreds_of_launches_give_the_same_bits(rows: int, selected: int) -> None:
    inputs = real(rows, selected=selected).inputs()
    right = sparse_attention(*inputs)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(300):
        different += (sparse_attention(*inputs) != right).sum()
    assert int(different) == 0


def test_memory_that_was_something_else_is_written_over() -> None:
    """That the poison of all tests here works: the result lies where the NaN were."""
    case = real(2)
    inputs = case.inputs()
    torch.cuda.empty_cache()
    poison_freed_memory(inputs[0])
    poisoned = torch.empty_like(inputs[0])
    address, poison = poisoned.data_ptr(), bool(poisoned.isnan().all())
    del poisoned
    out = sparse_attention(*inputs)
    assert (out.data_ptr(), poison) == (address, True)
    assert out.isfinite().all()


def test_what_is_served() -> None:
    case = real(2)
    q, pool, window, kv_pool, chosen, sink, scale = case.inputs()
    assert serves(q, pool, kv_pool) and serves(q, pool, None)
    wrong = [
        (q.float(), pool, kv_pool), (q[:, :32], pool, kv_pool), (q[..., :256], pool, kv_pool), (q, kv_pool, pool),
        (q, pool[:, :-1], kv_pool), (q, pool, kv_pool[::2]), (q.cpu(), pool.cpu(), None),
        (q, pool.view(torch.int8), None),
    ]  # fmt: skip
    for one in wrong:
        assert not serves(*one)
        with pytest.raises(ValueError, match="not served"):
            sparse_attention(one[0], one[1], window, one[2], chosen if one[2] is not None else None, sink, scale)
    assert sparse_attention(q[:0], pool, window[:0], kv_pool, chosen[:0], sink, scale).shape == (0, HEADS, DIM)
