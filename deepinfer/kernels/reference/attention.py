"""Attention of every query over its own list of latents, with a sink (sections 2.4 and 2.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference import records

BLOCK = 64  # keys per step of the official online softmax: what fixes where probabilities are rounded to bf16
ROWS = 64  # queries gathered at once: 64 x 640 keys x 512 x 4 bytes = 84 MB with the real sizes, 7 MB with nano's


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """q [N, H, D] over window_pool [rows, D] at window_indices int64 [N, W], then kv_pool at kv_indices [N, K].

    The pools may hold packed records (uint8, `records.py`). -1 = empty. sink float32 [H]. -> [N, H, D] in q's dtype. A
    latent is key and value at once. The sink joins the denominator unscaled and carries no value; a query with no key
    gives 0. float32 queries: one exact softmax. Other dtypes: the official numerics, an online softmax over blocks of
    64 in list order (window first) whose probabilities are rounded to the query's dtype before they meet the values.
    """
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        indices = window_indices[rows]
        latents = records.window_values(window_pool[indices.clamp_min(0)])  # [n, W, D]
        if kv_pool is not None and kv_indices is not None:
            compressed = records.compressed_values(kv_pool[kv_indices[rows].clamp_min(0)])
            latents = torch.cat((latents, compressed), dim=1)  # [n, W + K, D]
            indices = torch.cat((indices, kv_indices[rows]), dim=1)
        latents = latents.masked_fill((indices < 0).unsqueeze(-1), 0.0)  # what -1 reads instead may be anything
        logits = torch.bmm(q[rows].float(), latents.transpose(1, 2)) * scale  # [n, H, W + K]
        logits.masked_fill_((indices < 0).unsqueeze(1), float("-inf"))
        softmax = _softmax if q.dtype == torch.float32 else _online_softmax
        out[rows] = softmax(logits, latents, sink, q.dtype)
    return out


def _softmax(logits: Tensor, latents: Tensor, sink: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.maximum(logits.amax(-1), sink)  # the sink in the maximum: no overflow whatever its size
    p = torch.exp(logits - top.unsqueeze(-1))
    denominator = p.sum(-1) + torch.exp(sink - top)
    return (torch.bmm(p, latents) / denominator.unsqueeze(-1)).to(dtype)


def _online_softmax(logits: Tensor, latents: Tensor, sink: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.full(logits.shape[:2], float("-inf"), device=logits.device)  # [n, H]
    total = torch.zeros_like(top)
    out = torch.zeros(*logits.shape[:2], latents.shape[-1], device=logits.device)
    for block, keys in zip(logits.split(BLOCK, dim=-1), latents.split(BLOCK, dim=1), strict=True):
        new_top = torch.maximum(top, block.amax(-1))
        shift = new_top.masked_fill(new_top.isneginf(), 0.0)  # a row without a key yet
        rescale = torch.exp(top - shift)
        p = torch.exp(block - shift.unsqueeze(-1))
        total = total * rescale + p.sum(-1)  # the denominator keeps float32 probabilities
        out = out * rescale.unsqueeze(-1) + torch.bmm(p.to(dtype).float(), keys)
        top = new_top
    # exp(sink - top) may overflow to inf for a far larger sink; then the row is 0, as it should be
    denominator = total + torch.exp(sink - top.masked_fill(top.isneginf(), 0.0))
    return torch.where(top.isneginf().unsqueeze(-1), 0.0, out / denominator.unsqueeze(-1)).to(dtype)
