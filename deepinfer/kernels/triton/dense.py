"""Dense FP8 products: rows with one scale each times weights with one factor per output (model specification 2.0).

Decode: weights are the M side of the tensor core's tile, tokens the N side, so few tokens waste nothing. Matrices that
are too small to fill the chip are cut along K; the program that arrives last adds the parts in their order. Hopper adds
FP8 products in a short accumulator: a fresh one every `promote` values of K, added in float32, leaves the rounding of
the result as the only error to speak of. Where K is cut depends on the weight alone, so a row's bits do not depend on
the number of rows. Prefill: the library's row-wise product, whose order of additions is its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.overlap import OVERLAP, prefetch, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, to_type
from deepinfer.kernels.triton.rope import rope_split_
from deepinfer.kernels.triton.runtime import launch

LIBRARY_ROWS = 512  # from here on the library's product is faster


class Tile(NamedTuple):
    """How a product is cut: outputs x tokens x K of a program's step, the parts of K, and how it is launched."""

    outputs: int
    tokens: int
    depth: int
    splits: int
    stages: int
    warps: int


def choose_tile(rows: int, outputs: int, width: int) -> Tile:
    """From measurements on an H200 (docs/performance.md). `splits` and `depth` look at the weight alone."""
    tokens = min(max(16, triton.next_power_of_2(rows)), 128)
    if outputs * width >= 20 << 20:  # 256 programs of 128 outputs keep all 132 processors loading
        return Tile(128, tokens, 128, 1, 4, 4)
    splits = 4 if width >= 4096 else 2
    return Tile(64, tokens, 256, splits, 4, 4)


@triton.jit
def _partial_sum(x, w, token, output, rows, outputs, start, steps, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
                 TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, PROMOTE: tl.constexpr, ragged: tl.constexpr):  # fmt: skip
    """float32 [OUTPUTS, TOKENS]: weights times tokens over `steps` steps of DEPTH from `start` on."""
    k = start + tl.arange(0, DEPTH)
    w_places = w + output.to(tl.int64)[:, None] * WIDTH + k[None, :]
    x_places = x + token.to(tl.int64)[None, :] * WIDTH + k[:, None]
    token_inside = token[None, :] < rows
    output_inside = output[:, None] < outputs
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
    for step in range(steps):
        if ragged:
            inside = k + step * DEPTH < WIDTH
            weights = tl.load(w_places, mask=output_inside & inside[None, :], other=0.0)
            values = tl.load(x_places, mask=token_inside & inside[:, None], other=0.0)
        else:
            weights = tl.load(w_places)
            values = tl.load(x_places, mask=token_inside, other=0.0)
        if PROMOTE:
            total += tl.dot(weights, values)
        else:
            total = tl.dot(weights, values, total)
        w_places += DEPTH
        x_places += DEPTH
    return total


@triton.jit(do_not_specialize=["rows"])  # one kernel for every number of rows
def _linear_kernel(
    x, scale, w, factor, out, parts, arrivals, cos, sin, rows, outputs,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    PROMOTE: tl.constexpr, RAGGED: tl.constexpr, HEAD: tl.constexpr, ROPE: tl.constexpr, PARTS_ONLY: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    start_next()
    token_tile, output_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    if HEAD:
        # Half a tile from the even dims of a head, half from the odd ones: pairs lie OUTPUTS / 2 rows apart.
        half: tl.constexpr = OUTPUTS // 2
        tiles: tl.constexpr = HEAD // OUTPUTS
        i = tl.arange(0, OUTPUTS)
        place = (output_tile % tiles) * half + i % half
        output = (output_tile // tiles) * HEAD + (i // half) * (HEAD // 2) + place
    else:
        output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    steps: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH
    each: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    first = split * each
    if AHEAD > 0:  # the first weights are on their way while the kernel before still runs
        prefetch(w + output.to(tl.int64) * WIDTH + first * DEPTH, AHEAD)
    wait_for_previous()
    total = _partial_sum(
        x, w, token, output, rows, outputs, first * DEPTH, tl.minimum(each, steps - first),
        WIDTH, DEPTH, TOKENS, OUTPUTS, PROMOTE, RAGGED,
    )  # fmt: skip
    # Powers of two: where they are multiplied in changes no bit.
    total *= tl.load(factor + output, mask=output < outputs, other=0.0)[:, None]
    total *= tl.load(scale + token, mask=token < rows, other=0.0)[None, :]
    inside = (output < outputs)[:, None] & (token < rows)[None, :]
    offsets = token.to(tl.int64)[None, :] * outputs + output[:, None]
    if SPLITS > 1:
        size = rows.to(tl.int64) * outputs
        tl.store(parts + split * size + offsets, total, mask=inside)
        if PARTS_ONLY:
            return
        tl.debug_barrier()  # all threads' stores, before one thread tells of them
        counter = arrivals + output_tile * tl.num_programs(0) + token_tile
        if tl.atomic_add(counter, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counter, 0)  # as the next product expects it
        total = tl.load(parts + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            total += tl.load(parts + other * size + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    y = to_type(total, out.dtype.element_ty)
    if ROPE:
        pairs = tl.permute(tl.reshape(y.to(tl.float32), (2, half, TOKENS)), (1, 2, 0))
        even, odd = tl.split(pairs)  # [half, TOKENS] each
        lane = (output_tile % tiles) * half + tl.arange(0, half)
        angle = (lane - (HEAD // 2 - ROPE))[:, None]
        turned = (angle >= 0) & (token < rows)[None, :]
        c = tl.load(cos + token[None, :] * ROPE + angle, mask=turned, other=1.0)
        s = tl.load(sin + token[None, :] * ROPE + angle, mask=turned, other=0.0)
        place = token.to(tl.int64)[None, :] * outputs + ((output_tile // tiles) * HEAD + lane)[:, None]
        here = (token < rows)[None, :] & (angle == angle)
        tl.store(out + place, to_type(even * c - odd * s, y.dtype), mask=here)
        tl.store(out + place + HEAD // 2, to_type(even * s + odd * c, y.dtype), mask=here)
    else:
        tl.store(out + offsets, y, mask=inside)


_arrivals: dict[torch.device, Tensor] = {}


def arrivals(x: Tensor, count: int) -> Tensor:
    """int32 counters, zero before and after every product, one set a device: products that are cut along K must not
    run on two streams of one device at once."""
    counters = _arrivals.get(x.device)
    if counters is None:
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run the operation once before it is captured in a CUDA graph: it keeps counters")
        counters = torch.zeros(1 << 14, dtype=torch.int32, device=x.device)
        if x.device.type != "meta":
            _arrivals[x.device] = counters
    if count > len(counters):
        raise ValueError(f"{count} tiles of a product that is cut along K, and counters for {len(counters)} only")
    return counters


def _product(
    rows: Fp8Rows, codes: Tensor, factors: Tensor, tile: Tile, *, promote: bool = True, parts_only: bool = False,
    turn: tuple[Tensor, Tensor, int] | None = None, ahead: int = 512, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """The Triton product. turn: cos, sin and head_dim of heads that leave rotated. -> bf16 [M, N], or with parts_only
    float32 [splits, M, N]."""
    (count, width), outputs = rows.codes.shape, codes.shape[0]
    cos, sin, head = turn if turn is not None else (factors, factors, 0)
    out = factors.new_empty(count, outputs, dtype=torch.bfloat16)
    grid = (triton.cdiv(count, tile.tokens), triton.cdiv(outputs, tile.outputs), tile.splits)
    parts, counters = out, out
    if tile.splits > 1:
        parts = factors.new_empty(tile.splits, count, outputs)
        counters = arrivals(codes, grid[0] * grid[1])
    ragged = width % tile.depth > 0 or outputs % tile.outputs > 0
    ahead = 0 if ragged else min(ahead, width // tile.splits // tile.depth * tile.depth)
    launch(
        _linear_kernel,
        grid,
        *(rows.codes, rows.scale, codes, factors, out, parts, counters, cos, sin, count, outputs),
        WIDTH=width,
        OUTPUTS=tile.outputs,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        SPLITS=tile.splits,
        PROMOTE=promote,
        RAGGED=ragged,
        HEAD=head,
        ROPE=cos.shape[-1] if head else 0,
        PARTS_ONLY=parts_only,
        AHEAD=ahead,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,  # a rotation rounds as the reference does
        **(OVERLAP if pdl else {}),
    )
    return parts if parts_only else out


def _library(rows: Fp8Rows, invariant: bool) -> bool:
    return rows.codes.is_cuda and len(rows.codes) >= LIBRARY_ROWS and not invariant


def _library_product(rows: Fp8Rows, codes: Tensor, factors: Tensor) -> Tensor:
    scales = rows.scale.unsqueeze(1), factors.unsqueeze(0)  # [M, 1], [1, N]
    return torch._scaled_mm(rows.codes, codes.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False)


def fp8_linear(rows: Fp8Rows, codes: Tensor, factors: Tensor, *, invariant: bool = False) -> Tensor:
    """Rows [M, K] times a weight of e4m3 codes [N, K] and factors float32 [N] (`quantize.fold_fp8`) -> bf16 [M, N].

    invariant: a row's bits do not depend on M (otherwise only below and from LIBRARY_ROWS on they do not).
    """
    if _library(rows, invariant):
        return _library_product(rows, codes, factors)
    return _product(rows, codes, factors, choose_tile(len(rows.codes), *codes.shape))


def split_sums(rows: Fp8Rows, codes: Tensor, factors: Tensor, *, invariant: bool = False) -> Tensor:
    """`fp8_linear` whose reader adds the parts (`norm.query_norms`): float32 [splits, M, N] where the product is cut
    along K, else its bf16 [M, N]."""
    tile = choose_tile(len(rows.codes), *codes.shape)
    if _library(rows, invariant) or tile.splits == 1:
        return fp8_linear(rows, codes, factors, invariant=invariant)
    return _product(rows, codes, factors, tile, parts_only=True)


def fp8_queries(
    rows: Fp8Rows, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, head_dim: int, *, invariant: bool = False
) -> Tensor:
    """The queries of all heads: latents [M, K] times wq_b with its rows in split order per head (`rope.split_order`),
    rounded to bf16 and rotated -> bf16 [M, heads, head_dim] in split order. cos, sin: float32 [M, rope_dim / 2]."""
    shape = (len(rows.codes), -1, head_dim)
    tile = choose_tile(len(rows.codes), *codes.shape)
    if _library(rows, invariant) or tile.splits > 1 or head_dim % tile.outputs:
        return rope_split_(fp8_linear(rows, codes, factors, invariant=invariant).view(shape), cos, sin)
    return _product(rows, codes, factors, tile, turn=(cos, sin, head_dim)).view(shape)
