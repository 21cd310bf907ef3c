"""Expert choice: twin of `reference/router.py`. One program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.runtime import INTERPRET, launch


@triton.jit
def _softplus(x):
    """log(1 + e^x); x where e^x is large (above 20, as torch has it). On a GPU the functions that torch calls, so that
    near ties fall as there."""
    if INTERPRET:
        e = tl.exp(tl.minimum(x, 20.0))
        one_more = 1.0 + e
        # log(1 + e) without the digits that 1 + e loses (Kahan).
        soft = tl.where(one_more == 1.0, e, tl.log(one_more) * (e / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))
    else:
        soft = libdevice.log1p(libdevice.exp(x))
    return tl.where(x > 20.0, x, soft)


@triton.jit
def _router_kernel(
    logits, bias, ids, weights, scores, bias_stride, temperature, scale, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    live = expert < EXPERTS
    logit = tl.load(logits + token * EXPERTS + expert, mask=live, other=0.0)
    score = tl.sqrt_rn(_softplus(tl.div_rn(logit, temperature)))
    if SCORES:
        tl.store(scores + token * EXPERTS + expert, score, mask=live)
    steered = score + tl.load(bias + token * bias_stride + expert, mask=live, other=0.0)
    left = tl.where(live, steered, float("-inf"))
    choice = tl.arange(0, CHOICES)
    chosen = tl.zeros((CHOICES,), tl.int32)
    weight = tl.zeros((CHOICES,), tl.float32)
    for number in tl.static_range(TOPK):
        best = tl.max(left, axis=0)
        # The lowest of equals; the last expert where nothing is equal (NaN), so that no id is out of range.
        which = tl.min(tl.where((left == best) & live, expert, EXPERTS - 1), axis=0)
        chosen = tl.where(choice == number, which, chosen)
        weight = tl.where(choice == number, tl.sum(tl.where(expert == which, score, 0.0), axis=0), weight)
        left = tl.where(expert == which, float("-inf"), left)
    if NORMALIZE:
        weight = tl.div_rn(weight, tl.sum(weight, axis=0) + 1e-20)
    writes = choice < TOPK
    tl.store(ids + token * TOPK + choice, chosen, mask=writes)
    tl.store(weights + token * TOPK + choice, weight * scale, mask=writes)


def route(
    logits: Tensor,
    bias: Tensor,
    *,
    topk: int,
    scale: float,
    normalize: bool,
    gate_temp: float = 1.0,
    with_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """logits float32 [T, E], bias float32 [E] or [T, E] -> ids int32 [T, k] best first (the lower one of equals),
    weights float32 [T, k], scores float32 [T, E] or None."""
    tokens, experts = logits.shape
    if not 0 < topk <= experts:
        raise ValueError(f"{topk} of {experts} experts cannot be chosen")
    ids = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(logits) if with_scores else None
    width = triton.next_power_of_2(experts)
    launch(
        _router_kernel,
        (tokens,),
        *(logits, bias, ids, weights, scores, bias.stride(0) if bias.dim() == 2 else 0, gate_temp, scale),
        TOPK=topk,
        EXPERTS=experts,
        WIDTH=width,
        CHOICES=triton.next_power_of_2(topk),
        NORMALIZE=normalize,
        SCORES=with_scores,
        num_warps=1 if width <= 128 else 4,
        **OVERLAP,
    )
    return ids, weights, scores
