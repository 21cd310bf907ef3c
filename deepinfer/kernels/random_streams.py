"""Counter-based random numbers: a draw is a pure function of (seed, stream, position, slot, vocabulary id).

So a draw does not know the batch, the step, the rank or how often it was asked for: a request that is preempted,
moved, or decoded with drafts sees the same noise at the same position (spec/dspark.md section 10).

The generator is Philox-4x32-10 (kernels/philox.py). Key = the 64-bit seed. Counter words = (vocabulary id // 2, slot,
position, stream). One call gives four 32-bit words: two for the even id of the pair, two for the odd one. The stream
is a counter word of its own, so two streams of one seed never share a number. What the other words hold:

    stream    vocabulary id     slot             position
    TARGET    of the token      0                of the token before the drawn one
    ACCEPT    0                 0                the same, of the draft that is judged
    DRAFT     of the token      draft 1..k       the same, of the draft
    CHILD     index, low word   index, high      0
    REQUEST   number, low word  number, high     0

A draft's slot is keyed because one position is drafted in several rounds, as draft 3 of one and draft 1 of the next:
with noise by position alone, how many drafts an earlier round asked for would be tied to the next round's tokens.
"""

import secrets
from enum import IntEnum

import torch
from torch import Tensor

from deepinfer.kernels.philox import MASK, philox, uniforms, uniforms_float32


class Stream(IntEnum):
    """Disjoint uses of one seed."""

    TARGET = 0  # the sampled token at a position
    ACCEPT = 1  # accept or reject a draft
    DRAFT = 2  # draft tokens that are accepted by chance
    CHILD = 3  # seeds of the completions 1..n-1 of a request
    REQUEST = 4  # seeds of requests that did not bring one


def split_seeds(seeds: list[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """64-bit seeds as two int64 tensors [n] of 32-bit words (low, high)."""
    words = torch.tensor([[s & MASK, s >> 32] for s in seeds], dtype=torch.int64, device=device)
    return words[:, 0], words[:, 1]


def gumbel(
    key: tuple[Tensor, Tensor],
    positions: Tensor,
    ids: Tensor | None,
    width: int,
    *,
    stream: Stream = Stream.TARGET,
    slot: int = 0,
) -> Tensor:
    """Standard Gumbel noise, float32 [rows, width]; arguments as in `philox.uniforms`.

    -log(-log(1 - u)) with log1p: the large values, which decide the argmax, come from u near 0, where a floating-point
    number is finest (u goes down to 2**-53, so noise reaches 36.7). Float32 logarithms cost a quarter of float64 ones
    and their rounding, 1e-7 of the value, is that of the logits themselves; u is kept below 1, which they would reach.
    """
    u = uniforms_float32(key, stream, positions, ids, width, slot)
    return torch.log_(torch.log1p_(u.neg_()).neg_()).neg_()


def accept_uniforms(key: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """Uniform numbers inside (0, 1) that accept or reject drafts, float64 [rows]; key and positions as above.

    One per position is enough: a round looks at none behind its first rejection, and the next one starts behind it.
    """
    return uniforms(key, Stream.ACCEPT, positions, None, 1)[:, 0]


def derive_seed(seed: int, stream: Stream, index: int) -> int:
    """A 64-bit seed that belongs to number `index` of `stream` under `seed`."""
    words = torch.tensor([index & MASK, index >> 32, 0, int(stream)], dtype=torch.int64)
    low, high = split_seeds([seed])
    out = philox((words[0], words[1], words[2], words[3]), (low[0], high[0]))
    return int(out[0]) | int(out[1]) << 32


def child_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request; number 0 keeps the request's own, so n=1 is a prefix of n=3."""
    return seed if index == 0 else derive_seed(seed, Stream.CHILD, index)


def random_seed() -> int:
    """A 64-bit seed from the operating system."""
    return secrets.randbits(64)
