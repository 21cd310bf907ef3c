"""FP8 activations of the routed experts: one scale per row, K in the order of their weights (`experts_layout.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.experts_layout import BLOCK_K
from deepinfer.kernels.triton.experts_plan import (
    ExpertPlan,
    PlanBuffers,
    count_experts,
    place_arguments,
    place_options,
    place_slots,
)
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, fold_tile
from deepinfer.kernels.triton.runtime import launch


def kernel_order(x: Tensor) -> Tensor:
    """Values [..., K] of natural order -> the kernels' order. Plain torch, any dtype, K of 128s."""
    blocks = x.unflatten(-1, (-1, 4, 4, 2, 4))  # block, t, w, o, b
    return blocks.movedim(-4, -2).flatten(-5)  # block, w, o, t, b


@triton.jit
def _quantize_row(x, codes, scale, row, stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)[:, None]  # [GROUPS, 1]: one t of one block
    inside = tl.arange(0, 32)[None, :]  # 8 w + 4 o + b
    offsets = group * 32 + inside
    live = offsets < WIDTH
    v = tl.load(x + row * stride + offsets, mask=live, other=0.0).to(tl.float32)
    folded, top = fold_tile(v)
    places = (group // 4) * 128 + (inside // 4) * 16 + (group % 4) * 4 + inside % 4
    tl.store(codes + row * WIDTH + places, folded, mask=live)
    tl.store(scale + row, top)


@triton.jit
def _quantize_kernel(x, codes, scale, stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    start_next()
    wait_for_previous()
    _quantize_row(x, codes, scale, tl.program_id(0).to(tl.int64), stride, WIDTH, GROUPS)


@triton.jit(do_not_specialize=["count", "num_blocks", "first", "chunks"])
def _prepare_kernel(
    ids, order, places, blocks, scratch, count, num_blocks, first, chunks, x, codes, scale, stride,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    ROW_WIDTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_previous()
    program = tl.program_id(0)
    if program < chunks:
        place_slots(
            program, ids, order, places, blocks, scratch, count, num_blocks, first, chunks, EXPERTS, WIDTH, CHUNK,
            ROWS, SPAN,
        )  # fmt: skip
    else:
        _quantize_row(x, codes, scale, (program - chunks).to(tl.int64), stride, ROW_WIDTH, GROUPS)


def _rows_like(x: Tensor) -> tuple[Fp8Rows, int]:
    rows, width = x.shape
    if width % BLOCK_K:
        raise ValueError(f"rows of {width} values are no multiple of {BLOCK_K}")
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    return Fp8Rows(codes, scale), triton.next_power_of_2(width // 32)


def quantize_for_experts(x: Tensor) -> Fp8Rows:
    """Q8 of x [N, K] (any float dtype, rows contiguous, K of 128s), folded to one scale per row, in kernel order."""
    out, groups = _rows_like(x)
    grid, tensors = (len(x),), (x, out.codes, out.scale, x.stride(0))
    launch(_quantize_kernel, grid, *tensors, WIDTH=x.shape[1], GROUPS=groups, num_warps=4, **OVERLAP)
    return out


def plan_and_quantize(ids: Tensor, buffers: PlanBuffers, x: Tensor) -> tuple[ExpertPlan, Fp8Rows]:
    """The plan of ids [T, k] and `quantize_for_experts` of x [T, D], in one launch."""
    if not buffers.small:
        count_experts(ids, buffers)
    out, groups = _rows_like(x)
    launch(
        _prepare_kernel,
        (buffers.chunks + len(x),),
        *place_arguments(ids, buffers),
        *(x, out.codes, out.scale, x.stride(0)),
        **place_options(buffers),
        ROW_WIDTH=x.shape[1],
        GROUPS=groups,
        num_warps=8,
        **OVERLAP,
    )
    return buffers.plan, out
