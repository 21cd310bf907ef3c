"""mHC on the device (model specification 2.2): a step of a sub-layer, and its parts alone where a stream ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.triton.hyper_parts import CHUNK, COPIES, fn_parts
from deepinfer.kernels.triton.hyper_pass import expanded, load_copies, of_rows, store_copies
from deepinfer.kernels.triton.hyper_step import Step, checked, step
from deepinfer.kernels.triton.hyper_values import rounded, widened
from deepinfer.kernels.triton.quantize import Fp8Rows, row_warps
from deepinfer.kernels.triton.runtime import launch

__all__ = [
    "CHUNK",
    "COPIES",
    "fn_parts",
    "hyper_collapse",
    "hyper_collapse_norm",
    "hyper_expand",
    "hyper_step",
    "hyper_step_quantized",
]

EXPAND_ROWS, EXPAND_WARPS = 32, 4


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(stream, y, post, comb, out, rows, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
    """Program (chunk, tile): M rows, C columns of every copy."""
    row = tl.program_id(1) * M + tl.arange(0, M)
    live = row < rows
    mask = live[:, None]
    wide = row.to(tl.int64)[:, None]
    d = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    at = wide * (4 * D) + d
    q = of_rows(post + row * 4, 4, live)
    c = of_rows(comb + row * 16, 16, live)
    n0, n1, n2, n3 = load_copies(stream, at, mask, D)
    v = tl.load(y + wide * D + d, mask=mask, other=0.0)
    n0, n1, n2, n3 = expanded(n0, n1, n2, n3, v, q, c)
    store_copies(out, at, mask, n0, n1, n2, n3, D)


@triton.jit
def _collapse_kernel(
    stream, pre, norm, out, norm_eps, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    v = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(4):
        x = widened(tl.load(stream + row * (4 * D) + copy * D + d, mask=inside, other=0.0))
        v += tl.load(pre + row * 4 + copy) * x
    u = rounded(v, out.dtype.element_ty)
    if NORM:
        v = widened(u)
        w = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        u = rounded(v * tl.rsqrt(tl.sum(v * v, axis=0) / D + norm_eps) * w, out.dtype.element_ty)
    tl.store(out + row * D + d, u, mask=inside)


def hyper_step(stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights) -> Step:
    """stream bf16 [N, 4, D], D a multiple of 64; update None or (y bf16 [N, D], post float32 [N, 4], comb float32
    [N, 4, 4]); pre float32 [N, 4] -> stream, x bf16 [N, D], pre, post, comb. One launch; a row's bits do not depend on
    the others. Two steps with the same weights may not run at the same time. The mixes' error: `hyper_parts.SPLIT`."""
    return step(stream, update, pre, w, quantize=False)[0]


def hyper_step_quantized(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights
) -> tuple[Step, Fp8Rows]:
    """`hyper_step`, and Q8 of x folded to one scale per row, in the same launch."""
    made, folded = step(stream, update, pre, w, quantize=True)
    assert folded is not None
    return made, folded


def hyper_expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """stream bf16 [N, 4, D], y bf16 [N, D], post float32 [N, 4], comb float32 [N, 4, 4] -> bf16 [N, 4, D]."""
    stream = checked(stream)
    rows, _, width = stream.shape
    out = torch.empty_like(stream)
    launch(
        _expand_kernel,
        (width // CHUNK, triton.cdiv(rows, EXPAND_ROWS)),
        *(stream, y.contiguous(), post.contiguous(), comb.contiguous(), out, rows),
        D=width,
        M=EXPAND_ROWS,
        C=CHUNK,
        num_warps=EXPAND_WARPS,
        enable_fp_fusion=False,  # as in a step
    )
    return out


def _collapse(stream: Tensor, pre: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    rows, _, width = stream.shape
    out = stream.new_empty(rows, width)
    launch(
        _collapse_kernel,
        (rows,),
        *(stream.contiguous(), pre.contiguous(), pre if norm is None else norm, out, eps),
        D=width,
        BLOCK=triton.next_power_of_2(width),
        NORM=norm is not None,
        num_warps=row_warps(width),
    )
    return out


def hyper_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: bf16 [N, 4, D], float32 [N, 4] -> bf16 [N, D]."""
    return _collapse(stream, pre, None, 0.0)


def hyper_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of it, times weight [D]."""
    return _collapse(stream, pre, weight, eps)
