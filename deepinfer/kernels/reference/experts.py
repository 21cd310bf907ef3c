"""Clamped SwiGLU experts (section 2.8)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.reference.linear import quantized_linear


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32; the gate is clamped from above only."""
    return F.silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)


def expert_forward(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float, route_weight: Tensor | None) -> Tensor:
    """One expert: x [N, D], w1/w3 [I, D], w2 [D, I] float32, route_weight float32 [N] or None -> [N, D], x's dtype.

    The routing weight goes in before the down projection, so the activation is rounded with it.
    """
    act = swiglu(quantized_linear(x, w1), quantized_linear(x, w3), limit)
    if route_weight is not None:
        act = act * route_weight.unsqueeze(-1)
    return quantized_linear(act.to(x.dtype), w2)


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int], tuple[Tensor, Tensor, Tensor]], limit: float
) -> Tensor:
    """Sum of the chosen experts, float32 [N, D], added by rising expert number.

    x [N, D]; ids int64 [N, k]; weights float32 [N, k]; `expert(e)` gives (w1, w3, w2) as float32 matrices, so that
    weights may stay quantised until an expert is really hit.
    """
    topk = ids.shape[1]
    order = ids.flatten().argsort(stable=True)  # pairs (token, choice) grouped by expert
    rows = order // topk
    flat_weights = weights.flatten()
    counts = torch.bincount(ids.flatten()).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for number, count in enumerate(counts):
        if count == 0:
            continue
        pairs = order[start : start + count]
        tokens = rows[start : start + count]
        start += count
        y = expert_forward(x[tokens], *expert(number), limit, flat_weights[pairs])
        out.index_add_(0, tokens, y.float())
    return out
