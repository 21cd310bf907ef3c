"""The weights of one fused operation each, with the C structure of their CPU twin where they are packed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from deepinfer.kernels.cpu.structs import HyperStruct, MoeStruct, OutputStruct, QueryStruct, pointer, pointers
from deepinfer.kernels.gpu_weights import StackedWeight
from deepinfer.kernels.weights import Experts, PackedExperts, PackedWeight, Weight


@dataclass(frozen=True)
class QueryWeights:
    """Query bottleneck and window latent of an attention layer. Norms float32. stacked: wq_a above wkv, where one
    product gives both."""

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    heads: int
    head_dim: int
    rope_dim: int
    eps: float
    stacked: StackedWeight | None = None

    @cached_property
    def address(self) -> int:
        """Where the C structure lies."""
        assert self.packed is not None
        return ctypes.addressof(self.packed)

    @cached_property
    def packed(self) -> QueryStruct | None:
        """For the CPU kernel; None where a matrix is held in another form."""
        matrices = (self.wq_a, self.wq_b, self.wkv)
        if not all(isinstance(matrix, PackedWeight) for matrix in matrices):
            return None
        addresses = [pointer(matrix.packed) for matrix in matrices if isinstance(matrix, PackedWeight)]
        rank, width = self.q_norm.numel(), self.width
        sizes = (width, rank, self.heads, self.head_dim, self.rope_dim // 2)
        return QueryStruct(*addresses, pointer(self.q_norm), pointer(self.kv_norm), *sizes, self.eps)

    @property
    def rank(self) -> int:
        return self.q_norm.numel()

    @property
    def width(self) -> int:
        """hidden_size"""
        return self.wq_a.packed.shape[1] if isinstance(self.wq_a, PackedWeight) else self.wq_a.dense().shape[1]


@dataclass(frozen=True)
class OutputWeights:
    """Grouped low-rank output projection: one wo_a [o_lora_rank, heads / groups * head_dim] per group."""

    wo_a: Sequence[Weight]
    wo_b: Weight
    heads: int
    head_dim: int
    rope_dim: int

    @cached_property
    def _table(self) -> ctypes.Array[ctypes.c_void_p]:
        return pointers([weight.packed for weight in self.wo_a if isinstance(weight, PackedWeight)])

    @cached_property
    def address(self) -> int:
        """Where the C structure lies."""
        assert self.packed is not None
        return ctypes.addressof(self.packed)

    @cached_property
    def packed(self) -> OutputStruct | None:
        if not isinstance(self.wo_b, PackedWeight) or not all(isinstance(w, PackedWeight) for w in self.wo_a):
            return None
        groups = len(self.wo_a)
        sizes = (self.wo_b.rows, self.wo_b.packed.shape[1] // groups, groups, self.heads, self.head_dim)
        table = ctypes.addressof(self._table)
        return OutputStruct(table, pointer(self.wo_b.packed), *sizes, self.rope_dim // 2)


@dataclass(frozen=True)
class MoeWeights:
    """Router and experts of a layer. bias float32 [experts] of text tokens; the scale and limits of the config."""

    gate: Weight
    bias: Tensor
    experts: Experts
    topk: int
    scale: float
    normalize: bool
    temperature: float
    limit: float

    @cached_property
    def address(self) -> int:
        """Where the C structure lies."""
        assert self.packed is not None
        return ctypes.addressof(self.packed)

    @cached_property
    def packed(self) -> MoeStruct | None:
        bank = self.experts
        if not isinstance(self.gate, PackedWeight) or not isinstance(bank, PackedExperts):
            return None
        addresses = [pointer(tensor) for tensor in (self.gate.packed, bank.up, bank.down, self.bias)]
        sizes = (self.gate.packed.shape[1], self.bias.numel(), bank.down.shape[2], self.topk, int(self.normalize))
        return MoeStruct(*addresses, *sizes, self.scale, self.temperature, self.limit)


@dataclass(frozen=True)
class HyperWeights:
    """mHC of one sub-layer and the norm of its input. fn transposed [copies * D, (2 + copies) * copies]."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor
    iterations: int
    eps: float
    norm_eps: float

    @cached_property
    def address(self) -> int:
        """Where the C structure lies."""
        assert self.packed is not None
        return ctypes.addressof(self.packed)

    @cached_property
    def packed(self) -> HyperStruct:
        addresses = [pointer(tensor) for tensor in (self.fn, self.scale, self.base, self.norm)]
        return HyperStruct(*addresses, self.norm.numel(), self.iterations, self.eps, self.norm_eps)
