"""Clamped SwiGLU between the two products of the shared expert, with Q8 of the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, fold_tile, to_type
from deepinfer.kernels.triton.runtime import launch


@triton.jit
def _swiglu_kernel(x, codes, scale, limit, INNER: tl.constexpr, GROUPS: tl.constexpr):
    start_next()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    live = offsets < INNER
    gate = tl.load(x + row * (2 * INNER) + offsets, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * INNER) + INNER + offsets, mask=live, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    act = to_type(gate / (1.0 + tl.exp(-gate)) * up, tl.bfloat16).to(tl.float32)
    folded, top = fold_tile(act)
    tl.store(codes + row * INNER + offsets, folded, mask=live)
    tl.store(scale + row, top)


def swiglu(x: Tensor, limit: float) -> Fp8Rows:
    """x bf16 [T, 2 I], gate before up -> Q8 of bf16(silu(min(gate, limit)) * clamp(up, -limit, limit)), folded to one
    scale per row: codes [T, I] in natural order. I of 32s."""
    tokens, inner = x.shape[0], x.shape[1] // 2
    if inner % 32:
        raise ValueError(f"{inner} channels are no multiple of 32")
    codes = torch.empty(tokens, inner, dtype=torch.float8_e4m3fn, device=x.device)
    out = Fp8Rows(codes, torch.empty(tokens, dtype=torch.float32, device=x.device))
    groups = triton.next_power_of_2(inner // 32)
    launch(_swiglu_kernel, (tokens,), x, *out, limit, INNER=inner, GROUPS=groups, num_warps=4, **OVERLAP)
    return out
