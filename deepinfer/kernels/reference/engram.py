"""Engram: hashed n-gram memory added to the stream (section 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_rows(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Table rows of every token.

    history: int64 [N, orders + 1], compressed ids of the token and the ones before it (column s = s tokens back);
    -1 marks a position that ends the look-back (before the sequence, or a dead token). multipliers int64 [orders + 1],
    primes int64 [orders, heads], offsets int64 [orders * heads] -> int64 [N, orders * heads].
    """
    blocked = (history < 0).cumsum(1) > 0  # once blocked, all further shifts read the pad id
    ids = torch.where(blocked, pad, history)
    products = ids * multipliers  # int64: below 2^63 by the choice of the multipliers
    running = products[:, 0]
    columns = []
    for order in range(primes.shape[0]):
        running = running ^ products[:, order + 1]
        columns.append(running.unsqueeze(1) % primes[order])  # [N, heads]
    return torch.cat(columns, dim=1) + offsets


def engram_gate(stream: Tensor, keys: Tensor, weight: Tensor, eps: float) -> Tensor:
    """stream, keys [N, copies, D]; weight float32 [copies, D] = q_weight * k_weight -> gate float32 [N, copies]."""
    x, k = stream.float(), keys.float()
    rho = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    d = (x * weight * k).sum(-1) * rho * x.shape[-1] ** -0.5
    # copysign: d = +0 counts as positive
    return torch.sigmoid(torch.copysign(d.abs().clamp_min(1e-6).sqrt(), d))


def engram_inject(stream: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """X_k + gate_k * V: stream [N, copies, D], gate float32 [N, copies], value [N, D] -> the stream's dtype."""
    return (stream.float() + gate.unsqueeze(-1) * value.float().unsqueeze(1)).to(stream.dtype)
