"""RMSNorm of rows, and the norms behind the merged query and window projection (model specification 2.4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.quant import FP8_GROUP
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, added, fold_tile, row_warps, to_type
from deepinfer.kernels.triton.records import store_window
from deepinfer.kernels.triton.runtime import launch

_GROUP = tl.constexpr(FP8_GROUP)


@triton.jit
def _norm_kernel(x, weight, out, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < WIDTH
    v = tl.load(x + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    y = v * tl.rsqrt(tl.sum(v * v, axis=0) / WIDTH + eps) * w
    tl.store(out + row * WIDTH + offsets, to_type(y, out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] any float dtype, weight [K] -> x * rsqrt(mean(x^2) + eps) * weight, float32 inside, x's dtype out. Of
    two dimensions, rows may lie apart."""
    width, out = x.shape[-1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, width)
    launch(
        _norm_kernel,
        (len(x),),
        *(x, weight, out, x.stride(0), eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=row_warps(width),
        **OVERLAP,
    )
    return out


@triton.jit(do_not_specialize=["rows"])  # one kernel for every number of rows
def _query_norms_kernel(
    merged, q_norm, kv_norm, latent, codes, scale, window, cos, sin, rows, stride, window_stride, eps,
    RANK: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, ROPE: tl.constexpr, SPLITS: tl.constexpr,
    RECORDS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = latent.dtype.element_ty
    if tl.program_id(1) == 0:
        offsets = tl.arange(0, GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        inside = offsets < RANK
        v = added(merged, row, rows, offsets, inside, stride, SPLITS, dtype)
        w = tl.load(q_norm + offsets, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(tl.sum(v * v, axis=1), axis=0) / RANK
        y = to_type(v * tl.rsqrt(mean + eps) * w, dtype)
        tl.store(latent + row * RANK + offsets, y, mask=inside)
        folded, top = fold_tile(y.to(tl.float32))
        tl.store(codes + row * RANK + offsets, folded, mask=inside)
        tl.store(scale + row, top)
    else:
        # Pairs of neighbours (2i, 2i + 1) turn together: the last ROPE of the HEAD / 2 pairs, the others by nothing.
        pair = tl.arange(0, HEAD // 2)
        everywhere = pair >= 0
        even = added(merged, row, rows, RANK + 2 * pair, everywhere, stride, SPLITS, dtype)
        odd = added(merged, row, rows, RANK + 2 * pair + 1, everywhere, stride, SPLITS, dtype)
        factor = tl.rsqrt((tl.sum(even * even, axis=0) + tl.sum(odd * odd, axis=0)) / HEAD + eps)
        even = to_type(even * factor * tl.load(kv_norm + 2 * pair).to(tl.float32), dtype).to(tl.float32)
        odd = to_type(odd * factor * tl.load(kv_norm + 2 * pair + 1).to(tl.float32), dtype).to(tl.float32)
        angle = pair - (HEAD // 2 - ROPE)
        c = tl.load(cos + row * ROPE + angle, mask=angle >= 0, other=1.0)
        s = tl.load(sin + row * ROPE + angle, mask=angle >= 0, other=0.0)
        first, second = to_type(even * c - odd * s, dtype), to_type(even * s + odd * c, dtype)
        if RECORDS:
            values = tl.join(first.to(tl.float32), second.to(tl.float32))  # [HEAD / 2, 2]
            store_window(tl.reshape(values, (HEAD // _GROUP, _GROUP)), window + row * window_stride, HEAD)
        else:
            tl.store(window + row * window_stride + 2 * pair, first)
            tl.store(window + row * window_stride + 2 * pair + 1, second)


def query_norms(
    merged: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    records: Tensor | None = None,
) -> tuple[Tensor, Fp8Rows, Tensor]:  # fmt: skip
    """What follows x (wq_a above wkv)^T, one launch: merged bf16 [N, rank + head_dim], or the parts of a split sum,
    float32 [splits, N, rank + head_dim] (`dense.split_sums`), added in order and rounded to bf16 here.

    cos, sin: float32 [N, rope_dim / 2]. -> latent query bf16 [N, rank], normalised; Q8 of it, folded per row; window
    latent bf16 [N, head_dim], normalised and rotated, in natural order, before its record is rounded. records: uint8
    [N, head_dim + head_dim / 32], neighbouring rows of a pool, which get the window records and are returned in place
    of the latents.
    """
    rank, head = q_norm.numel(), kv_norm.numel()
    splits = merged.shape[0] if merged.dim() == 3 else 0
    rows, stride = merged.shape[-2], merged.stride(-2)
    dtype = torch.bfloat16 if splits else merged.dtype
    latent = merged.new_empty(rows, rank, dtype=dtype)
    window = merged.new_empty(rows, head, dtype=dtype) if records is None else records
    codes = merged.new_empty(rows, rank, dtype=torch.float8_e4m3fn)
    scale = merged.new_empty(rows, dtype=torch.float32)
    launch(
        _query_norms_kernel,
        (rows, 2),
        *(merged, q_norm, kv_norm, latent, codes, scale, window, cos, sin, rows, stride, window.stride(0), eps),
        RANK=rank,
        GROUPS=triton.next_power_of_2(rank // FP8_GROUP),
        HEAD=head,
        ROPE=cos.shape[-1],
        SPLITS=splits,
        RECORDS=records is not None,
        num_warps=4,
        enable_fp_fusion=False,  # a rotation rounds as the reference does
        **OVERLAP,
    )
    return latent, Fp8Rows(codes, scale), window
