"""Lightning indexer: which compressed entries a query attends to (section 2.6)."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """S[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]).

    queries [B, T, H, D], keys [B, M, D], weights [B, T, H] of one dtype -> float32 [B, T, M]. float32 inputs: exact
    float32. Other dtypes: the official steps, where head scores, the product with the weight and the sum over heads are
    each rounded to that dtype.
    """
    batch, rows, heads, _ = queries.shape
    dots = torch.bmm(queries.float().flatten(1, 2), keys.float().transpose(1, 2))  # [B, T * H, M]
    dots = dots.view(batch, rows, heads, -1)
    if queries.dtype == torch.float32:
        return torch.einsum("bthm,bth->btm", dots.relu_(), weights)
    products = dots.to(queries.dtype).relu() * weights.unsqueeze(-1)
    return products.sum(2).float()
