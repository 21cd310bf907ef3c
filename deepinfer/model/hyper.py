"""mHC of one sub-layer: from the stream to the sub-layer's input and the coefficients that expand it again (2.2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.model.config import ModelConfig
from deepinfer.model.parameters import WeightSource


def first_stream(embedded: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Embedded tokens [N, D] -> the stream [N, copies, D] and the pre [N, copies] of the first sub-layer, which reads
    copy 0: nothing has been mixed yet."""
    first = torch.eye(1, copies, device=embedded.device).expand(len(embedded), copies)
    # not repeat(), which takes ten times as long for a few rows
    return embedded.unsqueeze(1).expand(-1, copies, -1).contiguous(), first.contiguous()


class HyperCoefficients(NamedTuple):
    pre: Tensor  # [N, copies] float32: collapses the stream for the NEXT sub-layer
    post: Tensor  # [N, copies] float32: weight of this sub-layer's output in every copy
    comb: Tensor  # [N, from, to] float32: mixes the copies


class Update(NamedTuple):
    """A sub-layer's output, and how the stream takes it in."""

    y: Tensor  # [N, D]
    post: Tensor
    comb: Tensor


def taken_in(stream: Tensor, update: Update | None) -> Tensor:
    """The stream [N, copies, D] with a sub-layer's update."""
    return stream if update is None else select.hyper_expand(stream, *update)


class HyperConnection:
    """One sub-layer's; `name` is attn or ffn."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str, name: str) -> None:
        self.weights = HyperWeights(
            fn=source.vector(f"{prefix}.hc_{name}_fn").t().contiguous(),  # [copies * D, (2 + copies) * copies]
            scale=source.vector(f"{prefix}.hc_{name}_scale"),
            base=source.vector(f"{prefix}.hc_{name}_base"),
            norm=source.vector(f"{prefix}.{name}_norm.weight"),
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )

    def enter(self, stream: Tensor, update: Update | None, pre: Tensor) -> tuple[Tensor, Tensor, HyperCoefficients]:
        """stream [N, copies, D], the update of the sub-layer before (None: taken in already) and its pre [N, copies] ->
        the stream with the update, this sub-layer's normalised input [N, D], its coefficients."""
        stream, x, *coefficients = select.hyper_step(stream, update, pre, self.weights)
        return stream, x, HyperCoefficients(*coefficients)
