"""Attention over chosen keys, and their choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.reference import attention, indexer, records, selection
from deepinfer.kernels.select.backends import cpu_fast, cpu_twins, gpu, gpu_fast


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    split: bool = False,
    invariant: bool = False,
) -> Tensor:
    """split: q holds the even dims of a head before its odd ones (`in_split_order`), and so does what comes back.
    invariant: on a GPU, too, a row's bits do not depend on the number of rows."""
    if split:
        ops = gpu()
        if gpu_fast(q) and ops.serves_attention(q, window_pool, kv_pool):
            return ops.sparse_attention(
                q, window_pool, window_indices, kv_pool, kv_indices, sink, scale, invariant=invariant
            )
        halves = q.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # back to pairs of neighbours
        out = attention.sparse_attention(halves, window_pool, window_indices, kv_pool, kv_indices, sink, scale)
        return out.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    fast = cpu_fast(q, 16) and q.shape[1] % 4 == 0
    run = cpu.sparse_attention if fast else attention.sparse_attention
    return run(q, window_pool, window_indices, kv_pool, kv_indices, sink, scale)


UNPACKED_ROWS = 1024  # from here on rows share so many records that unpacking them first pays
MOST_UNPACKED = 1 << 17  # entries that are unpacked at once: 128 MiB of keys of 512 values


def unpacks_keys(q: Tensor, window_pool: Tensor) -> bool:
    """Whether queries [N, heads, size] in split order go over keys that were unpacked before."""
    many = len(q) >= UNPACKED_ROWS and window_pool.dtype == torch.uint8
    return many and gpu_fast(q) and gpu().gains_by_unpacking(q, window_pool)


def will_unpack(rows: int, heads: int, size: int, device: torch.device, dtype: torch.dtype) -> bool:
    """What `unpacks_keys` will say to so many queries over packed records on a device: for plans of its memory. Builds
    what has to be built to know it."""
    q = torch.empty(1, heads, size, dtype=dtype, device=device).expand(rows, -1, -1)
    return unpacks_keys(q, torch.empty(1, records.window_bytes(size), dtype=torch.uint8, device=device))


def unpack_entries(pool: Tensor, rows: Tensor) -> Tensor:
    """Compressed records uint8 [R, D / 2 + D / 16] at rows int64 [M] -> their values, bf16 [M, D], in split order."""
    return gpu().unpack_compressed(pool, rows)


def attention_over_unpacked(
    q: Tensor, window_pool: Tensor, window_indices: Tensor, keys: Tensor | None, indices: Tensor | None, sink: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """`sparse_attention` where `unpacks_keys` says so: over the records of window_pool, unpacked here, and keys bf16
    [M, D] that `unpack_entries` gave, at indices int [N, K] of these."""
    return gpu().attention_unpacked(q, gpu().unpack_window(window_pool), window_indices, keys, indices, sink, scale)


def index_scores(
    queries: Tensor, pool: Tensor, key_rows: Tensor, weights: Tensor, visible: Tensor, *, invariant: bool = False
) -> Tensor:
    """queries [B, T, H, D], pool [rows, D] (or packed keys), key_rows int64 [B, M], weights [B, T, H], visible int64
    [B, T] -> float32 [B, T, M], -inf where not visible. invariant: on a GPU, too, a score's bits do not depend on what
    else is asked."""
    if cpu_fast(queries):
        return cpu.index_scores(queries, pool, key_rows, weights, visible)
    keys = records.key_values(pool[key_rows])
    if invariant and gpu_fast(queries):
        scores = gpu().index_scores(queries, keys, weights)
    else:
        scores = indexer.index_scores(queries, keys, weights)
    hidden = torch.arange(key_rows.shape[1], device=visible.device) >= visible.unsqueeze(-1)
    return scores.masked_fill(hidden, float("-inf"))


def top_entries(scores: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    """scores float32 [N, M], -inf = not selectable; allowed bool [N, M] or None -> int64 [N, k] the k best positions,
    ascending, -1 = empty."""
    if cpu_twins(scores.device, scores.dtype):
        return cpu.top_entries(scores, k, allowed)
    return selection.top_entries(scores if allowed is None else scores.masked_fill(~allowed, float("-inf")), k)


def candidate_mask(scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int) -> Tensor:
    run = cpu.candidate_mask if cpu_twins(scores.device, scores.dtype) else selection.candidate_mask
    return run(scores, visible, block_size=block_size, topk_blocks=topk_blocks)


@dataclass
class PagedKeys:
    """Index keys of a source in pages, and the rows of a step that choose among them.

    pool uint8 [rows, 68], tables int64 [slots, blocks] of `per_block` keys each. positions, slots, starts int64 [N]:
    rows chunk by chunk, of at most `chunks` chunks; starts = position of the chunk's first row. A row sees (position +
    1) // ratio entries, none more than `most`. plans: kept from one index source to the next of this ratio.
    """

    pool: Tensor
    tables: Tensor
    per_block: int
    positions: Tensor
    slots: Tensor
    starts: Tensor
    chunks: int
    ratio: int
    most: int
    plans: dict[Any, Any]


def choose_entries(
    queries: tuple[Tensor, Tensor, Tensor, Tensor, float],
    keys: PagedKeys,
    *,
    topk: int,
    publish: int,
    candidates: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The best entries of every row, int32 [N, topk] ascending, -1 = empty, and the best `publish` blocks of 8 entries
    (0 = none are asked for), int32 [N, publish]. candidates: such blocks, to choose in.

    queries: as projected [N, heads * size], head weights float32 [N, heads] before their scale, cos and sin [N, rope
    / 2], the scale. GPU alone.
    """
    return gpu().choose_entries(queries, keys, topk, publish, candidates)
