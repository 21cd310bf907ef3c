"""Every kernel that goes to a pool of the cache finds rows beyond 2^31 bytes: what it reads or writes there is what it
reads or writes at the beginning, bit for bit.

Pools are as large as an H200 can have them: 2^31 bytes are 4.1 million window records, 7.5 million compressed ones and
31.6 million keys. Their memory is not initialised, but for the rows at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_device import CUDA, DEVICE, free_gpu, twins_alone
from torch import Tensor

pytest.importorskip("triton")

if CUDA:  # elsewhere nothing here runs
    from deepinfer.kernels.cuda import attention as cuda_attention
    from deepinfer.kernels.triton import attention as triton_attention
    from deepinfer.kernels.triton import index_keys, paging, records
    from deepinfer.kernels.triton.indexer import IndexQueries, choose_entries, plan_step

pytestmark = twins_alone

LIMIT = 1 << 31
WINDOW, COMPRESSED, KEY = 528, 288, 68  # bytes of a record
EDGE = 4096  # rows at both ends that hold something


@pytest.fixture(autouse=True)
def memory_comes_back() -> Iterator[None]:
    yield
    free_gpu()


def large_pool(width: int, align: int = 1) -> Tensor:
    """uint8 [rows, width] of somewhat more than 2^31 bytes, rows a multiple of `align`."""
    rows = LIMIT // width + 2 * EDGE
    return torch.empty(rows + -rows % align, width, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize(("insert", "width"), [("insert_window", WINDOW), ("insert_compressed", COMPRESSED)])
def test_records_are_written_far_away(insert: str, width: int) -> None:
    torch.manual_seed(0)
    pool, latents = large_pool(width), torch.randn(100, 512, device=DEVICE).bfloat16()
    near = torch.randperm(EDGE, device=DEVICE)[:100]
    far = len(pool) - 1 - near
    assert int(far.min()) * width > LIMIT
    write: Callable[[Tensor, Tensor, Tensor], None] = getattr(records, insert)
    pool[:EDGE] = pool[-EDGE:] = 0
    for rows in (near, far):
        write(latents, pool, rows)
    assert torch.equal(pool[near], pool[far])
    assert (pool[far] != 0).any(1).all()


@pytest.mark.parametrize("rows", [1, 6, 200])  # decode, verify, a chunk of a prompt
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("family", ["triton", "cuda"])
def test_attention_reads_far_away(rows: int, dtype: torch.dtype, family: str) -> None:
    torch.manual_seed(1)
    if family == "cuda" and (problem := cuda_attention.problem(torch.device("cuda"))):
        pytest.skip(problem)
    sparse_attention = {"triton": triton_attention, "cuda": cuda_attention}[family].sparse_attention
    pools = []
    for width, insert in ((WINDOW, "insert_window"), (COMPRESSED, "insert_compressed")):
        pool, all_rows = large_pool(width), torch.arange(EDGE, device=DEVICE)
        latents = torch.randn(EDGE, 512, device=DEVICE).bfloat16()
        for first in (0, len(pool) - EDGE):
            getattr(records, insert)(latents, pool, all_rows + first)
        pools.append(pool)
    lists = [torch.randint(0, EDGE, (rows, count), device=DEVICE) for count in (128, 512)]
    q, sink = torch.randn(rows, 64, 512, device=DEVICE).bfloat16(), torch.randn(64, device=DEVICE)
    found = []
    for far in (False, True):
        window, chosen = (
            (named + far * (len(pool) - EDGE)).to(dtype) for named, pool in zip(lists, pools, strict=True)
        )
        found.append(sparse_attention(q, pools[0], window, pools[1], chosen, sink, 512**-0.5))
    assert torch.equal(*found)
    assert found[0].isfinite().all() and (found[0] != 0).any()


@pytest.mark.parametrize("rows_of_a_chunk", [1, 6, 150])
@pytest.mark.parametrize("per_block", [64, 128])
def test_index_keys_are_written_and_chosen_far_away(per_block: int, rows_of_a_chunk: int) -> None:
    torch.manual_seed(2)
    pool, entries = large_pool(KEY, per_block), 3000
    blocks = -(-entries // per_block)
    keys = torch.randn(blocks * per_block, 128, device=DEVICE).bfloat16()
    near = torch.randperm(blocks, device=DEVICE) + 1
    far = len(pool) // per_block - near
    assert (int(far.min()) + 1) * per_block * KEY > LIMIT
    places = torch.arange(per_block, device=DEVICE)
    ratio, count = 128 // per_block, rows_of_a_chunk
    positions = torch.arange(entries * ratio - count, entries * ratio, device=DEVICE)
    (plan,) = plan_step(
        positions, torch.zeros_like(positions), torch.full_like(positions, int(positions[0])), chunks=1, ratio=ratio,
        topk=512, max_entries=entries,
    )  # fmt: skip
    (inside,) = plan_step(
        positions, torch.zeros_like(positions), torch.full_like(positions, int(positions[0])), chunks=1, ratio=ratio,
        topk=512, max_entries=entries, candidate_blocks=128,
    )  # fmt: skip
    codes, factors = index_keys.pack_queries(torch.randn(count, 32, 128, device=DEVICE).bfloat16())
    queries = IndexQueries(codes, torch.randn(count, 32, device=DEVICE) * factors)
    found = []
    for table in (near, far):
        index_keys.insert_keys(keys, pool, (table[:, None] * per_block + places).flatten(), per_block)
        chosen, published = choose_entries(queries, pool, table[None], per_block, (plan,), publish=2048)
        assert published is not None
        offered = published[:, :128].contiguous()
        limited, _ = choose_entries(queries, pool, table[None], per_block, (inside,), candidates=offered)
        found.append((chosen, published, limited))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert int(found[0][0].max()) > entries // 2


def test_rows_are_copied_far_away() -> None:
    torch.manual_seed(3)
    pool = large_pool(WINDOW)
    pool[:EDGE] = torch.randint(0, 256, (EDGE, WINDOW), device=DEVICE, dtype=torch.uint8)
    sources = torch.randperm(EDGE, device=DEVICE)[:500]
    targets = len(pool) - 1 - sources
    paging.copy_rows(pool, targets, sources)
    assert torch.equal(pool[targets], pool[sources])
    pool[:EDGE] = 0
    paging.copy_rows(pool, sources, targets)
    assert torch.equal(pool[targets], pool[sources])


def test_staged_rows_of_every_layer_take_their_places() -> None:
    """Five layers of 2^31 bytes each and more: places lie beyond 2^33 bytes, 2^31 words of four."""
    torch.manual_seed(4)
    rows, ring, staging = LIMIT // WINDOW + EDGE, 134, LIMIT // WINDOW
    pool = torch.empty(5, rows, WINDOW, dtype=torch.uint8, device=DEVICE)
    staged = torch.randint(0, 256, (5, 60, WINDOW), device=DEVICE, dtype=torch.uint8)
    pool[:, staging : staging + 60] = staged
    last = staging // ring - 1  # the slot whose ring lies last
    slots = torch.tensor([0] * 30 + [last] * 30, device=DEVICE)
    positions = torch.cat((torch.arange(100, 130), torch.arange(1000, 1030))).to(DEVICE)
    paging.commit_window(pool, positions, slots, ring, staging)
    assert torch.equal(pool[:, slots * ring + positions % ring], staged)
