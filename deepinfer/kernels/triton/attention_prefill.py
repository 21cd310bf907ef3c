"""Attention over keys that were unpacked before: for prefill, whose thousands of rows read every record many times.

A record is unpacked once a step (compressed ones once for all layers that read them) into a bf16 row in split order,
which holds its values exactly; the product then needs no arithmetic on keys. Decoding rows share too little for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.records import compressed_bytes, window_bytes
from deepinfer.kernels.triton.attention import KEYS, LOG2E, attend, quotient, tile_rows
from deepinfer.kernels.triton.attention_keys import compressed_tile, window_tile
from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.runtime import INTERPRET, launch

_LOG2E = tl.constexpr(LOG2E)
_NO_MAXIMUM = tl.constexpr(-1e30)
_UNPACK_ROWS = 16  # records a program unpacks: 16 KB written


def unpack_window(pool: Tensor, rows: Tensor | None = None) -> Tensor:
    """pool uint8 [R, D + D / 32] at rows int [M], None = all in order -> bf16 [M, D] in split order; -1 = zeros."""
    return _unpack(pool, rows, pool.shape[1] * 32 // 33, window=True)


def unpack_compressed(pool: Tensor, rows: Tensor | None = None) -> Tensor:
    """pool uint8 [R, D / 2 + D / 16] at rows int [M], None = all in order -> bf16 [M, D] in split order; -1 = zeros."""
    return _unpack(pool, rows, pool.shape[1] * 16 // 9, window=False)


def _unpack(pool: Tensor, rows: Tensor | None, size: int, *, window: bool) -> Tensor:
    width = (window_bytes if window else compressed_bytes)(size)
    if pool.dtype != torch.uint8 or pool.shape[1] != width or not pool.is_contiguous() or size not in (128, 256, 512):
        raise ValueError(f"no pool of packed records of 128, 256 or 512 values: {pool.dtype} {tuple(pool.shape)}")
    count = len(pool) if rows is None else len(rows)
    out = torch.empty(count, size, dtype=torch.bfloat16, device=pool.device)
    options = {"LISTED": rows is not None, "WINDOW": window, "D": size, "B": _UNPACK_ROWS, "num_warps": 4}
    grid = (triton.cdiv(count, _UNPACK_ROWS),)
    launch(_unpack_rows, grid, pool, pool if rows is None else rows, out, count, **options)
    return out


def serves_unpacked(q: Tensor, window_keys: Tensor, keys: Tensor | None) -> bool:
    """Whether `attention_unpacked` takes these: bf16 everywhere, 8, 16, 32 or 64 heads of 128, 256 or 512 dims."""
    pools = [window_keys] if keys is None else [window_keys, keys]
    fits = all(p.dtype == torch.bfloat16 and p.shape[1] == q.shape[2] and p.is_contiguous() for p in pools)
    return fits and unpacks_heads(q)


def unpacks_heads(q: Tensor) -> bool:
    """Whether it takes queries [N, heads, D], if the keys are."""
    heads, size = q.shape[1:]
    return q.dtype == torch.bfloat16 and heads in (8, 16, 32, 64) and size in (128, 256, 512)


def attention_unpacked(
    q: Tensor,
    window_keys: Tensor,
    window_indices: Tensor,
    keys: Tensor | None,
    indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """`sparse_attention` over keys that `unpack_window` and `unpack_compressed` gave: window_keys bf16 [R, D], keys
    bf16 [R2, D], both in split order, at window_indices [N, W] and indices [N, K] (row numbers of these, -1 = empty).

    q bf16 [N, heads, D] in split order -> the same shape. Bits of a row never depend on the rows beside it.
    """
    if not serves_unpacked(q, window_keys, keys):
        raise ValueError(f"queries {q.dtype} {tuple(q.shape)} over these keys are not served (see `serves_unpacked`)")
    if keys is None or indices is None:
        keys, indices = window_keys, window_indices[:, :0]
    indices = indices.to(window_indices.dtype)  # one loop reads both lists
    rows, heads, size = q.shape
    q, out = q.contiguous(), torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    window_tiles = triton.cdiv(window_indices.shape[1], KEYS)
    launch(
        _attention_unpacked,
        (rows,),
        *(q, window_keys, window_indices, keys, indices, sink, out, scale * LOG2E),
        *(window_indices.shape[1], indices.shape[1], window_tiles),
        *(window_tiles + triton.cdiv(indices.shape[1], KEYS), window_indices.stride(0), indices.stride(0)),
        HEADS=heads,
        TILE_HEADS=max(16, heads),
        D=size,
        B=KEYS,
        num_warps=8 if heads == 64 else 4,
    )
    return out


@triton.jit
def _unpack_rows(
    pool, rows, out, count, LISTED: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0) * B + tl.arange(0, B)
    inside = place < count
    row = tl.where(inside, place, -1)
    if LISTED:
        row = tl.load(rows + place, mask=inside, other=-1).to(tl.int32)
    keys = window_tile(pool, row, B, D) if WINDOW else compressed_tile(pool, row, B, D)
    keys = to_type(keys.to(tl.float32) * 2.0**64, tl.bfloat16)  # tiles hold values times 2^-64
    tl.store(out + place.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :], keys, mask=inside[:, None])


@triton.jit
def _attention_unpacked(
    q, window_keys, window_indices, keys, indices, sink, out, logit_scale,
    window, selected, window_tiles, tiles, window_stride, stride,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    window_indices += n * window_stride
    indices += n * stride
    head = tl.arange(0, TILE_HEADS)
    dim = tl.arange(0, D)
    here = head < HEADS
    places = head[:, None] * D + dim[None, :]
    if TILE_HEADS == HEADS:
        queries = tl.load(q + n * HEADS * D + places)
    else:
        queries = tl.load(q + n * HEADS * D + places, mask=here[:, None], other=0.0)
    if INTERPRET:
        queries = queries.to(tl.float32)
    top = tl.full([TILE_HEADS], _NO_MAXIMUM, tl.float32)
    total = tl.zeros([TILE_HEADS], tl.float32)
    acc = tl.zeros([TILE_HEADS, D], tl.float32)
    lists = window_indices, indices, window, selected, window_tiles
    next_rows = tile_rows(lists, 0, B)
    # Two stages: the next keys are on their way, and the second product still runs, until the next logits are waited
    # for. Its probabilities lie in registers that nothing writes before (looked up in the machine code).
    for tile in tl.range(0, tiles, num_stages=2):
        rows = next_rows
        next_rows = tile_rows(lists, tile + 1, B)
        source = window_keys if tile < window_tiles else keys
        wanted = source + rows.to(tl.int64)[:, None] * D + dim[None, :]
        values = tl.load(wanted, mask=(rows >= 0)[:, None], other=0.0)
        if INTERPRET:
            values = values.to(tl.float32)
        top, total, acc = attend(queries, values, rows >= 0, tile < tiles, top, total, acc, logit_scale)
    total += tl.exp2(tl.load(sink + head, mask=here, other=0.0) * _LOG2E - top)
    tl.store(out + n * HEADS * D + places, quotient(acc, total), mask=here[:, None])
