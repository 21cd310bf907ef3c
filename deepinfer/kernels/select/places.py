"""Where things lie in pools, and the tokens before a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.reference import paging
from deepinfer.kernels.select.backends import gpu, gpu_fast, gpu_numbers, whole_numbers
from deepinfer.kernels.select.shapes import rounds_records


def window_rows(
    positions: Tensor, slots: Tensor, starts: Tensor, floors: Tensor, window: int, ring: int, staging: int
) -> Tensor:
    if gpu_numbers(positions):
        return gpu().window_rows(positions, slots, starts, floors, window, ring, staging)
    run = cpu.window_rows if whole_numbers(positions) else paging.window_rows
    return run(positions, slots, starts, floors, window, ring, staging)


def entry_rows(tables: Tensor, slots: Tensor, entries: Tensor, per_block: int) -> Tensor:
    if gpu_numbers(entries):
        return gpu().entry_rows(tables, slots, entries, per_block)
    run = cpu.entry_rows if whole_numbers(entries) else paging.entry_rows
    return run(tables, slots, entries, per_block)


def block_rows(tables: Tensor, slots: Tensor, count: int, per_block: int) -> Tensor:
    run = cpu.block_rows if whole_numbers(tables) else paging.block_rows
    return run(tables, slots, count, per_block)


def token_history(
    ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, store: Tensor, lookback: int
) -> Tensor:
    if gpu_numbers(ids):
        return gpu().token_history(ids, positions, slots, starts, store, lookback)
    run = cpu.token_history if whole_numbers(ids) else paging.token_history
    return run(ids, positions, slots, starts, store, lookback)


def copy_rows(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """pool[targets] = pool[sources] for a pool [rows, D] of any dtype; no row is both a target and a source."""
    if whole_numbers(pool):
        cpu.copy_rows(pool, targets, sources)
    elif gpu_numbers(pool):
        gpu().copy_rows(pool, targets, sources)
    else:
        pool[targets] = pool[sources]


def commit_windows(pool: Tensor, positions: Tensor, slots: Tensor, ring: int, staging: int) -> None:
    """Row i of a step, int64 [N] positions and slots, lies at staging + i of every layer of pool [layers, rows, D] ->
    its place in its slot's ring. No two rows want one place, but for those that nobody reads."""
    if gpu_numbers(pool):
        gpu().commit_windows(pool, positions, slots, ring, staging)
        return
    staged = torch.arange(staging, staging + len(positions), device=pool.device)
    for layer in pool:
        copy_rows(layer, slots * ring + positions % ring, staged)


def put_windows(places: Tensor, kv: Tensor, encode: Callable[[Tensor], Tensor]) -> None:
    """kv [N, D] as window records into places [N, width], rows of a pool. GPU kernels round what they pack."""
    if places.dtype == torch.uint8 and rounds_records(kv.shape[1]) and gpu_fast(kv):
        gpu().insert_windows(kv, places)
    else:
        places[:] = encode(kv)


def put_compressed(pool: Tensor, rows: Tensor, kv: Tensor, encode: Callable[[Tensor], Tensor]) -> None:
    """kv [G, D] as compressed records into rows int64 [G] of a pool. GPU kernels round what they pack."""
    if pool.dtype == torch.uint8 and rounds_records(kv.shape[1]) and gpu_fast(kv):
        gpu().insert_compressed(kv, pool, rows)
    else:
        pool[rows] = encode(kv)


def pages_keys(heads: int, size: int, topk: int, block_size: int) -> bool:
    """Whether an indexer of this shape reads keys in pages (`triton/indexer.py`). block_size: of candidates, or 0."""
    return (heads, size) == (32, 128) and topk >= 16 and topk & (topk - 1) == 0 and block_size in (0, 8)


def put_key_pages(pool: Tensor, rows: Tensor, keys: Tensor, per_block: int) -> None:
    """keys [G, 128] into rows int64 [G] of a pool whose blocks of `per_block` keys hold codes before scales. Rounded
    where they are written."""
    ops = gpu()
    if gpu_fast(keys):
        ops.insert_key_pages(keys, pool, rows, per_block)
    else:
        ops.put_key_rows(pool, rows, per_block, ops.pack_keys(keys))
