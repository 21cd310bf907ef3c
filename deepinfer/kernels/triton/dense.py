"""Dense FP8 products: rows with one scale each times weights with one factor per output (model specification 2.0).

Decode: weights are the M side of the tensor core's tile, tokens the N side, so few tokens waste nothing. Matrices that
are too small to fill the chip are cut along K, and whoever reads the product adds its parts in their order. Hopper
adds FP8 products in a short accumulator: a fresh one every 128 or 256 values of K, added in float32, leaves the
rounding of the result as the only error to speak of. Where K is cut depends on the weight alone, so a row's bits do not
depend on the number of rows. Some hundred rows, as of a verify step: `dense_wide.py`, with the same bits. Prefill: the
library's row-wise product, whose order of additions is its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.dense_wide import choose_wide, serves, wide_product
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, to_type
from deepinfer.kernels.triton.rope import rope_split_
from deepinfer.kernels.triton.runtime import NUM_SMS, launch


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
    tokens = min(max(16, triton.next_power_of_2(rows)), 64)
    if outputs >= 128 * NUM_SMS:  # more tiles of 128 than processors: wq_b, Engram's wkv
        return Tile(128, tokens, 128, 1, 4, 8)
    if outputs >= 64 * 60:  # tiles of 64 keep at least half of the processors loading, without parts to be added
        # Beyond 64 rows, tiles of 64 tokens where all of them run at once, else of 128.
        return Tile(64, 128 if rows > 64 and 2 * outputs > 64 * NUM_SMS else tokens, 256, 1, 4, 4)
    # Beyond 64 rows two programs share a processor: 98 KB of shared memory each instead of 128.
    return Tile(64, tokens, 256, 4 if width >= 4096 else 1, 4 if rows <= 64 else 3, 4)


def library_rows(outputs: int, width: int) -> int:
    """From so many rows on the library's product of a weight is the faster one: Engram's wkv, 256 rows: 82 us against
    86; wo_b, 512 rows: 47 against 38."""
    return 193 if outputs >= 128 * NUM_SMS and width >= 4096 else 513


def wide_rows(outputs: int) -> int:
    """From so many rows on `dense_wide` is faster than the tiles of decode; later where those all run at once (index
    wq_b, 128 rows: 5.0 us against 6.0)."""
    return 65 if 2 * outputs > 64 * NUM_SMS else 129


def whole(rows: int, outputs: int) -> bool:
    """Whether `dense_wide` multiplies all of K at once although decode cuts it: where that gives half of the processors
    a tile (wq_a and wkv with the norms behind them, 384 rows: 15.0 us against 17.7)."""
    return 2 * triton.cdiv(rows, 128) * triton.cdiv(outputs, 64) >= NUM_SMS


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
    x, scale, w, factor, out, cos, sin, rows, outputs,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    PROMOTE: tl.constexpr, RAGGED: tl.constexpr, HEAD: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
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
    wait_for_previous()
    total = _partial_sum(
        x, w, token, output, rows, outputs, first * DEPTH, tl.minimum(each, steps - first),
        WIDTH, DEPTH, TOKENS, OUTPUTS, PROMOTE, RAGGED,
    )  # fmt: skip
    start_next()
    # Powers of two: where they are multiplied in changes no bit.
    total *= tl.load(factor + output, mask=output < outputs, other=0.0)[:, None]
    total *= tl.load(scale + token, mask=token < rows, other=0.0)[None, :]
    inside = (output < outputs)[:, None] & (token < rows)[None, :]
    offsets = token.to(tl.int64)[None, :] * outputs + output[:, None]
    if SPLITS > 1:  # out is float32 [SPLITS, rows, outputs]
        out += split * rows.to(tl.int64) * outputs
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
        here = (token < rows)[None, :] & (lane >= 0)[:, None]
        tl.store(out + place, to_type(even * c - odd * s, y.dtype), mask=here)
        tl.store(out + place + HEAD // 2, to_type(even * s + odd * c, y.dtype), mask=here)
    else:
        tl.store(out + offsets, y, mask=inside)


@triton.jit(do_not_specialize=["size"])
def _add_kernel(parts, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    start_next()
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + places, mask=places < size, other=0.0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + part * size.to(tl.int64) + places, mask=places < size, other=0.0)
    tl.store(out + places, to_type(total, out.dtype.element_ty), mask=places < size)


def add_parts(parts: Tensor) -> Tensor:
    """float32 [splits, M, N] -> their sum, in order, bf16 [M, N]."""
    splits, rows, outputs = parts.shape
    out = parts.new_empty(rows, outputs, dtype=torch.bfloat16)
    size = rows * outputs
    launch(_add_kernel, (triton.cdiv(size, 1024),), parts, out, size, SPLITS=splits, BLOCK=1024, num_warps=4, **OVERLAP)
    return out


def _product(
    rows: Fp8Rows, codes: Tensor, factors: Tensor, tile: Tile, *, promote: bool = True,
    turn: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:  # fmt: skip
    """The Triton product. turn: cos, sin and head_dim of heads that leave rotated. -> bf16 [M, N], or float32 [splits,
    M, N] where K is cut."""
    (count, width), outputs = rows.codes.shape, codes.shape[0]
    cos, sin, head = turn if turn is not None else (factors, factors, 0)
    if tile.splits > 1:
        out = factors.new_empty(tile.splits, count, outputs)
    else:
        out = factors.new_empty(count, outputs, dtype=torch.bfloat16)
    grid = (triton.cdiv(count, tile.tokens), triton.cdiv(outputs, tile.outputs), tile.splits)
    launch(
        _linear_kernel,
        grid,
        *(rows.codes, rows.scale, codes, factors, out, cos, sin, count, outputs),
        WIDTH=width,
        OUTPUTS=tile.outputs,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        SPLITS=tile.splits,
        PROMOTE=promote,
        RAGGED=width % tile.depth > 0 or outputs % tile.outputs > 0,
        HEAD=head,
        ROPE=cos.shape[-1] if head else 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,  # a rotation rounds as the reference does
        **OVERLAP,
    )
    return out


def _library(rows: Fp8Rows, codes: Tensor, invariant: bool) -> bool:
    return rows.codes.is_cuda and len(rows.codes) >= library_rows(*codes.shape) and not invariant


def _library_product(rows: Fp8Rows, codes: Tensor, factors: Tensor) -> Tensor:
    scales = rows.scale.unsqueeze(1), factors.unsqueeze(0)  # [M, 1], [1, N]
    return torch._scaled_mm(rows.codes, codes.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False)


def _own_product(
    rows: Fp8Rows, codes: Tensor, factors: Tensor, invariant: bool, turn: tuple[Tensor, Tensor, int] | None = None
) -> Tensor:
    """`_product` by whatever is fastest for so many rows. Only a weight that decode cuts has other bits for many."""
    count, tile = len(rows.codes), choose_tile(len(rows.codes), *codes.shape)
    if count < wide_rows(len(codes)) or not serves(codes, tile.depth) or (turn is not None and turn[2] % 128):
        return _product(rows, codes, factors, tile, turn=turn)
    splits = 1 if whole(count, len(codes)) and not invariant else tile.splits
    wide = choose_wide(count, len(codes), splits, halves=turn is not None)
    return wide_product(rows, codes, factors, wide, depth=tile.depth, splits=splits, turn=turn)


def fp8_linear(rows: Fp8Rows, codes: Tensor, factors: Tensor, *, invariant: bool = False) -> Tensor:
    """Rows [M, K] times a weight of e4m3 codes [N, K] and factors float32 [N] (`quantize.fold_fp8`) -> bf16 [M, N].

    invariant: a row's bits do not depend on M (otherwise they change at `library_rows`, and where `whole` begins for a
    weight that decode cuts along K).
    """
    out = split_sums(rows, codes, factors, invariant=invariant)
    return add_parts(out) if out.dim() == 3 else out


def split_sums(rows: Fp8Rows, codes: Tensor, factors: Tensor, *, invariant: bool = False) -> Tensor:
    """`fp8_linear` for a reader that adds (`norm.query_norms`): float32 [splits, M, N] where the product is cut along
    K, else its bf16 [M, N]."""
    if _library(rows, codes, invariant):
        return _library_product(rows, codes, factors)
    return _own_product(rows, codes, factors, invariant)


def fp8_queries(
    rows: Fp8Rows, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, head_dim: int, *, invariant: bool = False
) -> Tensor:
    """The queries of all heads: latents [M, K] times wq_b with its rows in split order per head (`rope.split_order`),
    rounded to bf16 and rotated -> bf16 [M, heads, head_dim] in split order. cos, sin: float32 [M, rope_dim / 2]."""
    shape = (len(rows.codes), -1, head_dim)
    tile = choose_tile(len(rows.codes), *codes.shape)
    if _library(rows, codes, invariant) or tile.splits > 1 or head_dim % tile.outputs:
        return rope_split_(fp8_linear(rows, codes, factors, invariant=invariant).view(shape), cos, sin)
    return _own_product(rows, codes, factors, invariant, (cos, sin, head_dim)).view(shape)
