"""Mixture of experts of one layer: router, routed experts, one shared expert (section 2.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource

if TYPE_CHECKING:
    from deepinfer.model.state import StepState


class MixtureOfExperts:
    """All layers are alike: no dense layer, no groups, no capacity limit."""

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, numerics: Numerics) -> None:
        prefix = f"layers.{layer}.ffn"
        self.config, self.layer, self.numerics = config, layer, numerics
        self.gate = source.matrix(f"{prefix}.gate")
        self.bias = source.vector(f"{prefix}.gate.bias")
        # text-only checkpoints carry no bias of their own for image tokens
        self.bias_vl = source.vector(f"{prefix}.gate.bias_vl") if config.vision else self.bias
        self.experts = source.experts(prefix, config.n_routed_experts)

    def __call__(self, x: Tensor, state: StepState) -> Tensor:
        """x [N, D], normalised -> [N, D]."""
        config = self.config
        bias = self.bias if state.dead is None else torch.where(state.dead.unsqueeze(1), self.bias_vl, self.bias)
        ids, weights, scores = select.route(
            select.project(x.float(), self.gate, rounded=False),
            bias,
            topk=config.num_experts_per_tok,
            scale=config.routed_scaling_factor,
            normalize=config.norm_topk_prob,
            gate_temp=config.gate_temp,
        )
        state.trace(f"layers.{self.layer}.ffn.router_ids", ids)
        state.trace(f"layers.{self.layer}.ffn.router_weights", weights)
        state.trace(f"layers.{self.layer}.ffn.router_scores", scores)
        return select.moe(x, ids, weights, self.experts, config.swiglu_limit).to(self.numerics.dtype)
