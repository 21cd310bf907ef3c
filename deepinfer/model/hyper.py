"""mHC of one sub-layer: from the stream to the coefficients that expand it again (section 2.2)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig
from deepinfer.model.parameters import WeightSource


class HyperCoefficients(NamedTuple):
    pre: Tensor  # [N, copies] float32: collapses the stream for the NEXT sub-layer
    post: Tensor  # [N, copies] float32: weight of this sub-layer's output in every copy
    comb: Tensor  # [N, from, to] float32: mixes the copies


class HyperConnection:
    """Coefficients of one sub-layer; `name` is hc_attn or hc_ffn."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str, name: str) -> None:
        self.iterations = config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.fn = source.vector(f"{prefix}.{name}_fn").t().contiguous()  # [copies * D, (2 + copies) * copies]
        self.scale = source.vector(f"{prefix}.{name}_scale")
        self.base = source.vector(f"{prefix}.{name}_base")

    def coefficients(self, stream: Tensor) -> HyperCoefficients:
        """stream [N, copies, D] as it enters the sub-layer."""
        return HyperCoefficients(
            *select.hyper_coefficients(
                stream,
                self.fn,
                self.scale,
                self.base,
                iterations=self.iterations,
                eps=self.eps,
                norm_eps=self.norm_eps,
            )
        )
