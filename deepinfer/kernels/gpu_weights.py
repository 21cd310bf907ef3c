"""Weights as the GPU kernels read them: FP8 with one factor per output, FP4 experts in the tensor core's order.

Every form gives the stored weight back (`dense`), in natural order: what is rearranged and what is folded changes no
value, but where a code falls among e4m3's denormals (`fold_fp8`) or a row's scales spread over more than 11 octaves
(`experts_layout`); who loads counts both (`model/rounded_weights.py`). Nothing here needs Triton but to be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.kernels.triton.experts_layout import ShuffledBank
    from deepinfer.kernels.weights import Weight


@dataclass(frozen=True)
class FoldedWeight:
    """e4m3 codes [N, K] times a power of two per output, float32 [N]. invariant: products with it give a row the same
    bits however many rows there are."""

    codes: Tensor
    factors: Tensor
    invariant: bool = False

    def dense(self) -> Tensor:
        return self.codes.float() * self.factors.unsqueeze(1)

    @classmethod
    def fold(cls, codes: Tensor, tile_scales: Tensor, *, invariant: bool = False) -> tuple[FoldedWeight, int]:
        """Of e4m3 codes [N, K] with E8M0 scales per 32 x 32 tile; and how many values changed."""
        from deepinfer.kernels.triton.quantize import fold_fp8

        folded, factors, changed = fold_fp8(codes, tile_scales)
        return cls(folded, factors, invariant), changed

    def rows(self, order: Tensor) -> FoldedWeight:
        """Outputs in another order, int64 [N]."""
        codes = self.codes.view(torch.uint8)[order].view(self.codes.dtype)
        return FoldedWeight(codes, self.factors[order], self.invariant)


@dataclass(frozen=True)
class StackedWeight:
    """Matrices over one input that are multiplied at once: `whole` [sum of N, K], `sizes` the N of each."""

    whole: FoldedWeight
    sizes: tuple[int, ...]

    def parts(self) -> list[FoldedWeight]:
        """Each of them, sharing the memory."""
        pairs = zip(self.whole.codes.split(self.sizes), self.whole.factors.split(self.sizes), strict=True)
        return [FoldedWeight(codes, factors, self.whole.invariant) for codes, factors in pairs]

    @classmethod
    def stack(cls, weights: Sequence[FoldedWeight]) -> StackedWeight:
        codes = torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
        factors = torch.cat([weight.factors for weight in weights])
        whole = FoldedWeight(codes, factors, all(weight.invariant for weight in weights))
        return cls(whole, tuple(len(weight.factors) for weight in weights))


@dataclass(frozen=True)
class SplitHeads:
    """A matrix [heads * head_dim, K] whose heads come in split order: even dims, then odd ones (`triton/rope.py`)."""

    folded: FoldedWeight
    order: Tensor  # int64 [head_dim]: which natural dim stands at each place

    @property
    def head_dim(self) -> int:
        return len(self.order)

    def dense(self) -> Tensor:
        heads = self.folded.dense().unflatten(0, (-1, self.head_dim))
        return heads[:, self.order.argsort()].flatten(0, 1)

    @classmethod
    def split(cls, weight: FoldedWeight, head_dim: int) -> SplitHeads:
        from deepinfer.kernels.triton.rope import split_order

        order = split_order(head_dim).to(weight.codes.device)
        firsts = torch.arange(0, len(weight.factors), head_dim, device=order.device)
        return cls(weight.rows((firsts[:, None] + order).flatten()), order)


@dataclass(frozen=True)
class GroupedWeight(Sequence["GroupPart"]):
    """wo_a, all groups: e4m3 [groups * rank, heads of a group * head_dim] with the columns of a head in the order in
    which the grouped product reads them; as a sequence, one weight [rank, heads of a group * head_dim] per group."""

    folded: FoldedWeight
    groups: int
    order: Tensor  # int64 [head_dim]: which natural dim of its head each stored column is of
    wide: Tensor | None = None  # bf16 of the same shape, columns in split order: for steps of many rows

    def widened(self) -> GroupedWeight:
        """The same with `wide`, on a GPU: twice its bytes more."""
        from deepinfer.kernels.triton.grouped_output import widen

        return replace(self, wide=widen(self.folded.codes, self.folded.factors))

    def __len__(self) -> int:
        return self.groups

    def __getitem__(self, group: Any) -> Any:
        if not 0 <= group < self.groups:
            raise IndexError(group)
        rank = len(self.folded.factors) // self.groups
        rows = slice(group * rank, (group + 1) * rank)
        return GroupPart(FoldedWeight(self.folded.codes[rows], self.folded.factors[rows]), self.order)

    @classmethod
    def group(cls, weight: FoldedWeight, groups: int, head_dim: int) -> GroupedWeight:
        from deepinfer.kernels.triton.grouped_output import column_order

        order = column_order(head_dim).to(weight.codes.device)
        heads = weight.codes.view(torch.uint8).unflatten(1, (-1, head_dim))  # [N, heads, head_dim]
        codes = heads[..., order].flatten(1).view(torch.float8_e4m3fn)
        return cls(FoldedWeight(codes, weight.factors, weight.invariant), groups, order)


@dataclass(frozen=True)
class GroupPart:
    """The part of a `GroupedWeight` that one group takes."""

    folded: FoldedWeight
    order: Tensor

    def dense(self) -> Tensor:
        heads = self.folded.dense().unflatten(1, (-1, len(self.order)))
        return heads[..., self.order.argsort()].flatten(1)


@dataclass(frozen=True)
class ExpertPart:
    """One matrix of one expert of a `ShuffledBank`: w1, w3 or w2."""

    bank: ShuffledBank
    expert: int
    which: int

    def dense(self) -> Tensor:
        return self.bank.dense(self.expert)[self.which]


@dataclass(frozen=True)
class ShuffledExperts:
    """The routed experts of a layer in one bank, and the shared one: w1 above w3, and w2."""

    routed: ShuffledBank
    shared_up: StackedWeight
    shared_down: FoldedWeight

    @property
    def invariant(self) -> bool:
        """Whether a row's bits are to be the same however many rows there are."""
        return self.shared_down.invariant

    @cached_property
    def loose(self) -> tuple[list[tuple[Weight, Weight, Weight]], tuple[Weight, Weight, Weight]]:
        """The routed experts one by one, and the shared one, each w1, w3, w2."""

        def routed(number: int) -> tuple[Weight, Weight, Weight]:
            gate, up, down = (ExpertPart(self.routed, number, which) for which in range(3))
            return gate, up, down

        gate, up = self.shared_up.parts()
        return [routed(number) for number in range(self.routed.experts)], (gate, up, self.shared_down)
