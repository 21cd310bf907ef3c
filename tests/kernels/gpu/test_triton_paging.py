"""Rows of pools and histories of tokens, equal to the reference's whole numbers, at chunk edges and full rings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twins import DEVICE

from deepinfer.kernels.reference import paging as reference
from deepinfer.kernels.triton.paging import commit_window, copy_rows, entry_rows, token_history, window_rows

CHUNKS = [(2, 0, 1), (0, 5, 1), (4, 30, 6), (1, 0, 40), (3, 17, 23), (5, 100, 1)]  # slot, start, rows
NULL_ROWS = 3  # padding: slot 6, position 0


def step(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor]:
    """positions, slots, starts [N] of the chunks above and their padding."""
    positions = torch.cat([torch.arange(start, start + rows) for _, start, rows in CHUNKS] + [torch.zeros(NULL_ROWS)])
    slots = torch.cat([torch.full((rows,), slot) for slot, _, rows in CHUNKS] + [torch.full((NULL_ROWS,), 6)])
    starts = torch.cat([torch.full((rows,), start) for _, start, rows in CHUNKS] + [torch.zeros(NULL_ROWS)])
    return positions.to(dtype), slots.to(dtype), starts.to(dtype)


@pytest.mark.parametrize(("window", "dtype"), [(16, torch.int64), (128, torch.int32), (20, torch.int64)])
def test_rows_of_windows(window: int, dtype: torch.dtype) -> None:
    positions, slots, starts = step(dtype)
    floors = torch.minimum(starts, torch.arange(len(positions)).to(dtype) % 4 * 7)
    arguments = (window, window + 6, 4096)
    expected = reference.window_rows(positions, slots, starts, floors, *arguments)
    p, s, b, f = (x.to(DEVICE) for x in (positions, slots, starts, floors))
    found = window_rows(p, s, b, f, *arguments)
    assert found.dtype == torch.int32
    assert torch.equal(found.long().cpu(), expected)


@pytest.mark.parametrize(("per_block", "width"), [(64, 20), (128, 512), (128, 700), (8, 1)])
def test_rows_of_entries(per_block: int, width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    tables = torch.randint(0, 10_000, (7, 9), generator=rng)
    slots = torch.randint(0, 7, (5,), generator=rng)
    entries = torch.randint(-1, 9 * per_block, (5, width), generator=rng)
    entries[3] = -1
    expected = reference.entry_rows(tables, slots, entries, per_block)
    for dtype in (torch.int64, torch.int32):
        found = entry_rows(tables.to(DEVICE), slots.to(DEVICE), entries.to(DEVICE, dtype), per_block)
        assert torch.equal(found.long().cpu(), expected)


def test_a_step_without_entries_has_no_rows() -> None:
    tables, slots = (
        torch.zeros(2, 3, dtype=torch.int64, device=DEVICE),
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
    )
    assert entry_rows(tables, slots, torch.zeros(4, 0, dtype=torch.int64, device=DEVICE), 64).shape == (4, 0)


@pytest.mark.parametrize(("size", "lookback"), [(8, 3), (4, 3), (9, 1), (16, 0)])
def test_histories_of_tokens(size: int, lookback: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, slots, starts = step()
    rng = torch.Generator().manual_seed(size)
    ids = torch.randint(0, 1000, positions.shape, generator=rng)
    store = torch.randint(1000, 2000, (7, size), generator=rng)
    kept = store.clone()
    expected = reference.token_history(ids, positions, slots, starts, kept, lookback)
    for most in (1024, 16):  # in one program, and in several with a second launch
        monkeypatch.setattr("deepinfer.kernels.triton.paging._HISTORY_ROWS", most)
        device_store = store.to(DEVICE, copy=True)
        i, p, s, b = (x.to(DEVICE) for x in (ids, positions, slots, starts))
        found = token_history(i, p, s, b, device_store, lookback)
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(device_store[:6].cpu(), kept[:6])  # slot 6: padding rows write one place, any of them


@pytest.mark.parametrize(
    ("width", "dtype"), [(528, torch.uint8), (33, torch.uint8), (20, torch.bfloat16), (3, torch.float32)]
)
def test_rows_of_a_pool_are_copied_whatever_their_type(width: int, dtype: torch.dtype) -> None:
    pool = torch.arange(10 * width).remainder(251).to(dtype).view(10, width)
    targets, sources = torch.tensor([1, 8, -1, 3]), torch.tensor([0, 2, 4, 6])
    expected = pool.clone()
    expected[[1, 8, 3]] = pool[[0, 2, 6]]
    found = pool.to(DEVICE, copy=True)
    copy_rows(found, targets.to(DEVICE), sources.to(DEVICE))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("layers", [0, 2])
def test_staged_rows_take_their_places_in_the_rings(layers: int) -> None:
    positions, slots, _ = step()
    ring, staging, count = 22, 7 * 22, len(positions)
    rng = torch.Generator().manual_seed(1)
    pools = torch.randint(0, 256, (max(layers, 1), staging + count, 528), generator=rng).to(torch.uint8)
    expected = pools.clone()
    for row in range(count):  # later rows over earlier ones
        expected[:, slots[row] * ring + positions[row] % ring] = pools[:, staging + row]
    found = pools.to(DEVICE, copy=True)
    commit_window(found if layers else found[0], positions.to(DEVICE), slots.to(DEVICE), ring, staging)
    real = torch.ones(staging + count, dtype=torch.bool)
    real[6 * ring] = False  # where padding rows write, any of them
    assert torch.equal(found.cpu()[:, real], expected[:, real])
