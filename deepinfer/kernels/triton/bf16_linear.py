"""Products with BF16 matrices whose rows do not know each other: head, router, compressor, index keys and weights.

The library chooses its kernel, and with it the order of a sum, by the number of rows. Here the order follows from the
matrix alone: K in parts of equal length, each summed by the tensor core in rising order, the parts added in rising
order. Whether programs of their own make the parts (few rows) or one makes all of them (many) changes no bit, and
neither does the tile: weights stand on the M side of the product, so it is always the same instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.dense import Tile
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.runtime import INTERPRET, NUM_SMS, launch

DEPTH = 64  # of K in a step: 128 bytes, one row of shared memory
SHORTEST = 512  # of K in a part
APART_ROWS = 128  # up to so many, parts are programs of their own


def part_count(outputs: int, width: int) -> int:
    """In how many parts the sum over K is made: a power of two, so many that the tiles of a small matrix fill half of
    the device. Looks at the matrix alone."""
    tiles, parts = triton.cdiv(outputs, 64), 1
    while 2 * parts * tiles <= NUM_SMS and width % (2 * parts * DEPTH) == 0 and width // (2 * parts) >= SHORTEST:
        parts *= 2
    return parts


def choose_tile(rows: int, outputs: int, width: int) -> Tile:
    """`splits`: into how many programs the parts of K go."""
    parts = part_count(outputs, width)
    if rows <= APART_ROWS:
        tokens = max(16, triton.next_power_of_2(rows))
        wide = outputs >= 128 * NUM_SMS
        return Tile(128 if wide else 64, tokens, DEPTH, parts, 4, 8 if wide else 4)
    if outputs >= 128 * 32:
        return Tile(128, 128, DEPTH, 1, 4, 8)
    return Tile(64, 64 if parts > 1 else 128, DEPTH, 1, 4, 4)  # of parts two sums are held at once


@triton.jit(do_not_specialize=["rows"])  # one kernel for every number of rows
def _linear_kernel(
    x, w, out, rows, outputs, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, APART: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    steps: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH // PARTS
    first = tl.program_id(2) if APART else 0
    k = first * (steps * DEPTH) + tl.arange(0, DEPTH)
    w_places = w + output.to(tl.int64)[:, None] * WIDTH + k[None, :]
    x_places = x + token.to(tl.int64)[None, :] * WIDTH + k[:, None]
    here, within = (token < rows)[None, :], (output < outputs)[:, None]
    wait_for_previous()
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
    for _ in range(1 if APART else PARTS):
        part = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
        for step in range(steps):
            if RAGGED:  # of one part
                inside = k + step * DEPTH < WIDTH
                weights = tl.load(w_places, mask=within & inside[None, :], other=0.0)
                values = tl.load(x_places, mask=here & inside[:, None], other=0.0)
            else:
                weights = tl.load(w_places)
                values = tl.load(x_places, mask=here, other=0.0)
            if INTERPRET:
                part = tl.dot(weights.to(tl.float32), values.to(tl.float32), part, input_precision="ieee")
            else:
                part = tl.dot(weights, values, part)
            w_places += DEPTH
            x_places += DEPTH
        total += part
    start_next()
    if APART:  # out is float32 [parts, rows, outputs]
        out += tl.program_id(2).to(tl.int64) * rows * outputs
    places = token.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(out + places, to_type(total, out.dtype.element_ty), mask=within & here)


@triton.jit(do_not_specialize=["size"])
def _add_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    start_next()
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + places, mask=places < size, other=0.0)
    tl.store(out + places, to_type(total, out.dtype.element_ty), mask=places < size)


def bf16_linear(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32, *, tile: Tile | None = None) -> Tensor:
    """x bf16 [N, K] times weight bf16 [M, K]^T, summed in float32 -> `dtype` (float32, bfloat16) [N, M]. A row's bits
    do not depend on N."""
    (rows, width), outputs = x.shape, len(weight)
    parts = part_count(outputs, width)
    tile = choose_tile(rows, outputs, width) if tile is None else tile
    apart = parts > 1 and tile.splits > 1
    out = x.new_empty(rows, outputs, dtype=dtype)
    sums = x.new_empty(parts, rows, outputs, dtype=torch.float32) if apart else out
    launch(
        _linear_kernel,
        (triton.cdiv(rows, tile.tokens), triton.cdiv(outputs, tile.outputs), parts if apart else 1),
        *(x.contiguous(), weight, sums, rows, outputs),
        WIDTH=width,
        OUTPUTS=tile.outputs,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        PARTS=parts,
        APART=apart,
        RAGGED=width % tile.depth > 0 or outputs % tile.outputs > 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAP,
    )
    if apart:
        size = rows * outputs
        launch(
            _add_kernel, (triton.cdiv(size, 1024),), sums, out, size, PARTS=parts, BLOCK=1024, num_warps=4, **OVERLAP
        )
    return out
