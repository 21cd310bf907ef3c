"""Exact top-k with one tie rule everywhere: the lower position wins. Chosen positions come back in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor


def top_mask(scores: Tensor, k: int) -> Tensor:
    """scores float32 [N, M], -inf or NaN = not selectable -> bool [N, M] with the min(k, selectable) best of
    every row."""
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    selectable = ~scores.isneginf()
    if scores.shape[1] <= k:
        return selectable
    threshold = torch.topk(scores, k, dim=-1, sorted=True).values[:, -1:]  # -inf where fewer than k are selectable
    above = scores > threshold
    level = (scores == threshold) & selectable
    room = k - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def mask_to_indices(mask: Tensor, k: int) -> Tensor:
    """bool [N, M] with at most k set per row -> int64 [N, k] ascending positions, -1 = empty."""
    rows, entries = mask.shape
    place = torch.where(mask, mask.cumsum(-1) - 1, k)  # of what is not set: one behind the list
    out = torch.full((rows, k + 1), -1, dtype=torch.int64, device=mask.device)
    out.scatter_(1, place, torch.arange(entries, device=mask.device).expand(rows, -1))
    return out[:, :k].contiguous()


def candidate_mask(scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int) -> Tensor:
    """Entries that later index sources may choose from (section 2.6, candidates).

    scores float32 [N, M] (-inf = not visible), visible int64 [N] entries each query sees -> bool [N, M]. A block's
    score is its best visible entry; the block of the newest visible entry is forced in; `topk_blocks` are kept.
    """
    rows, entries = scores.shape
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    blocks = -(-entries // block_size)
    padded = torch.nn.functional.pad(scores, (0, blocks * block_size - entries), value=float("-inf"))
    block_scores = padded.unflatten(-1, (blocks, block_size)).amax(-1)  # [N, blocks]
    has_any = visible > 0
    newest = (visible - 1).clamp_min(0) // block_size
    forced = torch.zeros_like(block_scores, dtype=torch.bool)
    forced[torch.arange(rows, device=scores.device), newest] = has_any
    kept = top_mask(block_scores.masked_fill(forced, float("inf")), topk_blocks)
    return kept.repeat_interleave(block_size, dim=-1)[:, :entries] & ~scores.isneginf()


def top_entries(scores: Tensor, k: int) -> Tensor:
    """scores float32 [N, M], -inf = not selectable -> int64 [N, k] the k best positions, ascending, -1 = empty."""
    return mask_to_indices(top_mask(scores, k), k)
