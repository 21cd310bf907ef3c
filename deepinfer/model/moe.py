"""Mixture of experts of one layer: router, routed experts, one shared expert (section 2.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.kernels.layer_weights import MoeWeights
from deepinfer.model.config import ModelConfig
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource

if TYPE_CHECKING:
    from deepinfer.model.state import StepState


class MixtureOfExperts:
    """All layers are alike: no dense layer, no groups, no capacity limit."""

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, numerics: Numerics) -> None:
        prefix = self.prefix = f"{config.layer_prefix(layer)}.ffn"
        count, topk = config.expert_counts(layer)
        self.numerics = numerics
        self.bias = source.vector(f"{prefix}.gate.bias")
        # text-only checkpoints carry no bias of their own for image tokens
        self.bias_vl = source.vector(f"{prefix}.gate.bias_vl") if config.vision else self.bias
        self.weights = MoeWeights(
            gate=source.matrix(f"{prefix}.gate"),
            bias=self.bias,
            experts=source.experts(prefix, count),
            topk=topk,
            scale=config.routed_scaling_factor,
            normalize=config.norm_topk_prob,
            temperature=config.gate_temp,
            limit=config.swiglu_limit,
        )

    def __call__(self, x: Tensor, state: StepState) -> Tensor:
        """x [N, D], normalised -> [N, D]."""
        bias = None
        if state.dead is not None and self.bias_vl is not self.bias:
            bias = torch.where(state.dead.unsqueeze(1), self.bias_vl, self.bias)
        y, ids, weights, scores = select.moe(x, self.weights, bias)
        state.trace(f"{self.prefix}.router_ids", ids)
        state.trace(f"{self.prefix}.router_weights", weights)
        if scores is not None:
            state.trace(f"{self.prefix}.router_scores", scores)
        return y.to(self.numerics.dtype)
