"""Attention, records and rows of pools at the released model's shapes, for test_triton_compile.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.triton import paging, records
from deepinfer.kernels.triton.attention import sparse_attention
from deepinfer.kernels.triton.attention_prefill import attention_unpacked, unpack_compressed, unpack_window


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def attend(rows: int, selected: int = 512, heads: int = 64, size: int = 512, dtype: torch.dtype = torch.int32) -> None:
    kv_pool = meta(1 << 18, size // 2 + size // 16, dtype=torch.uint8) if selected else None
    kv_indices = meta(rows, selected, dtype=dtype) if selected else None
    q, sink = meta(rows, heads, size, dtype=torch.bfloat16), meta(heads, dtype=torch.float32)
    pool = meta(1 << 18, size + size // 32, dtype=torch.uint8)
    sparse_attention(q, pool, meta(rows, 128, dtype=dtype), kv_pool, kv_indices, sink, 0.04)


def attend_unpacked(rows: int) -> None:
    q, sink = meta(rows, 64, 512, dtype=torch.bfloat16), meta(64, dtype=torch.float32)
    window, entries = (meta(1 << 15, 512, dtype=torch.bfloat16) for _ in range(2))
    window_list, entry_list = (meta(rows, width, dtype=torch.int32) for width in (128, 512))
    attention_unpacked(q, window, window_list, entries, entry_list, sink, 0.04)


def insert(operation: Callable[[Tensor, Tensor, Tensor], None], record: int) -> None:
    operation(meta(64, 512, dtype=torch.bfloat16), meta(1 << 18, record, dtype=torch.uint8), meta(64))


CASES: dict[str, Callable[[], None]] = {
    "whole lists": lambda: attend(256),
    "lists in parts": lambda: attend(1),
    "windows alone": lambda: attend(256, selected=0),
    "int64 lists": lambda: attend(256, dtype=torch.int64),
    "the tiny model's heads": lambda: attend(4, heads=8, size=128),
    "unpacked keys": lambda: attend_unpacked(4096),
    "window keys": lambda: void(unpack_window(meta(1 << 15, 528, dtype=torch.uint8))),
    "entry keys": lambda: void(unpack_compressed(meta(1 << 18, 288, dtype=torch.uint8), meta(1 << 15))),
    "window records": lambda: insert(records.insert_window, 528),
    "compressed records": lambda: insert(records.insert_compressed, 288),
    "rows of windows": lambda: void(paging.window_rows(meta(64), meta(64), meta(64), meta(64), 128, 134, 4096)),
    "rows of entries": lambda: void(paging.entry_rows(meta(64, 8192), meta(64), meta(64, 512), 64)),
    "histories": lambda: void(paging.token_history(meta(64), meta(64), meta(64), meta(64), meta(64, 16), 3)),
    "histories of a long step": lambda: void(
        paging.token_history(meta(4096), meta(4096), meta(4096), meta(4096), meta(64, 16), 3)
    ),
    "copies": lambda: paging.copy_rows(meta(1 << 18, 528, dtype=torch.uint8), meta(64), meta(64)),
    "rings": lambda: paging.commit_window(meta(1 << 18, 528, dtype=torch.uint8), meta(64), meta(64), 134, 4096),
}
WGMMA = {"unpacked keys", "whole lists", "lists in parts", "windows alone", "int64 lists"}
# A few addresses of the first and the last loads; nothing of the loop.
STACK = {"whole lists": 16, "windows alone": 16, "int64 lists": 24}


def void(_: Tensor) -> None:
    """Cases return nothing."""
