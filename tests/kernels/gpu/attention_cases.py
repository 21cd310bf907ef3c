"""Inputs of sparse attention for the tests of its kernels, and float64's result for them.

Every record of a pool that no list may name is NAN_RECORD, so that a kernel that reads it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from twins import DEVICE

from deepinfer.kernels.cuda import attention as cuda_attention
from deepinfer.kernels.reference import attention as reference
from deepinfer.kernels.reference import records
from deepinfer.kernels.select.backends import gpu_problem

ON_GPU = DEVICE.type == "cuda"
POOL_ROWS = 4096 if ON_GPU else 96
NAN_RECORD = 0xFF  # as codes NaN or the largest, as scales NaN or 2^128
NOTHING = 2.0**-110  # a sum of weights beyond float32, because the sink is so large, leaves no value
_ROWS_AT_ONCE = 64  # of the float64 result: 64 x 645 keys x 512 x 8 bytes = 169 MB

Attention = Callable[..., Tensor]  # `sparse_attention` of a family of kernels


def cuda_problem() -> str | None:
    """Why attention in CUDA C++ cannot be tested on DEVICE: no Hopper GPU, no compiler, switched off."""
    return gpu_problem(DEVICE) or cuda_attention.problem(DEVICE)


class Case:
    """q bf16 [rows, heads, size] in natural order, sink float32 [heads], `pools` of records (window, compressed) and
    `lists` of their rows, int64 [rows, window] and [rows, selected], the share `holes` of them -1. All on DEVICE, and
    free to be changed.

    `named`: what the lists may name of either pool, half of its rows, never the first and the last.
    """

    def __init__(
        self, rows: int, window: int, selected: int, heads: int = 8, size: int = 128, seed: int = 0, holes: float = 0.2
    ) -> None:
        rng = torch.Generator(device=DEVICE).manual_seed(seed)
        self.q = torch.randn(rows, heads, size, generator=rng, device=DEVICE).to(torch.bfloat16)
        self.sink = torch.randn(heads, generator=rng, device=DEVICE)
        self.scale = size**-0.5
        pools = random_pools(size, seed % 4)
        self.pools = [pool.clone() for pool, _ in pools]
        self.named = [named for _, named in pools]
        self.lists = []
        for named, width in zip(self.named, (window, selected), strict=True):
            lists = named[torch.randint(0, len(named), (rows, width), generator=rng, device=DEVICE)]
            lists[torch.rand(rows, width, generator=rng, device=DEVICE) < holes] = -1
            self.lists.append(lists)

    def inputs(self, dtype: torch.dtype = torch.int64, kv_dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """Arguments of `sparse_attention`: queries in split order, lists as `dtype`, those of compressed records as
        `kv_dtype`; None for both of these where nothing is selected."""
        q = self.q[..., split_order(self.q.shape[2])].contiguous()
        window, selected = self.lists[0].to(dtype), self.lists[1].to(kv_dtype or dtype)
        kv = (self.pools[1], selected) if selected.shape[1] else (None, None)
        return q, self.pools[0], window, *kv, self.sink, self.scale

    def run(self, attention: Attention, dtype: torch.dtype = torch.int64, *, invariant: bool = False) -> Tensor:
        """A kernel's result in natural order. What it writes its output to has been NaN before."""
        inputs = self.inputs(dtype)
        poison_freed_memory(inputs[0])
        out = attention(*inputs, invariant=invariant)
        assert out.dtype == torch.bfloat16
        assert out.shape == self.q.shape
        return natural(out)

    def only(self, rows: slice | list[int] | Tensor) -> Case:
        """Some rows of it, over the same pools."""
        part = object.__new__(Case)
        part.__dict__ = self.__dict__ | {"q": self.q[rows], "lists": [lists[rows] for lists in self.lists]}
        return part

    def expected(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The reference's, with the official rounding of probabilities; float32: none."""
        kv = (self.pools[1], self.lists[1]) if self.lists[1].shape[1] else (None, None)
        return reference.sparse_attention(self.q.to(dtype), self.pools[0], self.lists[0], *kv, self.sink, self.scale)

    def exact(self) -> Exact:
        """float64's result, and how far off FP16 operands leave it."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        beside = torch.zeros(self.q.shape, device=DEVICE)
        for start in range(0, len(self.q), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            window, selected = (lists[some] for lists in self.lists)
            keys = [records.unpack_window(self.pools[0][window.clamp_min(0)])]
            keys.append(records.unpack_compressed(self.pools[1][selected.clamp_min(0)]))
            empty = torch.cat((window, selected), dim=1) < 0
            latents = torch.cat(keys, dim=1).masked_fill(empty.unsqueeze(-1), 0.0)  # [n, W + K, D]
            q = self.q[some]
            logits = torch.bmm(q.double(), latents.double().transpose(1, 2)) * self.scale
            logits.masked_fill_(empty.unsqueeze(1), float("-inf"))
            sinks = self.sink.double().expand(len(logits), -1).unsqueeze(-1)
            top = torch.cat((logits, sinks), dim=-1).amax(-1, keepdim=True)
            top.masked_fill_(top.isneginf(), 0.0)  # neither a key nor a sink
            p = torch.exp(logits - top)
            p /= (p.sum(-1, keepdim=True) + torch.exp(sinks - top)).clamp_min(1e-300)
            out[some] = torch.bmm(p, latents.double())
            beside[some] = _beside(q.float(), latents, p.float(), self.scale)
        return Exact(out, beside.double())


class Exact(NamedTuple):
    """Both float64 [N, heads, D] in natural order. beside: the most that a kernel with FP16 operands and probabilities
    and float32 sums is off before it rounds to bf16."""

    out: Tensor
    beside: Tensor


def _beside(q: Tensor, keys: Tensor, p: Tensor, scale: float) -> Tensor:
    """Of queries [n, H, D] over keys [n, L, D] with probabilities p [n, H, L]: [n, H, D].

    Queries and keys times 2^-7 are rounded to FP16 (the model's own keys are exact but for window scales below 2^-8),
    sums are float32, a probability loses 2^-11 of itself and, next to nothing, 2^-25 of the largest.
    """
    if not keys.shape[1]:
        return torch.zeros_like(q)
    sizes, lost = keys.abs(), (keys - (keys * 2.0**-7).half().float() * 2.0**7).abs()
    off = torch.bmm(q.abs() * 2.0**-20 + (q - q.half().float()).abs(), sizes.mT) + torch.bmm(q.abs(), lost.mT)
    moved = 2 * scale * off.amax(-1, keepdim=True) * torch.bmm(p * (1.0 - p), sizes)  # by logits that are off
    least = 2.0**-24 * p.amax(-1, keepdim=True) * sizes.sum(1, keepdim=True)
    return torch.bmm(p, sizes * 2.0**-11 + lost) + least + moved


@cache
def random_pools(size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """The window pool and the compressed one, of Gaussian values with lognormal channels, and their named rows."""
    rng = torch.Generator(device=DEVICE).manual_seed(seed)
    values = torch.randn(2, POOL_ROWS, size, generator=rng, device=DEVICE)
    values *= torch.exp(torch.randn(2, 1, size, generator=rng, device=DEVICE))
    found = []
    for pool in (records.pack_window(values[0]), records.pack_compressed(values[1])):
        named = torch.randperm(POOL_ROWS - 2, generator=rng, device=DEVICE)[: POOL_ROWS // 2] + 1
        unnamed = torch.ones(POOL_ROWS, dtype=torch.bool, device=DEVICE)
        unnamed[named] = False
        pool[unnamed] = NAN_RECORD
        found.append((pool, named))
    return found


def split_order(size: int) -> Tensor:
    return torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2))).to(DEVICE)


def natural(out: Tensor) -> Tensor:
    """Split order back to natural order."""
    return out[..., torch.argsort(split_order(out.shape[-1]))]


def poison_freed_memory(like: Tensor) -> None:
    """Leaves a block of NaN of this size to torch's allocator, which gives it to whoever asks for as much next."""
    torch.full_like(like, float("nan"))


def assert_right(out: Tensor, exact: Exact) -> None:
    """Every number: no further off than `beside` and half of what bf16's last bit is worth there. NOTHING may be 0."""
    largest = exact.out.abs() + exact.beside
    allowed = exact.beside + torch.exp2(torch.floor(torch.log2(largest.clamp_min(2.0**-126))) - 8) + NOTHING
    difference = (out.double() - exact.out).abs()
    wrong = ~(difference <= allowed)  # NaN are
    if wrong.any():
        row, head, dim = wrong.nonzero()[0].tolist()
        one = f"{float(out[row, head, dim])}, not {float(exact.out[row, head, dim])} at {row, head, dim}"
        pytest.fail(f"{int(wrong.sum())} numbers in {int(wrong.any(2).any(1).sum())} of {len(out)} rows: {one}")
