"""Sum of a token's routed experts and the shared one (section 2.8)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.experts_plan import ExpertPlan
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.runtime import launch

CHUNK = 1024  # channels of a program


@triton.jit
def _combine_kernel(
    routed, shared, places, out, TOPK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    start_next()
    wait_for_previous()
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    channels = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    live = channels < WIDTH
    choice = tl.arange(0, 16)
    place = tl.load(places + token * TOPK + choice, mask=choice < TOPK, other=-1)
    total = tl.zeros((CHUNK,), tl.float32)
    least = -1
    for _ in tl.static_range(TOPK):
        # Places rise with the expert's number: the next larger one is the next expert's.
        least = tl.min(tl.where(place > least, place, 0x7FFFFFFF), axis=0)
        row = routed + least.to(tl.int64) * WIDTH + channels
        total += tl.load(row, mask=live & (least < 0x7FFFFFFF), other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * WIDTH + channels, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + channels, to_type(total, out.dtype.element_ty), mask=live)


def combine_experts(
    routed: Tensor, plan: ExpertPlan, shared: Tensor | None, topk: int, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """routed bf16 [S, D] by sorted place, shared bf16 [T, D] or None -> [T, D]: the routed outputs of each token added
    in float32 by rising expert number, then the shared one, rounded once. A slot that was left out adds nothing."""
    if topk > 16:
        raise ValueError(f"{topk} experts per token: at most 16")
    tokens, width = plan.places.numel() // topk, routed.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=routed.device)
    launch(
        _combine_kernel,
        (tokens * triton.cdiv(width, CHUNK),),
        *(routed, shared, plan.places, out),
        TOPK=topk,
        WIDTH=width,
        CHUNK=CHUNK,
        SHARED=shared is not None,
        num_warps=4,
        **OVERLAP,
    )
    return out
