"""What the layers ask for while they are built; the loader stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.kernels.gpu_weights import StackedWeight
from deepinfer.kernels.weights import Experts, Weight


class EngramRows(Protocol):
    """A table that is read row by row."""

    def rows(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> float32 [..., head_dim]."""
        ...


class WeightSource(Protocol):
    """Hands out tensors by their official names, each exactly once."""

    @property
    def device(self) -> torch.device: ...

    def vector(self, name: str) -> Tensor:
        """A norm weight, bias, sink or mHC tensor, float32."""
        ...

    def embedding(self, name: str) -> Tensor:
        """The rows of `<name>.weight`, to be looked up, in the checkpoint's own type."""
        ...

    def matrix(self, name: str) -> Weight:
        """The matrix `<name>.weight`, in the form that the load options ask for."""
        ...

    def stacked(self, names: Sequence[str]) -> tuple[StackedWeight | None, list[Weight]]:
        """Matrices `<name>.weight` over one input: all of them as one, where they are held so, and each."""
        ...

    def heads(self, name: str, head_dim: int) -> Weight:
        """The matrix `<name>.weight` whose outputs are heads of head_dim."""
        ...

    def grouped(self, name: str, groups: int, head_dim: int) -> Sequence[Weight]:
        """The matrix `<name>.weight` cut into `groups` equal runs of rows. Its inputs are heads of head_dim."""
        ...

    def experts(self, prefix: str, count: int) -> Experts:
        """Routed experts `<prefix>.experts.{0..count - 1}` and `<prefix>.shared_experts`."""
        ...

    def table(self, name: str) -> EngramRows:
        """The Engram table `<name>`, which stays on disk."""
        ...
