"""Replicas of windows that a padded step leaves: the kernel against the copy that the host would order."""

from __future__ import annotations

import pytest
import torch
from twins import DEVICE

from deepinfer.kernels.triton.replicas import copy_replicas

SLOTS = 7  # the null slot among them
LAYERS = 11  # of replicas; the pool has two more, those of drafts


def expected(
    pool: torch.Tensor, replicas: torch.Tensor, chunks: list[tuple[int, int, int]], window: int, ring: int
) -> torch.Tensor:
    found = replicas.clone()
    for slot, start, rows in chunks:
        boundary = (start + rows) // 128 * 128
        if slot == SLOTS - 1 or not rows or boundary <= start:
            continue
        for position in range(max(0, boundary - window), boundary):
            row = (2 * slot + boundary // 128 % 2) * window + position - (boundary - window)
            found[:, row] = pool[:LAYERS, slot * ring + position % ring]
    return found


@pytest.mark.parametrize(
    ("window", "drafts", "width", "dtype"),
    [(16, 5, 12, torch.float32), (128, 5, 528, torch.uint8), (128, 0, 33, torch.uint8), (160, 2, 24, torch.bfloat16)],
)
def test_windows_below_the_boundaries_that_a_step_passed(
    window: int, drafts: int, width: int, dtype: torch.dtype
) -> None:
    """Chunks that pass one with their first or last row, or not; empty ones, and the null slot's, which never do."""
    most = 1 + drafts
    chunks = [
        (2, 128 - most, most),
        (0, 127, most),
        (5, 256 - most, most - 1),
        (1, 128, most),
        (3, 383, 1),
        (4, 0, most),
        (6, 127, 1),
        (6, 0, 0),
    ]
    ring, rng = window + most, torch.Generator().manual_seed(width)
    pool = torch.randint(0, 200, (LAYERS + 2, SLOTS * ring + 9, width), generator=rng).to(dtype)
    replicas = torch.full((LAYERS, 2 * SLOTS * window, width), 77).to(dtype)
    positions = torch.cat([torch.arange(start, start + rows) for _, start, rows in chunks] + [torch.zeros(4).long()])
    chunk_rows = torch.tensor([0, *(rows for *_, rows in chunks)]).cumsum(0)
    chunk_slots = torch.tensor([slot for slot, *_ in chunks])
    got = replicas.to(DEVICE)
    arguments = (x.to(DEVICE) for x in (positions, chunk_slots, chunk_rows))
    copy_replicas(pool.to(DEVICE), got, *arguments, SLOTS - 1, window=window, ring=ring)
    assert torch.equal(got.cpu(), expected(pool, replicas, chunks, window, ring))
