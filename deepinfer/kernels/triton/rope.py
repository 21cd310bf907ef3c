"""Rotary positions (model specification 2.0), in natural order and in the split order of queries and outputs.

Split order holds the even dims of a head before the odd ones. A pair of neighbours (2i, 2i + 1) then lies at (i,
head_dim / 2 + i): two contiguous runs, which a kernel turns without moving values between threads. wq_b's rows and
wo_a's columns are permuted at load, so nothing is ever permuted in a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.runtime import launch

_HEADS = 16  # heads a program turns: 16 x 32 pairs, one 16-byte load a thread


def split_order(head_dim: int) -> Tensor:
    """int64 [head_dim]: which natural dim stands at each place, [0, 2, .., 1, 3, ..]."""
    return torch.cat((torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)))


@triton.jit
def _split_kernel(
    x, cos, sin, heads, HEAD: tl.constexpr, ROPE: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    pair = tl.arange(0, ROPE)[None, :]
    c = tl.load(cos + row * ROPE + pair)
    s = tl.load(sin + row * ROPE + pair)
    if INVERSE:
        s = -s
    places = x + (row * heads + head) * HEAD + HEAD // 2 - ROPE + pair
    inside = (head < heads) & (pair >= 0)
    even = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(places + HEAD // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, to_type(even * c - odd * s, x.dtype.element_ty), mask=inside)
    tl.store(places + HEAD // 2, to_type(even * s + odd * c, x.dtype.element_ty), mask=inside)


def rope_split_(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turns x [N, heads, head_dim], contiguous and in split order, in place, and returns it. cos, sin: float32 [N,
    rope_dim / 2]; the last rope_dim / 2 places of each half are turned. `inverse`: by the negative angle."""
    rows, heads, head_dim = x.shape
    grid = (rows, triton.cdiv(heads, _HEADS))
    sizes = {"HEAD": head_dim, "ROPE": cos.shape[-1], "INVERSE": inverse, "BLOCK": _HEADS}
    launch(_split_kernel, grid, x, cos, sin, heads, **sizes, num_warps=4, enable_fp_fusion=False, **OVERLAP)
    return x


@triton.jit
def _natural_kernel(
    x, out, cos, sin, heads, width, keep, ROPE: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    wait_for_previous()
    start_next()
    line = tl.program_id(0).to(tl.int64)  # row * heads + head
    row = line // heads
    pair = tl.arange(0, BLOCK)
    inside = 2 * pair < width
    angle = pair - keep // 2
    c = tl.load(cos + row * ROPE + angle, mask=inside & (angle >= 0), other=1.0)
    s = tl.load(sin + row * ROPE + angle, mask=inside & (angle >= 0), other=0.0)
    if INVERSE:
        s = -s
    even = tl.load(x + line * width + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x + line * width + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + line * width + 2 * pair, to_type(even * c - odd * s, out.dtype.element_ty), mask=inside)
    tl.store(out + line * width + 2 * pair + 1, to_type(even * s + odd * c, out.dtype.element_ty), mask=inside)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Natural order: turns the last rope_dim values of x [N, D] or [N, heads, D], D even. cos, sin: float32 [N,
    rope_dim / 2]. A new tensor, the reference's bits."""
    x = x.contiguous()
    width, half = x.shape[-1], cos.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty_like(x)
    launch(
        _natural_kernel,
        (x.shape[0] * heads,),
        *(x, out, cos, sin, heads, width, width - 2 * half),
        ROPE=half,
        INVERSE=inverse,
        BLOCK=triton.next_power_of_2(width // 2),
        num_warps=1 if width <= 256 else 4,
        enable_fp_fusion=False,
        **OVERLAP,
    )
    return out
