"""Weights as the layers hold them: widened to float32 once, or kept as stored and widened at each use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.kernels.reference.quant import dequantize_fp4_groups, dequantize_fp8_tiles


class Weight(Protocol):
    """A matrix [N, K]."""

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        ...


@dataclass(frozen=True)
class DenseWeight:
    """A matrix in float32 or bfloat16."""

    values: Tensor

    def dense(self) -> Tensor:
        return self.values.float()


@dataclass(frozen=True)
class Fp8Weight:
    """e4m3 codes [N, K] and E8M0 scales per 32 x 32 tile."""

    codes: Tensor
    scales: Tensor

    def dense(self) -> Tensor:
        return dequantize_fp8_tiles(self.codes, self.scales)


@dataclass(frozen=True)
class Fp4Weight:
    """Packed e2m1 codes int8 [N, K / 2] and E8M0 scales [N, K / 32]."""

    packed: Tensor
    scales: Tensor

    def dense(self) -> Tensor:
        return dequantize_fp4_groups(self.packed, self.scales)


class WeightSource(Protocol):
    """What a layer asks for its tensors while it is built; `weights.py` and the loader stand behind it."""

    def vector(self, name: str) -> Tensor:
        """A norm weight, bias, sink or mHC tensor, float32."""
        ...

    def matrix(self, name: str) -> Weight:
        """The matrix `<name>.weight`, in the form that the load options ask for."""
        ...

    def table(self, name: str) -> EngramRows:
        """The Engram table `<name>`, which stays on disk."""
        ...

    @property
    def device(self) -> torch.device: ...


class EngramRows(Protocol):
    """A table that is read row by row."""

    def rows(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> float32 [..., head_dim]."""
        ...
