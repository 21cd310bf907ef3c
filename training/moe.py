"""Mixture of experts: router, sorting tokens by expert, clamped SwiGLU, combination."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.quant import act_fp8, straight

ALIGN = 16  # rows; the grouped GEMM's weight gradient wants aligned group borders


class Dispatch(NamedTuple):
    """Where each (token, choice) slot goes; rows of an expert are contiguous, padded to ALIGN."""

    row_of_slot: Tensor  # [N, K] int64
    slot_of_row: Tensor  # [M] int64; padding rows point at slot 0
    valid: Tensor  # [M] bool
    ends: Tensor  # [E] int32, exclusive end row of each expert; the last one covers the tail
    counts: Tensor  # [E] int64, tokens per expert


class _Gather(torch.autograd.Function):
    """Row gather whose gradient is a gather too (no atomics): x[index]; grad[inverse].sum over the K choices."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        picked = grad[inverse]
        return (picked.sum(1) if inverse.dim() == 2 else picked), None, None


class _Combine(torch.autograd.Function):
    """Sums the K rows of each token; the gradient of a row is its token's gradient."""

    @staticmethod
    def forward(ctx, y: Tensor, row_of_slot: Tensor, token_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        ctx.dtype = y.dtype
        return y[row_of_slot].float().sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        # Padding rows receive some token's gradient: harmless, their activation is 0 and nothing reads their input.
        return grad.to(ctx.dtype)[token_of_row], None, None


def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """x [N, D] -> chosen experts [N, K] int64 and their weights [N, K] float32 (bias only steers the choice)."""
    scores = torch.sqrt(F.softplus(x.float() @ gate.float().t()))  # [N, E]
    biased, lanes = scores.detach() + bias, torch.arange(gate.shape[0], device=x.device)
    chosen = []
    for _ in range(top_k):
        best = biased.argmax(-1, keepdim=True)
        chosen.append(best)
        biased = torch.where(lanes == best, -torch.inf, biased)
    ids = torch.cat(chosen, -1)
    weights = torch.cat([torch.where(lanes == c, scores, 0).sum(-1, keepdim=True) for c in chosen], -1)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


@torch.no_grad()
def dispatch(ids: Tensor, experts: int) -> Dispatch:
    """Sorts slots by expert; shapes depend on N, K and E only."""
    n, k = ids.shape
    flat = ids.flatten()
    rows = n * k + experts * ALIGN
    counts = (flat[:, None] == torch.arange(experts, device=ids.device)).sum(0)
    ends = ((counts + ALIGN - 1) // ALIGN * ALIGN).cumsum(0)
    shift = (ends - (counts + ALIGN - 1) // ALIGN * ALIGN) - (counts.cumsum(0) - counts)  # padded start - dense start
    order = flat.to(torch.int32).sort(stable=True).indices
    row = torch.arange(n * k, device=ids.device) + shift[flat[order]]
    row_of_slot = torch.empty_like(flat).scatter_(0, order, row)
    slot_of_row = torch.zeros(rows, dtype=torch.int64, device=ids.device).scatter_(0, row, order)
    valid = torch.zeros(rows, dtype=torch.bool, device=ids.device).scatter_(
        0, row, torch.ones_like(row, dtype=torch.bool)
    )
    ends = torch.cat([ends[:-1], torch.full_like(ends[:1], rows)]).to(torch.int32)
    return Dispatch(row_of_slot.view(n, k), slot_of_row, valid, ends, counts)


def swiglu(h: Tensor, limit: float) -> Tensor:
    """[.., 2F] (gate, up) -> float32 [.., F] with the clamps of the architecture."""
    gate, up = h.float().chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of group e times w[e]^T; x [M, in], w [E, out, in] -> [M, out]."""
    if x.is_cuda:
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([x[bounds[e] : bounds[e + 1]] @ w[e].t() for e in range(len(w))])


def experts(
    x: Tensor,
    weights: Tensor,
    d: Dispatch,
    w13: Tensor,
    w2: Tensor,
    sw13: Tensor,
    sw2: Tensor,
    limit: float,
    quant: bool,
) -> Tensor:
    """Routed plus shared experts: x [N, D], weights [N, K] -> [N, D]."""
    k = weights.shape[1]
    xq = straight(x, act_fp8) if quant else x
    token_of_row = d.slot_of_row // k
    rows = _Gather.apply(xq, token_of_row, d.row_of_slot)
    row_weight = _Gather.apply(weights.flatten(), d.slot_of_row, d.row_of_slot.flatten())
    row_weight = torch.where(d.valid, row_weight, 0.0)
    a = (swiglu(grouped_mm(rows, w13, d.ends), limit) * row_weight[:, None]).to(x.dtype)
    a = straight(a, act_fp8) if quant else a
    routed = _Combine.apply(grouped_mm(a, w2, d.ends), d.row_of_slot, token_of_row)
    s = swiglu(xq @ sw13.t(), limit).to(x.dtype)
    s = straight(s, act_fp8) if quant else s
    return (routed + (s @ sw2.t()).float()).to(x.dtype)
