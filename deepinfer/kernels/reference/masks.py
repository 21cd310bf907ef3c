"""Structured output's part of a law: tokens that may not follow have no probability."""

from __future__ import annotations

import torch
from torch import Tensor


def constrain_rows(logits: Tensor, raw: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Changes `rows` (int64 [n], distinct) of logits (float32 [N, V]) in place: what the masks do not allow is -inf.

    masks int32 [n, (V + 31) // 32]: bit t % 32 of word t // 32 = token t may follow. A row of which nothing would be
    left, because bans and biases took all that is allowed, gives these up rather than its constraint: it has the values
    of `raw` (float32 [N, V]: the model's own) for what is allowed, at least the smallest float, so that a token which
    the model calls impossible can come too. A row whose mask is empty is -inf throughout. NaN counts as something left.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    allowed = (masks[:, ids >> 5] >> (ids & 31) & 1).bool()
    kept = logits.index_select(0, rows).masked_fill(~allowed, -torch.inf)
    empty = (kept == -torch.inf).all(-1, keepdim=True)
    own = raw.index_select(0, rows).clamp(min=torch.finfo(raw.dtype).min)
    logits.index_copy_(0, rows, torch.where(empty & allowed, own, kept))
