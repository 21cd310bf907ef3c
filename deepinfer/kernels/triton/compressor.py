"""Compressed latents on the device (model specification 2.5): pairs of tokens pooled and normalised, and which rows of
a step close a pair, worked out by the kernel so that a CUDA graph needs no plan of the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import launch


class ClosedPairs(NamedTuple):
    """Of every row of a step. Rows that close nothing, or nothing new, have -1 in both lists."""

    latents: Tensor  # bf16 [N, D], normalised, before RoPE; zeros where a row closes nothing
    positions: Tensor  # int64 [N]: of the pair's first token, for RoPE
    targets: Tensor  # int64 [N]: the entry's row in the pools


@triton.jit
def _pooled(first_value, first_gate, second_value, second_gate, weight, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Softmax of two gates over two values, rounded to dtype, normalised: [D]."""
    most = tl.maximum(first_gate, second_gate)
    first, second = tl.exp(first_gate - most), tl.exp(second_gate - most)
    pooled = (first * first_value + second * second_value) / (first + second)
    v = pooled.to(dtype).to(tl.float32)
    return (v * tl.rsqrt(tl.sum(v * v, axis=0) / D + eps) * weight).to(dtype)


@triton.jit
def _compress_kernel(first, second, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = pair * (2 * D) + d
    a = tl.load(first + at, mask=inside, other=0.0)
    b = tl.load(first + at + D, mask=inside, other=0.0)
    c = tl.load(second + at, mask=inside, other=0.0)
    e = tl.load(second + at + D, mask=inside, other=0.0)
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + pair * D + d, _pooled(a, b, c, e, w, eps, D, out.dtype.element_ty), mask=inside)


def compress_pairs(first: Tensor, second: Tensor, norm_weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """first, second float32 [G, 2, D] (value, gate) of the two tokens of a pair, norm_weight [D] -> latents [G, D] in
    `dtype`: pooled in float32, rounded, normalised."""
    pairs, _, width = first.shape
    out = torch.empty(pairs, width, dtype=dtype, device=first.device)
    launch(
        _compress_kernel,
        (pairs,),
        *(first.contiguous(), second.contiguous(), norm_weight, out, eps),
        D=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _close_kernel(
    rows, positions, slots, starts, write_from, tables, store, weight, latents, entry_positions, targets,
    count, eps, pairs, blocks, per_block,
    D: tl.constexpr, BLOCK: tl.constexpr, REPLAYS: tl.constexpr,
):  # fmt: skip
    """Program: a row. Rows of a chunk follow each other, so row i + n is of the same chunk where its slot is the same.

    One place of the store may be wanted by two rows: by the chunk's first, whose pair it opens, to read, and by the
    last even row of the same place, to write. Then the writer does both, in this order.
    """
    i = tl.program_id(0)
    position = tl.load(positions + i)
    start = tl.load(starts + i)
    slot = tl.load(slots + i)
    odd = position % 2 == 1
    place = position // 2 % pairs
    # even rows
    later = i + 2 * pairs
    again = tl.load(slots + later, mask=later < count, other=-1) == slot  # the place is written again in this chunk
    writes = (odd == 0) & (again == 0)
    stands_in = writes & (start % 2 == 1) & (start // 2 % pairs == place) & (position > start)
    # odd rows
    alone = odd & (position == start)
    writer = i + 2 * pairs - 1
    deferred = alone & (tl.load(slots + writer, mask=writer < count, other=-1) == slot)
    closes = (odd & (deferred == 0)) | stands_in
    mine = tl.where(stands_in, i - (position - start).to(tl.int32), i)  # the row whose pair is closed here

    d = tl.arange(0, BLOCK)
    inside = d < D
    stored = (slot.to(tl.int64) * pairs + place) * (2 * D)
    wide = mine.to(tl.int64)
    if closes:
        before = rows + tl.maximum(wide - 1, 0) * (2 * D)
        if alone | stands_in:
            before = store + stored
        own = rows + wide * (2 * D)
        a = tl.load(before + d, mask=inside, other=0.0)
        b = tl.load(before + D + d, mask=inside, other=0.0)
        c = tl.load(own + d, mask=inside, other=0.0)
        e = tl.load(own + D + d, mask=inside, other=0.0)
        w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(latents + wide * D + d, _pooled(a, b, c, e, w, eps, D, latents.dtype.element_ty), mask=inside)
    if odd:
        new = position >= 0
        if REPLAYS:
            new = position >= tl.load(write_from + i)
        entry = position // 2
        block = tl.load(tables + slot.to(tl.int64) * blocks + entry // per_block, mask=new, other=0)
        target = block.to(tl.int64) * per_block + entry % per_block
        tl.store(entry_positions + i, tl.where(new, position - 1, -1).to(tl.int64))
        tl.store(targets + i, tl.where(new, target, -1).to(tl.int64))
    else:
        nothing = tl.zeros((BLOCK,), tl.float32).to(latents.dtype.element_ty)
        tl.store(latents + i.to(tl.int64) * D + d, nothing, mask=inside)
        tl.store(entry_positions + i, tl.full((), -1, tl.int64))
        tl.store(targets + i, tl.full((), -1, tl.int64))
    if writes:
        tl.debug_barrier()  # the place was read by other threads
        own = rows + i.to(tl.int64) * (2 * D)
        tl.store(store + stored + d, tl.load(own + d, mask=inside, other=0.0), mask=inside)
        tl.store(store + stored + D + d, tl.load(own + D + d, mask=inside, other=0.0), mask=inside)


def close_pairs_rows(
    rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    starts: Tensor,
    store: Tensor,
    tables: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    per_block: int,
    write_from: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> ClosedPairs:
    """`StepView.close_pairs` and `compress_pairs` for every row of a step, one launch, no plan.

    rows float32 [N, 2, D]: value and gate of this step's tokens. positions, slots, starts (first position of the row's
    chunk) integers [N], rows chunk by chunk, one chunk a slot. store float32 [slots, pairs, 2, D]: the open row of even
    position p at p // 2 % pairs; read where a chunk starts at an odd position, and written with the chunk's last rows
    of even positions. tables int64 [slots, blocks]. write_from integers [N] or None: closed entries of lower positions
    are not to be written and get no target. Rows of a null slot share its places and nothing reads them.
    """
    count, _, width = rows.shape
    latents = torch.empty(count, width, dtype=dtype, device=rows.device)
    entry_positions = torch.empty(count, dtype=torch.int64, device=rows.device)
    targets = torch.empty_like(entry_positions)
    launch(
        _close_kernel,
        (count,),
        *(rows.contiguous(), positions, slots, starts, positions if write_from is None else write_from, tables),
        *(store, norm_weight, latents, entry_positions, targets),
        *(count, eps, store.shape[1], tables.shape[1], per_block),
        D=width,
        BLOCK=triton.next_power_of_2(width),
        REPLAYS=write_from is not None,
        num_warps=4,
    )
    return ClosedPairs(latents, entry_positions, targets)
