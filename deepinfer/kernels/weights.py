"""Weights as operations take them: widened to float32, packed for the CPU kernels, or kept as stored. What the GPU
kernels read stands in gpu_weights.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deepinfer.kernels.cpu.linear import PANEL, unpack
from deepinfer.kernels.gpu_weights import ShuffledExperts
from deepinfer.kernels.reference.quant import dequantize_fp4_groups, dequantize_fp8_tiles


class Weight(Protocol):
    """A matrix [N, K]."""

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        ...


@dataclass(frozen=True)
class DenseWeight:
    """A matrix in float32 or bfloat16. invariant: the GPU kernels' products with it give a row the same bits however
    many rows there are."""

    values: Tensor
    invariant: bool = False

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


@dataclass(frozen=True)
class PackedWeight:
    """What the CPU kernels read: bfloat16 [ceil(N / 16), K, 16], exact for every weight of a checkpoint."""

    packed: Tensor
    rows: int

    def dense(self) -> Tensor:
        return unpack(self.packed, self.rows)


Expert = tuple[Weight, Weight, Weight]  # w1 (gate), w3 (up), w2 (down)


@dataclass(frozen=True)
class LooseExperts:
    """The routed experts one by one, and the shared one."""

    routed: list[Expert]
    shared: Expert


@dataclass(frozen=True)
class PackedExperts:
    """All experts in two tensors, the shared one last: up bfloat16 [E + 1, 2 I / 16, D, 16] (w1 above w3), down
    [E + 1, D / 16, I, 16]."""

    up: Tensor
    down: Tensor


Experts = LooseExperts | PackedExperts | ShuffledExperts


def loose(bank: Experts) -> LooseExperts:
    """Any bank as single experts (packed ones share its memory)."""
    if isinstance(bank, LooseExperts):
        return bank
    if isinstance(bank, ShuffledExperts):
        return LooseExperts(*bank.loose)
    width, inner = bank.down.shape[1] * PANEL, bank.down.shape[2]

    def expert(number: int) -> Expert:
        gate, up = bank.up[number].split(inner // PANEL)
        return PackedWeight(gate, inner), PackedWeight(up, inner), PackedWeight(bank.down[number], width)

    return LooseExperts([expert(number) for number in range(bank.up.shape[0] - 1)], expert(bank.up.shape[0] - 1))
