"""fn of mHC (model specification 2.2, step 1) for tensor cores: a float32 matrix as a sum of bfloat16 ones.

The stream is exactly bfloat16, so only fn has to be split, and sums are float32. What two parts leave is at most 2^-18
of a value: mixes come within 2.5e-6 of float64's (norm over norm, H200), coefficients within 6e-6. Three leave 2^-24:
3.3e-7, as torch's float32 product (4e-7), for half as much time again. All copies' columns of a chunk are one product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.triton.runtime import INTERPRET

COPIES = 4
CHUNK = 64  # columns of one product, of each copy
MIXES = 24  # rows of fn
SPLIT = 2  # parts that the product uses, 2 or 3
_MIXES = tl.constexpr(MIXES)


def split_fn(fn: Tensor) -> Tensor:
    """fn float32 [4 * D, 24] -> bfloat16 [D / 64, 72, 256]: by chunk of 64 columns, all four copies of them side by
    side, and an even number of chunks, the last one zeros if need be; rows 0 .. 47 are the first two parts as
    `load_parts` wants them, 48 .. 71 the third. The sum of all three is fn, up to 2^-24 of each value."""
    if fn.shape[0] % (COPIES * CHUNK):
        raise ValueError(f"fn of {fn.shape[0]} columns: these kernels take 4 copies and widths in steps of {CHUNK}")
    rest = fn.t()  # [24, 4 * D]
    parts = []
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    upper = torch.stack(parts[:2]).unflatten(1, (3, 8)).transpose(0, 1).flatten(0, 2)  # row 16 i + 8 h + j
    rows = torch.cat((upper, parts[2]))  # [72, 4 * D]
    chunks = rows.unflatten(1, (COPIES, -1, CHUNK)).permute(2, 0, 1, 3)  # [D / 64, 72, 4, 64]
    return torch.nn.functional.pad(chunks.flatten(2), (0, 0, 0, 0, 0, len(chunks) % 2)).contiguous()


def fn_parts(w: HyperWeights) -> Tensor:
    """`split_fn` of the weights, made at the first call and kept with them (3.9 MB at 20480 x 24). Call it once before
    a graph is captured."""
    kept = vars(w)  # as functools.cached_property does, past the frozen fields
    if "_fn_parts" not in kept:
        kept["_fn_parts"] = split_fn(w.fn)
    return kept["_fn_parts"]


@triton.jit
def load_parts(fn, chunk, K: tl.constexpr, PARTS: tl.constexpr):
    """Parts of fn for one chunk of all copies, [64, K] each: row 16 i + 8 h + j is of mix 8 i + j, h = 0 the first (or
    third) part, h = 1 the second, so that a thread of wgmma has both of its own."""
    row = tl.arange(0, 64)[:, None]
    k = tl.arange(0, K)[None, :]
    fn += chunk * (3 * _MIXES * K)
    upper = tl.load(fn + row * K + k, mask=row < 2 * _MIXES, other=0.0)
    lower = upper
    if PARTS == 3:
        mix = row // 16 * 8 + row % 8
        lower = tl.load(fn + (2 * _MIXES + mix) * K + k, mask=(mix < _MIXES) & (row // 8 % 2 == 0), other=0.0)
    return upper, lower


@triton.jit
def add_parts(acc, upper, lower, n0, n1, n2, n3, M: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """acc [64, M] and fn times a chunk of all four copies [M, K / 4]. The stream is the N side of wgmma: only there may
    it be computed and yet lie in shared memory, which leaves it in a layout that loads and stores 16 bytes."""
    both = tl.join(tl.join(n0, n1), tl.join(n2, n3))  # [M, C, 2, 2]: copy 2 b + a at [a, b]
    n = tl.trans(tl.reshape(tl.permute(both, (0, 3, 2, 1)), (M, K)))
    if INTERPRET:
        upper, lower, n = upper.to(tl.float32), lower.to(tl.float32), n.to(tl.float32)
    if PARTS == 3:
        acc = tl.dot(lower, n, acc)
    return tl.dot(upper, n, acc)
