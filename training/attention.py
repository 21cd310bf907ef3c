"""Attention over window tokens and compressed entries in one key list (K = V, one KV head), with a sink per head.

Key list of a row: T window entries, then n = T // r compressed entries; entry j of ratio r is tokens j*r .. j*r+r-1.
A query sees keys of its own document only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def rope(x: Tensor, cos: Tensor, sin: Tensor, dim: int, inverse: bool = False) -> Tensor:
    """Rotates adjacent pairs of the last `dim` values; x [N, (heads,) width], cos/sin [N, dim / 2] float32."""
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    head, tail = x[..., :-dim], x[..., -dim:].float().unflatten(-1, (-1, 2))
    even, odd = tail[..., 0], tail[..., 1]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([head, turned.to(x.dtype)], -1)


def visible(start: Tensor, ratio: int, window: int) -> Tensor:
    """Dense mask [B, T, T + n] of the key list; start [B, T] is the first row position of the query's document."""
    t = start.shape[1]
    q = torch.arange(t, device=start.device)[:, None]
    k = torch.arange(t, device=start.device)
    mask = (k <= q) & (q - k < window) & (k >= start[..., None])
    return torch.cat([mask, visible_entries(start, ratio)], -1) if ratio else mask


def visible_entries(start: Tensor, ratio: int) -> Tensor:
    """Dense mask [B, T, n] of compressed entries: complete groups inside the query's document."""
    t = start.shape[1]
    q = torch.arange(t, device=start.device)[:, None]
    j = torch.arange(t // ratio, device=start.device)
    return (j < (q + 1) // ratio) & (j * ratio >= start[..., None])


def attend_reference(q: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, H, T, d], keys [B, S, d], mask [B, T, S] -> output [B, H, T, d] without the sink, log-sum-exp [B, H, T]."""
    logits = torch.einsum("bhtd,bsd->bhts", q.float(), keys.float()) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~mask[:, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    out = torch.einsum("bhts,bsd->bhtd", torch.exp(logits - lse[..., None]), keys.float())
    return out.to(q.dtype), lse


def build_block_mask(start: Tensor, ratio: int, window: int, selected: Tensor | None = None) -> BlockMask:
    """FlexAttention mask of the key list for this batch's documents; `selected` [B, T, n] bool narrows the entries."""
    t = start.shape[1]
    total = t + (t // ratio if ratio else 0)

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        begin = start[batch, q]
        keep = (k <= q) & (q - k < window) & (k >= begin)
        if ratio:
            j = k - t
            entry = (j >= 0) & ((j + 1) * ratio <= q + 1) & (j * ratio >= begin)
            if selected is not None:
                entry = entry & selected[batch, q, j.clamp(min=0)]
            keep = torch.where(k < t, keep, entry)
        return keep

    # Per block: can any (query, key) pair meet, and do all meet? Bounds over the block suffice; start never decreases.
    first = torch.arange(0, t, BLOCK, device=start.device)[:, None]
    last = first + BLOCK - 1
    low, high = start[:, ::BLOCK, None], start[:, BLOCK - 1 :: BLOCK, None]
    k0 = torch.arange(0, t, BLOCK, device=start.device)
    k1 = k0 + BLOCK - 1
    any_ = (k0 <= last) & (first - k1 < window) & (k1 >= low)
    full = torch.zeros_like(any_)
    if ratio:
        j0 = torch.arange(0, t // ratio, BLOCK, device=start.device)
        j1 = j0 + BLOCK - 1
        any_ = torch.cat([any_, ((j0 + 1) * ratio <= last + 1) & (j1 * ratio >= low)], -1)
        sure = ((j1 + 1) * ratio <= first + 1) & (j0 * ratio >= high)
        full = torch.cat([full, sure if selected is None else torch.zeros_like(sure)], -1)
    partial_num, partial_index = _lists(any_ & ~full)
    full_num, full_index = _lists(full)
    return BlockMask.from_kv_blocks(
        partial_num, partial_index, full_num, full_index, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(t, total)
    )


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, Qb, Kb] bool -> counts [B, 1, Qb] and ascending block indices [B, 1, Qb, Kb], int32."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()


def attend_flex(q: Tensor, keys: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Same contract as attend_reference, keys [B, S, d]."""
    kv = keys[:, None]
    return flex_attention(q, kv, kv, block_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=True, return_lse=True)
