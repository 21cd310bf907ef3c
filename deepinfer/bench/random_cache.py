"""A cache full of random records: a long context without the hours that it takes to compute one."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.storage import CacheStorage
from deepinfer.config import KV_FORMATS

FILL_ROWS = 1 << 16  # records that are made at once: 65,536 x 512 float32 = 134 MB


def densest_format(device: torch.device, dtype: str) -> str:
    """Of the records that this device's kernels read."""
    if dtype == "float32":
        return "float32"
    return "hopper" if device.type == "cuda" and "hopper" in KV_FORMATS else "packed"


def fill_records(storage: CacheStorage, random: torch.Generator) -> None:
    """Every block and every ring of the cache holds records of random values of about size 1."""
    config, device = storage.config, storage.device
    packed = storage.windows.format.dtype == torch.uint8
    dtype = torch.bfloat16 if packed else torch.float32  # as the numerics have it whose records these are

    def values(rows: int, size: int) -> Tensor:
        return torch.randn(rows, size, generator=random, device=device).to(dtype)

    for records in storage.records.values():
        for first in range(0, len(records.kv), FILL_ROWS):
            rows = torch.arange(first, min(first + FILL_ROWS, len(records.kv)), device=device)
            records.write(rows, values(len(rows), config.head_dim), values(len(rows), config.index_head_dim))
    windows = storage.windows
    for layer in range(len(windows.pool)):
        windows.pool[layer, : windows.staging] = windows.format.encode(values(windows.staging, config.head_dim))
    for rows in storage.open_rows.rows.values():
        rows.normal_(generator=random)
