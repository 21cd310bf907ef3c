"""Where things lie, worked out on the device: rows of pools for the windows, entries and tokens of a step.

Twins of `kernels/reference/paging.py`, exact, one launch each (see `token_history` for the one exception). Rows come
out as int32: pools have fewer than 2^31 rows, and attention reads its lists once per head group. Whole numbers go in as
int32 or int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import launch

_BLOCK = 512  # list places a program makes: 2 KB of int32
_HISTORY_ROWS = 1024  # rows whose histories one program makes and then stores


def window_rows(
    positions: Tensor, slots: Tensor, starts: Tensor, floors: Tensor, window: int, ring: int, staging: int
) -> Tensor:
    """Rows of positions max(floor, p - window + 1) .. p for every row of a step, oldest first, then -1: int32
    [N, window]. Arguments as the reference's: whole numbers [N]; ring rows a slot, the step's row i at staging + i."""
    out = torch.empty(len(positions), window, dtype=torch.int32, device=positions.device)
    block = min(_BLOCK, triton.next_power_of_2(window))
    launch(
        _window_rows,
        (len(positions), triton.cdiv(window, block)),
        *(positions, slots, starts, floors, out, window, ring, staging),
        BLOCK=block,
        num_warps=max(1, block // 128),
    )
    return out


def entry_rows(tables: Tensor, slots: Tensor, entries: Tensor, per_block: int) -> Tensor:
    """tables [slots, blocks], slots [N], entries [N, K] (-1 = none) -> pool rows int32 [N, K], -1 = none."""
    count, width = entries.shape
    out = torch.empty(count, width, dtype=torch.int32, device=entries.device)
    block = min(_BLOCK, triton.next_power_of_2(width)) if width else 1
    launch(
        _entry_rows,
        (count, triton.cdiv(width, block)),
        *(tables, slots, entries, out, tables.stride(0), entries.stride(0), width),
        PER_BLOCK=per_block,
        BLOCK=block,
        num_warps=max(1, block // 128),
    )
    return out


def token_history(
    ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, store: Tensor, lookback: int
) -> Tensor:
    """The token of every row and those before it, int64 [N, lookback + 1]; then the newest tokens of every chunk take
    their places in store int64 [slots, size]. Arguments as the reference's.

    A row may read the place that a later row of its chunk writes, so up to 1,024 rows one program reads everything
    before it writes anything; more take a second launch.
    """
    count = len(ids)
    out = torch.empty(count, lookback + 1, dtype=torch.int64, device=ids.device)
    block = min(_HISTORY_ROWS, triton.next_power_of_2(max(count, 1)))
    options = {"SIZE": store.shape[1], "BLOCK": block, "num_warps": max(1, min(8, block // 128))}
    grid = (triton.cdiv(count, block),)
    lookback_options = {"LOOKBACK": lookback, "SHIFTS": triton.next_power_of_2(lookback + 1)}
    operands = (ids, positions, slots, starts, store, out, count)
    launch(_token_history, grid, *operands, **lookback_options, STORE=grid == (1,), **options)
    if grid[0] > 1:
        launch(_store_tokens, grid, ids, positions, slots, store, count, **options)
    return out


def copy_rows(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """pool[targets] = pool[sources] for pool [rows, D] of any dtype, whole numbers [n]; a target of -1 = no copy. No
    row is both a target and a source."""
    words = _words(pool)
    launch(
        _copy_rows,
        (len(targets),),
        *(words, targets, sources, words.stride(0), words.shape[1]),
        BLOCK=triton.next_power_of_2(words.shape[1]),
        num_warps=1,
    )


def commit_window(pool: Tensor, positions: Tensor, slots: Tensor, ring: int, staging: int) -> None:
    """After attention: the staged rows of a step take their places in the rings, in one layer's pool [rows, D] or in
    all layers' at once, [layers, rows, D].

    positions, slots [N]: row i lies at staging + i and goes to slot * ring + position % ring, unless a row of the same
    chunk lies `ring` rows further on and takes that place.
    """
    pools = _words(pool if pool.dim() == 3 else pool.unsqueeze(0))
    launch(
        _commit_window,
        (len(positions), len(pools)),
        *(pools, positions, slots, len(positions), pools.stride(0), pools.stride(1), pools.shape[2], ring, staging),
        BLOCK=triton.next_power_of_2(pools.shape[2]),
        num_warps=1,
    )


def _words(pool: Tensor) -> Tensor:
    """The same memory in the widest unit that rows are a multiple of: 4 bytes, or 1."""
    data = pool.view(torch.uint8)
    words = data.shape[-1] % 4 == 0 and all(stride % 4 == 0 for stride in data.stride()[:-1])
    return data.view(torch.int32) if words else data


@triton.jit
def _window_rows(positions, slots, starts, floors, out, window, ring, staging, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + row).to(tl.int32)
    first = tl.maximum(position - window + 1, tl.load(floors + row).to(tl.int32))
    wanted = first + place
    staged = staging + row - (position - wanted)
    stored = tl.load(slots + row).to(tl.int32) * ring + wanted % ring
    found = tl.where(wanted >= tl.load(starts + row).to(tl.int32), staged, stored)
    found = tl.where(wanted <= position, found, -1)
    tl.store(out + row.to(tl.int64) * window + place, found, mask=place < window)


@triton.jit
def _entry_rows(
    tables, slots, entries, out, table_stride, entry_stride, width, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    entry = tl.load(entries + row * entry_stride + place, mask=inside, other=-1).to(tl.int32)
    real = entry >= 0
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    block = tl.load(table + entry // PER_BLOCK, mask=real, other=0).to(tl.int32)
    tl.store(out + row * width + place, tl.where(real, block * PER_BLOCK + entry % PER_BLOCK, -1), mask=inside)


@triton.jit
def _token_history(
    ids, positions, slots, starts, store, out, count,
    LOOKBACK: tl.constexpr, SHIFTS: tl.constexpr, STORE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.arange(0, SHIFTS)
    inside = row < count
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int64)
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    start = tl.load(starts + row, mask=inside, other=0).to(tl.int64)
    wanted = position[:, None] - shift[None, :]  # [BLOCK, SHIFTS]
    asked = inside[:, None] & (shift <= LOOKBACK)[None, :]
    in_chunk = wanted >= start[:, None]
    own = tl.load(ids + (row[:, None] - shift[None, :]), mask=asked & in_chunk, other=0)
    before = asked & (wanted >= 0) & (in_chunk == 0)
    stored = tl.load(store + slot[:, None] * SIZE + wanted % SIZE, mask=before, other=-1)
    found = tl.where(in_chunk, own.to(tl.int64), stored.to(tl.int64))
    tl.store(out + row[:, None].to(tl.int64) * (LOOKBACK + 1) + shift[None, :], found, mask=asked)
    if STORE:
        tl.debug_barrier()  # every place has been read
        _store_newest(ids, slots, store, row, position, slot, inside, count, SIZE)


@triton.jit
def _store_tokens(ids, positions, slots, store, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int64)
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    _store_newest(ids, slots, store, row, position, slot, inside, count, SIZE)


@triton.jit
def _store_newest(ids, slots, store, row, position, slot, inside, count, SIZE: tl.constexpr):
    """Tokens of the rows that no row of the same chunk follows SIZE rows later."""
    later = tl.load(slots + row + SIZE, mask=row + SIZE < count, other=-1).to(tl.int64)
    token = tl.load(ids + row, mask=inside, other=0)
    tl.store(store + slot * SIZE + position % SIZE, token, mask=inside & (later != slot))


@triton.jit
def _copy_rows(pool, targets, sources, stride, width, BLOCK: tl.constexpr):
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    word = tl.arange(0, BLOCK)
    moved = (word < width) & (target >= 0)
    tl.store(pool + target * stride + word, tl.load(pool + source * stride + word, mask=moved), mask=moved)


@triton.jit
def _commit_window(
    pools, positions, slots, count, layer_stride, stride, width, ring, staging, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    pool = pools + tl.program_id(1).to(tl.int64) * layer_stride
    slot = tl.load(slots + row).to(tl.int64)
    later = tl.load(slots + row + ring, mask=row + ring < count, other=-1).to(tl.int64)
    target = slot * ring + tl.load(positions + row).to(tl.int64) % ring
    source = (staging + row).to(tl.int64)
    word = tl.arange(0, BLOCK)
    moved = (word < width) & (later != slot)
    tl.store(pool + target * stride + word, tl.load(pool + source * stride + word, mask=moved), mask=moved)
