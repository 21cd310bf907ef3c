"""Products with weights, and the norms and rotations around them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.cpu.linear import linear_packed
from deepinfer.kernels.layer_weights import OutputWeights, QueryWeights
from deepinfer.kernels.reference import norm, rope
from deepinfer.kernels.reference.linear import linear, quantized_linear
from deepinfer.kernels.select.backends import cpu_fast, cpu_twins
from deepinfer.kernels.weights import PackedWeight, Weight


def project(x: Tensor, weight: Weight, *, rounded: bool) -> Tensor:
    """x [..., K] times weight [N, K]^T. rounded: the official numerics round x to FP8 first (not in float32)."""
    if isinstance(weight, PackedWeight) and x.dim() == 2 and cpu_twins(x.device, x.dtype):
        return linear_packed(x, weight.packed, weight.rows)
    return (quantized_linear if rounded else linear)(x, weight.dense())


def query_and_window(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D] -> latent query [N, q_lora_rank] (normalised), queries [N, heads, head_dim] and window latents
    [N, head_dim], both rotated. Section 2.4, steps 1 and 2, before the window record is rounded."""
    if w.packed is not None and cpu_fast(x):
        return cpu.query_and_window(x, w, cos, sin)
    latent = rms_norm(project(x, w.wq_a, rounded=True), w.q_norm, w.eps)
    q = project(latent, w.wq_b, rounded=True).unflatten(1, (w.heads, w.head_dim))
    return latent, apply_rope(q, cos, sin), window_latents(x, w, cos, sin)


def window_latents(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """The third result of `query_and_window` alone, the same bits: for rows that leave keys behind and ask nothing."""
    if w.packed is not None and cpu_fast(x):
        return cpu.window_latents(x, w, cos, sin)
    return apply_rope(rms_norm(project(x, w.wkv, rounded=True), w.kv_norm, w.eps), cos, sin)


def grouped_output(o: Tensor, w: OutputWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """o [N, heads, head_dim] (may be overwritten) -> [N, D]: turned back, each group through its wo_a, then wo_b."""
    if w.packed is not None and cpu_fast(o):
        return cpu.grouped_output(o, w, cos, sin)
    return project_groups(apply_rope(o, cos, sin, inverse=True), w)


def project_groups(o: Tensor, w: OutputWeights) -> Tensor:
    """o [N, heads, head_dim] turned back -> [N, D]. wo_a takes its input unrounded even in the official numerics: the
    release dequantises it (section 2.4, step 6)."""
    groups = o.flatten(1).unflatten(1, (len(w.wo_a), -1)).unbind(1)  # [N, heads / groups * head_dim] each
    z = torch.cat([project(x, wo_a, rounded=False) for x, wo_a in zip(groups, w.wo_a, strict=True)], dim=1)
    return project(z, w.wo_b, rounded=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (cpu.rms_norm if cpu_fast(x) else norm.rms_norm)(x, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    return (cpu.apply_rope if cpu_fast(x) else rope.apply_rope)(x, cos, sin, inverse=inverse)
