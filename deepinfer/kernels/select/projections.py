"""Products with weights, and the norms and rotations around them."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.cpu.linear import linear_packed
from deepinfer.kernels.gpu_weights import FoldedWeight, GroupedWeight, SplitHeads
from deepinfer.kernels.layer_weights import OutputWeights, QueryWeights
from deepinfer.kernels.reference import norm, rope
from deepinfer.kernels.reference.linear import linear, quantized_linear
from deepinfer.kernels.select.backends import cpu_fast, cpu_twins, gpu, gpu_fast, gpu_twins
from deepinfer.kernels.weights import DenseWeight, PackedWeight, Weight


def project(x: Tensor, weight: Weight, *, rounded: bool) -> Tensor:
    """x [..., K] times weight [N, K]^T. rounded: the official numerics round x to FP8 first (not in float32)."""
    if isinstance(weight, PackedWeight) and x.dim() == 2 and cpu_twins(x.device, x.dtype):
        return linear_packed(x, weight.packed, weight.rows)
    if x.dim() == 2 and gpu_fast(x):
        if rounded and isinstance(weight, FoldedWeight):
            return gpu().linear_folded(x, weight)
        if not rounded and is_bfloat16(weight):
            return gpu().linear_rounded(x, weight)
    return (quantized_linear if rounded else linear)(x, weight.dense())


def project_wide(x: Tensor, weight: Weight) -> Tensor:
    """x [N, K], not rounded, times weight [M, K]^T in float32 whatever x is -> float32 [N, M]."""
    if gpu_fast(x) and is_bfloat16(weight):
        return gpu().linear_wide(x, weight)
    return project(x.float(), weight, rounded=False)


def folds_rows(weight: Weight, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows may come to the weight as FP8 with one scale each, which `project_memory` takes."""
    return isinstance(weight, FoldedWeight) and gpu_twins(device, dtype)


def project_memory(memory: Any, weight: Weight) -> Tensor:
    """`project`, rounded, of rows that may be folded to FP8 already (`folds_rows`)."""
    if isinstance(memory, Tensor):
        return project(memory, weight, rounded=True)
    return gpu().linear_rows(memory, weight)


def is_bfloat16(weight: Weight) -> TypeGuard[DenseWeight]:
    return isinstance(weight, DenseWeight) and weight.values.dtype == torch.bfloat16


def in_split_order(x: Tensor, w: QueryWeights) -> bool:
    """Whether queries of x, and what attention makes of them, hold a head's even dims before its odd ones."""
    return isinstance(w.wq_b, SplitHeads) and gpu_fast(x)


def query_and_window(
    x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor, places: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D] -> latent query [N, q_lora_rank] (normalised), queries [N, heads, head_dim] (`in_split_order` or not)
    and window latents [N, head_dim], both rotated. Section 2.4, steps 1 and 2, before the window record is rounded.

    places: where the window records go, uint8 [N, width]. Kernels that can write them there give `places` in place of
    the latents."""
    if w.packed is not None and cpu_fast(x):
        return cpu.query_and_window(x, w, cos, sin)
    if in_split_order(x, w):
        return gpu().query_and_window(x, w, cos, sin, places)
    latent = rms_norm(project(x, w.wq_a, rounded=True), w.q_norm, w.eps)
    q = project(latent, w.wq_b, rounded=True).unflatten(1, (w.heads, w.head_dim))
    return latent, apply_rope(q, cos, sin), window_latents(x, w, cos, sin)


def window_latents(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """The third result of `query_and_window` alone, the same bits: for rows that leave keys behind and ask nothing."""
    if w.packed is not None and cpu_fast(x):
        return cpu.window_latents(x, w, cos, sin)
    if in_split_order(x, w):
        return gpu().window_latents(x, w, cos, sin)
    return apply_rope(rms_norm(project(x, w.wkv, rounded=True), w.kv_norm, w.eps), cos, sin)


def grouped_output(o: Tensor, w: OutputWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """o [N, heads, head_dim] (may be overwritten; in the order of the queries) -> [N, D]: turned back, each group
    through its wo_a, then wo_b."""
    if w.packed is not None and cpu_fast(o):
        return cpu.grouped_output(o, w, cos, sin)
    if isinstance(w.wo_a, GroupedWeight) and gpu_fast(o):
        return gpu().project_heads(o, w, cos, sin)
    return project_groups(apply_rope(o, cos, sin, inverse=True), w)


def project_groups(o: Tensor, w: OutputWeights) -> Tensor:
    """o [N, heads, head_dim] turned back -> [N, D]. wo_a takes its input unrounded even in the official numerics: the
    release dequantises it (section 2.4, step 6)."""
    groups = o.flatten(1).unflatten(1, (len(w.wo_a), -1)).unbind(1)  # [N, heads / groups * head_dim] each
    z = torch.cat([project(x, wo_a, rounded=False) for x, wo_a in zip(groups, w.wo_a, strict=True)], dim=1)
    return project(z, w.wo_b, rounded=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, multiplied: bool = False) -> Tensor:
    """multiplied: FP8 products read what comes out, so that its Q8 is best made with it."""
    if x.dim() == 2 and gpu_fast(x):
        return (gpu().rms_norm_multiplied if multiplied else gpu().rms_norm)(x, weight, eps)
    return (cpu.rms_norm if cpu_fast(x) else norm.rms_norm)(x, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    if gpu_fast(x) and x.is_contiguous():
        return gpu().apply_rope(x, cos, sin, inverse=inverse)
    return (cpu.apply_rope if cpu_fast(x) else rope.apply_rope)(x, cos, sin, inverse=inverse)
