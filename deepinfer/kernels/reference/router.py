"""Expert choice: sqrt(softplus) scores, a bias that steers the choice only (section 2.8)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    logits: Tensor, bias: Tensor, *, topk: int, scale: float, normalize: bool, gate_temp: float
) -> tuple[Tensor, Tensor, Tensor]:
    """logits float32 [N, E] (the gate's float32 product), bias float32 [E] or [N, E] -> expert ids int64 [N, k] (best
    first), weights float32 [N, k], scores float32 [N, E].

    The bias is added for the choice alone; weights are the chosen scores, normalised by their sum + 1e-20 (a constant
    of the release, not the norm's eps) and scaled.
    """
    scores = F.softplus(logits / gate_temp).sqrt()
    ids = torch.topk(scores + bias, topk, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale, scores
