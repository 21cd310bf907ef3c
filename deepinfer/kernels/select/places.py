"""Where things lie in pools, and the tokens before a row."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.reference import paging
from deepinfer.kernels.select.backends import gpu, gpu_numbers, whole_numbers


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
