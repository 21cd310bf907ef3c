"""Expert choice: twin of `reference/router.py`. A product for the scores' logits, then one program per token.

The product is cut along K by the gate alone, and its parts are added in rising order: by the programs that choose where
rows are few, by the product itself where they are many, to the same bits. So a row's choice does not depend on the
rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.runtime import INTERPRET, launch

TILE_TOKENS, TILE_EXPERTS, DEPTH = 64, 64, 128  # of a tile, and of K in a step
MOST_PARTS = 8
APART_ROWS = 512  # up to so many, parts are programs of their own


def part_count(width: int) -> int:
    """In how many parts the sum over K is made: with few rows and experts there are too few tiles to fill a device.
    Each takes two steps at least: of one alone the compiler adds to the total in the tensor core, which rounds
    otherwise."""
    parts = 1
    while 2 * parts <= MOST_PARTS and width % (2 * parts * DEPTH) == 0 and width >= 4 * parts * DEPTH:
        parts *= 2
    return parts


@triton.jit(do_not_specialize=["rows"])  # one kernel for every number of rows
def _logits_kernel(
    x, gate, out, rows, COUNT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    here, known = (token < rows)[:, None], (expert < COUNT)[None, :]
    part = tl.program_id(2) if APART else 0
    k = part * (WIDTH // PARTS) + tl.arange(0, DEPTH)
    x_places = x + token[:, None] * WIDTH + k[None, :]
    gate_places = gate + expert[None, :] * WIDTH + k[:, None]
    wait_for_previous()
    total = tl.zeros((TOKENS, EXPERTS), dtype=tl.float32)
    for _ in range(1 if APART else PARTS):
        sums = tl.zeros((TOKENS, EXPERTS), dtype=tl.float32)
        for _ in range(WIDTH // PARTS // DEPTH):
            values = tl.load(x_places, mask=here, other=0.0)
            weights = tl.load(gate_places, mask=known, other=0.0)
            if INTERPRET:
                sums = tl.dot(values.to(tl.float32), weights.to(tl.float32), sums, input_precision="ieee")
            else:
                sums = tl.dot(values, weights, sums)
            x_places += DEPTH
            gate_places += DEPTH
        total += sums
    start_next()
    tl.store(out + (part * rows + token)[:, None] * COUNT + expert[None, :], total, mask=here & known)


def gate_logits(x: Tensor, gate: Tensor) -> Tensor:
    """x bf16 [T, D], gate bf16 [E, D], D of 128s -> logits, float32 [T, E], or parts of them for `route` to add,
    [parts, T, E]."""
    (tokens, width), experts = x.shape, len(gate)
    parts = part_count(width)
    apart = parts > 1 and tokens <= APART_ROWS
    out = x.new_empty(*([parts] if apart else []), tokens, experts, dtype=torch.float32)
    launch(
        _logits_kernel,
        (triton.cdiv(tokens, TILE_TOKENS), triton.cdiv(experts, TILE_EXPERTS), parts if apart else 1),
        *(x.contiguous(), gate, out, tokens),
        COUNT=experts,
        WIDTH=width,
        TOKENS=TILE_TOKENS,
        EXPERTS=TILE_EXPERTS,
        DEPTH=DEPTH,
        PARTS=parts,
        APART=apart,
        num_warps=4 if apart else 8,
        num_stages=4 if apart else 3,
        **OVERLAP,
    )
    return out


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


@triton.jit(do_not_specialize=["tokens"])
def _router_kernel(
    logits, bias, ids, weights, scores, bias_stride, temperature, scale, tokens, TOPK: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr, SCORES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    live = expert < EXPERTS
    logit = tl.load(logits + token * EXPERTS + expert, mask=live, other=0.0)
    for part in tl.static_range(1, PARTS):
        logit += tl.load(logits + (part * tokens + token) * EXPERTS + expert, mask=live, other=0.0)
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
    """logits float32 [T, E], or parts of them, [parts, T, E] (`gate_logits`); bias float32 [E] or [T, E] -> ids int32
    [T, k] best first (the lower one of equals), weights float32 [T, k], scores float32 [T, E] or None."""
    tokens, experts = logits.shape[-2:]
    if not 0 < topk <= experts:
        raise ValueError(f"{topk} of {experts} experts cannot be chosen")
    ids = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=logits.device)
    scores = logits.new_empty(tokens, experts) if with_scores else None
    width = triton.next_power_of_2(experts)
    launch(
        _router_kernel,
        (tokens,),
        *(logits, bias, ids, weights, scores, bias.stride(0) if bias.dim() == 2 else 0, gate_temp, scale, tokens),
        TOPK=topk,
        EXPERTS=experts,
        WIDTH=width,
        CHOICES=triton.next_power_of_2(topk),
        NORMALIZE=normalize,
        SCORES=with_scores,
        PARTS=logits.shape[0] if logits.dim() == 3 else 1,
        num_warps=1 if width <= 128 else 4,
        **OVERLAP,
    )
    return ids, weights, scores
