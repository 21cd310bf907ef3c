"""Routed experts on Hopper: FP4 weights straight from registers into the tensor core, activations in FP8 or bfloat16.

Weights stand on the M side of the product. Each thread reads 16 bytes (32 weights of one row, one scale), looks four of
them up at once with a byte permute in a table that holds the scale (`experts_layout.py`), and has the registers that
wgmma takes. The sum over K is cut in two ways:

- exact sums: the product of 128 of K is added to a float32 sum. The tensor core's own FP8 sums keep few bits: one
  chain over K = 5120 leaves 1.96e-3 after bfloat16 where this leaves 1.66e-3, and rounding alone 1.65e-3.
- chained: one sum over all of K, for many rows, where the additions cost time.

Either way the order of the additions is that of K, whatever the tile, so a row's bits do not depend on the batch while
the kind of sum stays the same.

In both, `_settled` makes the sum pass through an (empty) instruction before the next step: the compiler then waits for
the tensor core, which still reads the registers that the next step's weights are written to. Without it results are
wrong, silently, at large tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.experts_layout import BLOCK_K, ShuffledMatrix
from deepinfer.kernels.triton.experts_plan import ExpertPlan
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, to_type
from deepinfer.kernels.triton.runtime import INTERPRET, launch


class Tile(NamedTuple):
    """weight rows x slots of a program, how many blocks of K are on their way, and how it is launched."""

    weights: int
    rows: int
    stages: int
    warps: int
    registers: int | None = None  # of a thread, at most
    halves: bool = False  # exact sums of 128 weight rows in two steps of 64


def block_rows(slots: int, experts: int, *, exact: bool = False) -> int:
    """How many rows a block has where `slots` slots fall on `experts` experts (all of the layer): measured."""
    mean = slots / experts
    if mean <= 12:
        return 16
    if mean <= 24:
        return 32
    return 64 if mean <= 200 or exact else 128


def choose_tile(rows: int, *, exact: bool = False) -> Tile:
    """The tile for blocks of `rows` rows."""
    if rows <= 32:
        return Tile(128, rows, 6, 4)
    if exact:
        return Tile(128, rows, 4, 4, halves=rows > 64)  # more than 64 rows of two sums each do not fit the registers
    return Tile(128, rows, 4, 4, registers=168 if rows == 64 else None)  # 168: three programs a processor


@triton.jit
def _settled(x):
    """x, float32, once it has been computed: an instruction that does nothing, but needs it."""
    if INTERPRET:
        return x
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _weight_values(words, steps, ROWS: tl.constexpr, KERNEL_ORDER: tl.constexpr):
    """uint8 [ROWS, 64] and [ROWS, 4] (`experts_layout`) -> float32 [ROWS, 128], without the row's factor."""
    words = words.reshape(ROWS, 16, 4).to(tl.int32)
    magnitude = tl.join(words & 7, (words >> 4) & 7).reshape(ROWS, 16, 8)
    sign = tl.join(words >> 7, (words >> 3) & 1).permute(0, 1, 3, 2).reshape(ROWS, 16, 8)
    large = (2 + (magnitude & 1)).to(tl.float32) * (1 << (magnitude >> 1)).to(tl.float32) * 0.25
    values = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, large)
    values = tl.where(sign != 0, -values, values).reshape(ROWS, 4, 32)
    scale = ((steps.to(tl.int32) + (127 - 5)) << 23).to(tl.float32, bitcast=True)
    values = values * scale[:, :, None]
    if KERNEL_ORDER:
        values = values.reshape(ROWS, 4, 4, 2, 4).permute(0, 2, 3, 1, 4)
    return values.reshape(ROWS, 128)


@triton.jit
def _weight_codes(words, steps, ROWS: tl.constexpr, KERNEL_ORDER: tl.constexpr):
    """The same as e4m3 codes, four at a time: 7 instructions for 8 weights."""
    c = steps.to(tl.int32)
    # Codes of {0, .5, 1, 1.5} and {2, 3, 4, 6} times 2^(c - 5): 8 more a byte for each power of two, zero stays zero.
    low = tl.broadcast_to((c * 0x08080800 + 0x14100800)[:, :, None], (ROWS, 4, 16)).reshape(ROWS, 64)
    high = tl.broadcast_to((c * 0x08080808 + 0x24201C18)[:, :, None], (ROWS, 4, 16)).reshape(ROWS, 64)
    first, second = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 m, n, a, b, s;
        and.b32 m, $2, 0x77777777;
        prmt.b32 a, $3, $7, m;
        shr.u32 n, m, 16;
        prmt.b32 b, $3, $7, n;
        shl.b32 s, $2, 4;
        lop3.b32 $0, $2, 0x80808080, a, 0xEA;
        lop3.b32 $1, s, 0x80808080, b, 0xEA;
        }
        """,
        "=r,=r,r,r,r,r,r,r,r,r,r",  # four bytes of the word, four times each of the two tables
        [words, low, high],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    codes = tl.join(first, second).reshape(ROWS, 4, 4, 4, 2)  # t, w, b, o
    if KERNEL_ORDER:
        return codes.permute(0, 2, 4, 1, 3).reshape(ROWS, 128)
    return codes.permute(0, 1, 2, 4, 3).reshape(ROWS, 128)


@triton.jit
def _step(words, steps, x, total, ROWS: tl.constexpr, WIDE: tl.constexpr, FRESH: tl.constexpr):
    """total [ROWS, slots] + weights [ROWS, 128] times x [slots, 128]^T; FRESH: without total."""
    if INTERPRET:
        product = tl.dot(_weight_values(words, steps, ROWS, not WIDE), tl.trans(x.to(tl.float32)))
        return product if FRESH else total + product
    weights = _weight_codes(words, steps, ROWS, not WIDE)
    if WIDE:
        weights = weights.to(tl.bfloat16)
    if FRESH:
        return _settled(tl.dot(weights, tl.trans(x)))
    return _settled(tl.dot(weights, tl.trans(x), total))


@triton.jit
def _places(row, first, BLOCKS: tl.constexpr):
    """Where the rows' codes [rows, 64] and scales [rows, 4] of the first block of K lie; `first`: number of the tile of
    64 rows x 128 of K that the first row is in."""
    tile = first + (row // 64) * BLOCKS
    inside = row % 64
    words = (tile * 4096 + inside * 64)[:, None] + tl.arange(0, 64)[None, :]
    return words, (tile * 256 + inside * 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _chain(
    x, places, live, codes, scales, first, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a matrix times rows `places` of x -> float32 [ROWS, SLOTS], without factors; one sum over K."""
    BLOCKS: tl.constexpr = WIDTH // 128
    words_at, steps_at = _places(tl.arange(0, ROWS), 0, BLOCKS)
    x_at = places[:, None] * WIDTH + tl.arange(0, 128)[None, :]
    codes += first * 4096
    scales += first * 256
    total = tl.zeros((ROWS, SLOTS), tl.float32)
    for k in tl.range(0, BLOCKS, num_stages=STAGES):
        words = tl.load(codes + k * 4096 + words_at)
        steps = tl.load(scales + k * 256 + steps_at)
        rows = tl.load(x + (k * 128 + x_at), mask=live[:, None], other=0.0)
        total = _step(words, steps, rows, total, ROWS, WIDE, False)
    return total


@triton.jit
def _sum(
    x, places, live, codes, scales, first, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same with exact sums: 128 of K at a time."""
    BLOCKS: tl.constexpr = WIDTH // 128
    words_at, steps_at = _places(tl.arange(0, ROWS), 0, BLOCKS)
    x_at = places[:, None] * WIDTH + tl.arange(0, 128)[None, :]
    codes += first * 4096
    scales += first * 256
    total = tl.zeros((ROWS, SLOTS), tl.float32)
    for k in tl.range(0, BLOCKS, num_stages=STAGES):
        words = tl.load(codes + k * 4096 + words_at)
        steps = tl.load(scales + k * 256 + steps_at)
        rows = tl.load(x + (k * 128 + x_at), mask=live[:, None], other=0.0)
        total += _step(words, steps, rows, total, ROWS, WIDE, True)
    return total


@triton.jit
def _sum_halves(
    x, places, live, codes, scales, first, WIDTH: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The same for 128 rows, in two halves one after the other: the partial sums of one take half of the registers."""
    BLOCKS: tl.constexpr = WIDTH // 128
    words_at, steps_at = _places(tl.arange(0, 64), 0, BLOCKS)
    x_at = places[:, None] * WIDTH + tl.arange(0, 128)[None, :]
    codes += first * 4096
    scales += first * 256
    upper = tl.zeros((64, SLOTS), tl.float32)
    lower = tl.zeros((64, SLOTS), tl.float32)
    for k in tl.range(0, BLOCKS, num_stages=STAGES):
        rows = tl.load(x + (k * 128 + x_at), mask=live[:, None], other=0.0)
        words = tl.load(codes + k * 4096 + words_at)
        steps = tl.load(scales + k * 256 + steps_at)
        words_2 = tl.load(codes + (k + BLOCKS) * 4096 + words_at)
        steps_2 = tl.load(scales + (k + BLOCKS) * 256 + steps_at)
        upper += _step(words, steps, rows, upper, 64, WIDE, True)
        lower += _step(words_2, steps_2, rows, lower, 64, WIDE, True)
    return upper, lower


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
    EXACT: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
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
    if HALVES:
        upper, lower = _sum_halves(x, source, live, codes, scales, first, WIDTH, SLOTS, WIDE, STAGES)
        if UP:
            _finish_up(
                upper, x_scale, factors, out, weights, limit, slots, source, live, place, expert, row, 64, SLOTS,
                OUTPUTS, WIDE,
            )  # fmt: skip
            _finish_up(
                lower, x_scale, factors, out, weights, limit, slots, source, live, place, expert, row + 64, 64, SLOTS,
                OUTPUTS, WIDE,
            )  # fmt: skip
        else:
            _finish_down(upper, x_scale, factors, out, live, place, expert, row, 64, OUTPUTS, WIDE)
            _finish_down(lower, x_scale, factors, out, live, place, expert, row + 64, 64, OUTPUTS, WIDE)
    else:
        if EXACT:
            sums = _sum(x, source, live, codes, scales, first, WIDTH, ROWS, SLOTS, WIDE, STAGES)
        else:
            sums = _chain(x, source, live, codes, scales, first, WIDTH, ROWS, SLOTS, WIDE, STAGES)
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
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, EXACT: tl.constexpr,
    HALVES: tl.constexpr, SMALLER: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_previous()
    block = blocks + tl.program_id(0) // (OUTPUTS // ROWS) * 4
    expert = tl.load(block)
    if expert < 0:
        return
    row = tl.program_id(0) % (OUTPUTS // ROWS) * ROWS
    begin = tl.load(block + 1)
    rows = tl.load(block + 2)
    if SMALLER > 0 and rows <= SMALLER:  # an expert's last rows: a smaller tile wastes less
        _tile(
            x, x_scale, codes, scales, factors, out, order, weights, limit, begin, rows, expert, row, TOPK, UP, WIDTH,
            OUTPUTS, ROWS, SMALLER, EXACT, False, WIDE, STAGES,
        )  # fmt: skip
    else:
        _tile(
            x, x_scale, codes, scales, factors, out, order, weights, limit, begin, rows, expert, row, TOPK, UP, WIDTH,
            OUTPUTS, ROWS, SLOTS, EXACT, HALVES, WIDE, STAGES,
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
    tile = choose_tile(plan.block_rows, exact=exact) if tile is None else tile
    if out is None:
        out = torch.empty(slots, matrix.rows // 2 if up else matrix.rows, dtype=torch.bfloat16, device=values.device)
    limited = {} if tile.registers is None else {"maxnreg": tile.registers}
    launch(
        _experts_kernel,
        (len(plan.blocks) * (matrix.rows // tile.weights),),
        *(values, scale, matrix.codes, matrix.scales, matrix.factors, out, plan.blocks, plan.order, weights, limit),
        TOPK=topk,
        UP=up,
        WIDTH=matrix.columns,
        OUTPUTS=matrix.rows,
        ROWS=tile.weights,
        SLOTS=tile.rows,
        EXACT=exact,
        HALVES=exact and tile.halves,
        SMALLER=tile.rows // 2 if tile.rows >= 128 else 0,
        WIDE=wide,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **limited,
        **OVERLAP,
    )
    return out


assert BLOCK_K == 128  # what the kernels above count with
