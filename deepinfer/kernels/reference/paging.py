"""Where things lie: rows of pools for the windows, entries and keys of a step. Whole numbers: twins are exact."""

from __future__ import annotations

import torch
from torch import Tensor


def window_rows(
    positions: Tensor, slots: Tensor, starts: Tensor, floors: Tensor, window: int, ring: int, staging: int
) -> Tensor:
    """Rows of positions max(floor, p - window + 1) .. p for every row of a step, oldest first, then -1: int64
    [N, window].

    positions, slots, starts, floors int64 [N]; starts = first position of the row's chunk, floors = lowest position
    that a row may see, at least 0 and at most p. A position of the chunk lies in the staging area (row i of the step at
    staging + i), an earlier one in the slot's ring of `ring` rows, at position % ring.
    """
    first = torch.maximum(positions - window + 1, floors).unsqueeze(1)
    wanted = first + torch.arange(window, device=positions.device)
    row = torch.arange(positions.numel(), device=positions.device).unsqueeze(1)
    staged = staging + row - (positions.unsqueeze(1) - wanted)
    stored = slots.unsqueeze(1) * ring + wanted % ring
    rows = torch.where(wanted >= starts.unsqueeze(1), staged, stored)
    return torch.where(wanted <= positions.unsqueeze(1), rows, -1)


def entry_rows(tables: Tensor, slots: Tensor, entries: Tensor, per_block: int) -> Tensor:
    """tables int64 [slots, blocks], slots int64 [N], entries int64 [N, K] (-1 = none) -> pool rows int64 [N, K]."""
    block = tables[slots].gather(-1, entries.clamp_min(0) // per_block)
    return torch.where(entries < 0, -1, block * per_block + entries % per_block)


def block_rows(tables: Tensor, slots: Tensor, count: int, per_block: int) -> Tensor:
    """Pool rows of entries 0 .. count - 1 of each slot: int64 [B, count]."""
    entries = torch.arange(count, device=tables.device)
    return tables[slots][:, entries // per_block] * per_block + entries % per_block


def token_history(
    ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, store: Tensor, lookback: int
) -> Tensor:
    """The token of every row and those before it: int64 [N, lookback + 1], column s the token s positions back.

    ids, positions, slots, starts int64 [N] (starts = first position of the row's chunk; rows chunk by chunk). A
    position of the chunk is a row of the step, an earlier one lies in store int64 [slots, size] at position % size, one
    before the sequence gives -1. Then the newest tokens of every chunk take their places in `store`.
    """
    size, rows = store.shape[1], torch.arange(len(ids), device=ids.device)
    shifts = torch.arange(lookback + 1, device=ids.device)
    wanted = positions.unsqueeze(1) - shifts
    stored = store[slots.unsqueeze(1), wanted % size]
    own = ids[(rows.unsqueeze(1) - shifts).clamp_min(0)]
    history = torch.where(wanted >= starts.unsqueeze(1), own, stored).masked_fill(wanted < 0, -1)
    later = torch.zeros_like(positions, dtype=torch.bool)  # whether the same chunk writes a row's place again
    later[: max(len(ids) - size, 0)] = slots[size:] == slots[: max(len(ids) - size, 0)]
    newest = ~later
    store[slots[newest], positions[newest] % size] = ids[newest]
    return history
