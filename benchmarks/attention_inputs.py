"""What attention reads in the kernel benchmark: two pools of records, together three times the second-level cache, and
the lists of rows of a step.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deepinfer.kernels.reference import records

HEADS, DIM, WINDOW, SELECTED = 64, 512, 128, 512
WINDOW_BYTES, ENTRY_BYTES = records.window_bytes(DIM), records.compressed_bytes(DIM)
POOL_ROWS = 262_144
Lists = tuple[Tensor, Tensor]  # of window rows and of entry rows


@cache
def pools(device: torch.device) -> tuple[Tensor, Tensor]:
    """Window records and compressed records of Gaussian values with lognormal channel outliers, made once."""
    window = torch.empty(POOL_ROWS, WINDOW_BYTES, dtype=torch.uint8, device=device)
    compressed = torch.empty(POOL_ROWS, ENTRY_BYTES, dtype=torch.uint8, device=device)
    for start in range(0, POOL_ROWS, 32_768):
        some = slice(start, start + 32_768)
        x = torch.randn(2, 32_768, DIM, device=device) * torch.exp(0.7 * torch.randn(DIM, device=device))
        window[some], compressed[some] = records.pack_window(x[0]), records.pack_compressed(x[1])
    return window, compressed


def lists(batch: int, rows: int, selected: int, shared: bool, device: torch.device) -> Lists:
    """Window rows int32 [N, 128] and entry rows int32 [N, selected], N = batch * rows, of one step."""
    count = batch * rows
    if not shared:
        return random_rows((count, WINDOW), device), random_rows((count, selected), device)
    window = windows(batch, rows, device) + torch.arange(rows, device=device)[:, None]
    common = random_rows((batch, 1, selected * 5 // 4), device).expand(-1, rows, -1)  # 640 to choose 512 from
    chosen = torch.rand(common.shape, device=device).argsort(-1)[..., :selected]
    return window.flatten(0, 1).int(), common.gather(-1, chosen).flatten(0, 1)


def block_lists(batch: int, rows: int, device: torch.device) -> Lists:
    """Of blocks of drafts: all `rows` rows of a request have its window and the block, 128 + rows, and no entries."""
    window = windows(batch, rows, device, WINDOW + rows).expand(-1, rows, -1)
    return window.flatten(0, 1).int(), random_rows((batch * rows, 0), device)


def windows(batch: int, beyond: int, device: torch.device, size: int = WINDOW) -> Tensor:
    """A run of `size` rows of the pool for every request, with room for `beyond` behind 128: [batch, 1, size]."""
    starts = torch.randint(0, POOL_ROWS - WINDOW - beyond, (batch, 1, 1), device=device)
    return starts + torch.arange(size, device=device)


def random_rows(shape: tuple[int, ...], device: torch.device, rows: int = POOL_ROWS) -> Tensor:
    return torch.randint(0, rows, shape, dtype=torch.int32, device=device)
