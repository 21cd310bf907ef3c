"""The mixture of experts."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.gpu_weights import ShuffledExperts
from deepinfer.kernels.layer_weights import MoeWeights
from deepinfer.kernels.reference import experts, router
from deepinfer.kernels.select.backends import cpu_fast, gpu, gpu_fast
from deepinfer.kernels.select.projections import project_wide
from deepinfer.kernels.weights import Experts, Weight, loose


def moe(x: Tensor, w: MoeWeights, row_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x [N, D] -> sum of routed and shared experts float32 (or rounded to x's dtype) [N, D], expert ids [N, k] best
    first, their weights float32 [N, k], scores float32 [N, experts] or None.
    row_bias float32 [N, experts] replaces the weights' bias."""
    if w.packed is not None and cpu_fast(x):
        return cpu.moe(x, w, row_bias)
    bias = w.bias if row_bias is None else row_bias
    if isinstance(w.experts, ShuffledExperts) and gpu_fast(x):
        return gpu().moe(x, w, bias)
    ids, weights, scores = router.route(
        project_wide(x, w.gate),
        bias,
        topk=w.topk,
        scale=w.scale,
        normalize=w.normalize,
        gate_temp=w.temperature,
    )
    return expert_sum(x, ids, weights, w.experts, w.limit), ids, weights, scores


def expert_sum(x: Tensor, ids: Tensor, weights: Tensor, bank: Experts, limit: float) -> Tensor:
    """The chosen experts' outputs and the shared expert's, float32 [N, D], by rising expert number."""
    bank = loose(bank)

    def dense(expert: tuple[Weight, Weight, Weight]) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = expert
        return w1.dense(), w3.dense(), w2.dense()

    routed = experts.routed_experts(x, ids, weights, lambda number: dense(bank.routed[number]), limit)
    return routed + experts.expert_forward(x, *dense(bank.shared), limit, None).float()
