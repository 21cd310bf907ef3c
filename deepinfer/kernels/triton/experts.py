"""Routed experts on Hopper: FP4 weights straight from registers into the tensor core, activations in FP8 or bfloat16.

Weights stand on the M side of the product (`experts_unpack.py`), slots on the N side. The sum over K is made in one of
two ways:

- exact sums: the product of 128 of K is added to a float32 sum. The tensor core's own FP8 sums keep few bits: one
  chain over K = 5120 leaves 1.96e-3 after bfloat16 where this leaves 1.66e-3, and rounding alone 1.65e-3.
- chained: one sum over all of K, for many rows, where the additions cost time.

Either way the order of the additions is that of K, whatever the tile, so a row's bits do not depend on the batch while
the kind of sum stays the same. Exact sums of more than 100 rows an expert are made by a kernel with roles for warps
(`experts_hopper.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.experts_hopper import BLOCK_ROWS, multiply_blocks
from deepinfer.kernels.triton.experts_layout import BLOCK_K, ShuffledMatrix
from deepinfer.kernels.triton.experts_plan import ExpertPlan
from deepinfer.kernels.triton.experts_unpack import add_product
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, to_type
from deepinfer.kernels.triton.runtime import INTERPRET, NUM_SMS, launch

RESIDENT = 4 * NUM_SMS  # programs of the small tiles that run at once


class Tile(NamedTuple):
    """weight rows x slots of a program, how many blocks of K are on their way, and how it is launched."""

    weights: int
    rows: int
    stages: int
    warps: int
    registers: int | None = None  # of a thread, at most


def block_rows(slots: int, experts: int) -> int:
    """How many rows a block has where `slots` slots fall on `experts` experts (all of the layer): measured on an
    H200."""
    mean = slots / experts
    if mean <= 12:
        return 16
    if mean <= 24:
        return 32
    return 64 if mean <= 100 else BLOCK_ROWS


def choose_tile(rows: int, *, exact: bool = False) -> Tile:
    """The tile for blocks of `rows` rows. Exact sums of 128 come in two parts: two sums do not fit the registers."""
    if rows <= 32:
        return Tile(128, rows, 6, 4)
    if exact:
        return Tile(128, 64, 3, 4)
    return Tile(128, rows, 4, 4, registers=168 if rows == 64 else None)  # 168: three programs a processor


@triton.jit
def _sum(
    x, places, live, codes, scales, first, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a matrix times rows `places` of x -> float32 [ROWS, SLOTS], without factors. first: number of the
    tile of 64 rows x 128 of K that the first row is in."""
    BLOCKS: tl.constexpr = WIDTH // 128
    row = tl.arange(0, ROWS)
    below = (row // 64) * BLOCKS  # tiles
    words_at = (below * 4096 + (row % 64) * 64)[:, None] + tl.arange(0, 64)[None, :]
    steps_at = (below * 256 + (row % 64) * 4)[:, None] + tl.arange(0, 4)[None, :]
    x_at = places[:, None] * WIDTH + tl.arange(0, 128)[None, :]
    codes += first * 4096
    scales += first * 256
    total = tl.zeros((ROWS, SLOTS), tl.float32)
    for k in tl.range(0, BLOCKS, num_stages=STAGES):
        words = tl.load(codes + k * 4096 + words_at)
        steps = tl.load(scales + k * 256 + steps_at)
        # Rows beyond the block's are zeros, not copies of one row: a thousand programs would ask for the same line.
        rows = tl.load(x + (k * 128 + x_at), mask=live[:, None], other=0.0)
        if EXACT:
            total += add_product(words, steps, rows, total, ROWS, WIDE, True)
        else:
            total = add_product(words, steps, rows, total, ROWS, WIDE, False)
    return total


@triton.jit
def _finish_up(
    sums, x_scale, factors, out, weights, limit, slots, tokens, live, place, expert, row, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of ROWS rows of an expert from `row` on -> SwiGLU times the routing weight, bf16, ROWS / 2 channels."""
    sums *= tl.load(factors + expert * OUTPUTS + row + tl.arange(0, ROWS))[:, None]
    if not WIDE:
        sums *= tl.load(x_scale + tokens, mask=live, other=0.0)[None, :]
    # Rows alternate by eight: both of a pair are in one thread.
    gate, up = tl.split(sums.reshape(ROWS // 16, 2, 8, SLOTS).permute(0, 2, 3, 1))
    gate = tl.minimum(to_type(gate, tl.bfloat16).to(tl.float32), limit)
    up = to_type(up, tl.bfloat16).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(weights + slots, mask=live, other=0.0)
    act = (gate / (1.0 + tl.exp(-gate)) * up).reshape(ROWS // 2, SLOTS) * weight[None, :]
    channels = row // 2 + tl.arange(0, ROWS // 2)
    where = place.to(tl.int64)[:, None] * (OUTPUTS // 2) + channels[None, :]
    tl.store(out + where, tl.trans(to_type(act, tl.bfloat16)), mask=live[:, None])


@triton.jit
def _finish_down(
    sums, x_scale, factors, out, live, place, expert, row, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of ROWS rows of an expert from `row` on -> bf16 at sorted places."""
    sums *= tl.load(factors + expert * OUTPUTS + row + tl.arange(0, ROWS))[:, None]
    if not WIDE:
        sums *= tl.load(x_scale + place, mask=live, other=0.0)[None, :]
    where = place.to(tl.int64)[:, None] * OUTPUTS + (row + tl.arange(0, ROWS))[None, :]
    tl.store(out + where, tl.trans(to_type(sums, tl.bfloat16)), mask=live[:, None])


@triton.jit
def _tile(
    x, x_scale, codes, scales, factors, out, order, weights, limit, begin, rows, expert, row, TOPK: tl.constexpr,
    UP: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows row .. row + ROWS - 1 of an expert's matrix times up to SLOTS slots."""
    inside = tl.arange(0, SLOTS)
    live = inside < rows
    place = begin + inside
    if UP:
        slots = tl.load(order + place, mask=live, other=0)
        source = slots // TOPK
    else:
        slots = place
        source = place
    first = (expert.to(tl.int64) * (OUTPUTS // 64) + row // 64) * (WIDTH // 128)
    sums = _sum(x, source, live, codes, scales, first, WIDTH, ROWS, SLOTS, EXACT, WIDE, STAGES)
    if LATE:
        start_next()
    if UP:
        _finish_up(
            sums, x_scale, factors, out, weights, limit, slots, source, live, place, expert, row, ROWS, SLOTS,
            OUTPUTS, WIDE,
        )  # fmt: skip
    else:
        _finish_down(sums, x_scale, factors, out, live, place, expert, row, ROWS, OUTPUTS, WIDE)


@triton.jit
def _experts_kernel(
    x, x_scale, codes, scales, factors, out, blocks, order, weights, limit, TOPK: tl.constexpr, UP: tl.constexpr,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    EXACT: tl.constexpr, SMALLER: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """PARTS: tiles that a block's rows are cut into."""
    if not LATE:  # Few programs: those of the next launch would take places among them, and lie unevenly.
        start_next()
    wait_for_previous()
    number = tl.program_id(0) // (OUTPUTS // ROWS)
    block = blocks + number // PARTS * 4
    expert = tl.load(block)
    if expert < 0:
        return
    row = tl.program_id(0) % (OUTPUTS // ROWS) * ROWS
    begin = tl.load(block + 1) + number % PARTS * SLOTS
    rows = tl.load(block + 2) - number % PARTS * SLOTS
    if PARTS > 1 and rows <= 0:
        return
    if SMALLER > 0 and rows <= SMALLER:  # an expert's last rows: a smaller tile wastes less
        _tile(
            x, x_scale, codes, scales, factors, out, order, weights, limit, begin, rows, expert, row, TOPK, UP, WIDTH,
            OUTPUTS, ROWS, SMALLER, EXACT, WIDE, LATE, STAGES,
        )  # fmt: skip
    else:
        _tile(
            x, x_scale, codes, scales, factors, out, order, weights, limit, begin, rows, expert, row, TOPK, UP, WIDTH,
            OUTPUTS, ROWS, SLOTS, EXACT, WIDE, LATE, STAGES,
        )  # fmt: skip


def experts_up(
    x: Fp8Rows | Tensor,
    plan: ExpertPlan,
    weights: Tensor,
    matrix: ShuffledMatrix,
    limit: float,
    *,
    exact: bool = True,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """SwiGLU of the gate and up projections times the routing weight: bf16 [S, inner] by sorted place.

    x: FP8 rows in kernel order [T, D] (W4A8), or bf16 [T, D] in natural order (W4A16). weights float32 [T, k], matrix
    [E, 2 inner, D] with paired rows. Places that no slot of an expert here has are not written.
    """
    return _launch(x, plan, weights, matrix, limit, exact, tile, out, up=True)


def experts_down(
    x: Fp8Rows | Tensor,
    plan: ExpertPlan,
    matrix: ShuffledMatrix,
    *,
    exact: bool = True,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [S, inner] by sorted place (FP8 rows in kernel order, or bf16) times each expert's matrix [E, D, inner] -> bf16
    [S, D] by sorted place; places that no slot of an expert here has are not written."""
    return _launch(x, plan, None, matrix, 0.0, exact, tile, out, up=False)


def _launch(
    x: Fp8Rows | Tensor,
    plan: ExpertPlan,
    weights: Tensor | None,
    matrix: ShuffledMatrix,
    limit: float,
    exact: bool,
    tile: Tile | None,
    out: Tensor | None,
    up: bool,
) -> Tensor:
    wide = isinstance(x, Tensor)
    values, scale = (x, None) if isinstance(x, Tensor) else (x.codes, x.scale)
    slots = plan.order.numel()
    topk = slots // len(values) if up else 1
    if values.shape[1] != matrix.columns:
        raise ValueError(f"rows of {values.shape[1]} values for matrices with {matrix.columns} columns")
    if values.numel() >= 1 << 31:
        raise ValueError(f"{len(values)} rows of {values.shape[1]} values: places in them must fit 31 bits")
    if out is None:
        out = torch.empty(slots, matrix.rows // 2 if up else matrix.rows, dtype=torch.bfloat16, device=values.device)
    if tile is None and exact and scale is not None and plan.block_rows == BLOCK_ROWS and not INTERPRET.value:
        multiply_blocks(values, scale, matrix, plan, weights, limit, out, topk=topk, up=up)
        return out
    tile = choose_tile(plan.block_rows, exact=exact or wide) if tile is None else tile
    parts = plan.block_rows // tile.rows
    programs = len(plan.blocks) * parts * (matrix.rows // tile.weights)
    limited = {} if tile.registers is None else {"maxnreg": tile.registers}
    launch(
        _experts_kernel,
        (programs,),
        *(values, scale, matrix.codes, matrix.scales, matrix.factors, out, plan.blocks, plan.order, weights, limit),
        TOPK=topk,
        UP=up,
        WIDTH=matrix.columns,
        OUTPUTS=matrix.rows,
        ROWS=tile.weights,
        SLOTS=tile.rows,
        PARTS=parts,
        EXACT=exact,
        SMALLER=tile.rows // 2 if tile.rows >= 128 else 0,
        WIDE=wide,
        LATE=programs <= RESIDENT,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **limited,
        **OVERLAP,
    )
    return out


assert BLOCK_K == 128  # what the kernels above count with
