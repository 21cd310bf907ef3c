"""Exact sums of `experts.py` for blocks of up to 128 rows, with roles for warps (Gluon): four warps bring weights and
activations to shared memory, three times four multiply, each 64 rows of weights by all rows of the block.

A program that does all in turn has room for the two sums of 64 rows, not of 128, so it unpacks weights twice as often.
Here a group of warps holds 64 x 128 sums and one product of 64 x 64; its additions lie under the products of the two
other groups, and copies run ahead through the end of one tile into the next.

The interpreter does not run Gluon; there `experts._experts_kernel` does the same work, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.kernels.triton.experts_hopper_parts import MMA, finish_down, finish_up, unpack
from deepinfer.kernels.triton.experts_layout import ShuffledMatrix
from deepinfer.kernels.triton.experts_plan import ExpertPlan
from deepinfer.kernels.triton.overlap import OVERLAP
from deepinfer.kernels.triton.runtime import launch, num_sms

BLOCK_ROWS = 128
GROUPS = gl.constexpr(3)  # of four warps that multiply
STAGES = gl.constexpr(7)  # steps of 128 of K in shared memory, 28.8 KB each
# Registers of a thread: 512 threads share 65,536, and the first group has what these leave, 144.
MULTIPLYING = gl.constexpr(144)
FETCHING = gl.constexpr(80)

_CODES_IN = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_SCALES_IN = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
_ROWS_IN = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _used_blocks(blocks, number):
    """How many of the plan's blocks have rows: the first ones."""
    used = 0
    for base in range(0, number, 256):
        block = base + gl.arange(0, 256, layout=gl.BlockedLayout([2], [32], [4], [0]))
        used += gl.sum((gl.load(blocks + block * 4, mask=block < number, other=-1) >= 0).to(gl.int32), 0)
    return used


@gluon.jit
def _unit(blocks, unit, units, HEIGHT: gl.constexpr):
    """Expert, first place and rows of a unit's block, and the first of its GROUPS tiles of 64 rows of weights. Units of
    a block come one after the other, so programs that run at once share weights and activations."""
    TIMES: gl.constexpr = (HEIGHT + GROUPS - 1) // GROUPS
    block = blocks + unit // TIMES * 4
    there = unit < units
    expert = gl.load(block, mask=there, other=0)
    begin = gl.load(block + 1, mask=there, other=0)
    rows = gl.load(block + 2, mask=there, other=0)
    return expert, begin, rows, unit % TIMES * GROUPS


@gluon.jit
def _next(stage, phase):
    """The next stage, and its phase: how often all have been used, modulo 2."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _sources(order, begin, rows, HALF: gl.constexpr, UP: gl.constexpr):
    """Of one half of a block: slots, as the sorted order has them, or places."""
    inside = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _ROWS_IN))
    if UP:
        return gl.load(order + begin + inside, mask=inside < rows, other=0)
    else:
        return begin + inside


@gluon.jit
def _fetching(
    x, codes, scales, blocks, order, memory, units, TOPK: gl.constexpr, UP: gl.constexpr, WIDTH: gl.constexpr,
    OUTPUTS: gl.constexpr,
):  # fmt: skip
    """The warps that copy; zeros for rows that a block does not have."""
    codes_at, scales_at, rows_at, full, empty = memory
    BLOCKS: gl.constexpr = WIDTH // 128
    HEIGHT: gl.constexpr = OUTPUTS // 64
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _CODES_IN))
    words = row[:, None] * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, _CODES_IN))[None, :]
    lines = gl.arange(0, 64, layout=_SCALES_IN)
    inside = gl.arange(0, 64, layout=gl.SliceLayout(1, _ROWS_IN))
    byte = gl.arange(0, 128, layout=gl.SliceLayout(0, _ROWS_IN))
    stage = 0
    phase = 1
    unit = gl.program_id(0)
    expert, begin, count, tile = _unit(blocks, unit, units, HEIGHT)
    firsts = _sources(order, begin, count, 0, UP)
    seconds = _sources(order, begin, count, 1, UP)
    while unit < units:
        start = (expert.to(gl.int64) * HEIGHT + tile) * BLOCKS
        code = codes + start * 1024
        scale = scales + start * 64
        first = (firsts // TOPK if UP else firsts)[:, None] * WIDTH + byte[None, :]
        second = (seconds // TOPK if UP else seconds)[:, None] * WIDTH + byte[None, :]
        rows = count
        left = HEIGHT - tile
        unit += gl.num_programs(0)
        # What comes next is asked for well before it is needed, in two steps, since one depends on the other.
        expert, begin, count, tile = _unit(blocks, unit, units, HEIGHT)
        for k in range(BLOCKS):
            mbarrier.wait(empty.index(stage), phase)
            for i in gl.static_range(GROUPS):
                if HEIGHT % GROUPS == 0 or i < left:
                    at = stage * GROUPS + i
                    async_copy.async_copy_global_to_shared(codes_at.index(at), code + (i * BLOCKS * 1024 + words))
                    async_copy.async_copy_global_to_shared(scales_at.index(at), scale + (i * BLOCKS * 64 + lines))
            at = stage * 2
            async_copy.async_copy_global_to_shared(rows_at.index(at), x + first, mask=(inside < rows)[:, None])
            if rows > 64:
                live = inside + 64 < rows
                async_copy.async_copy_global_to_shared(rows_at.index(at + 1), x + second, mask=live[:, None])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            code += 1024
            scale += 64
            first += 128
            second += 128
            stage, phase = _next(stage, phase)
            if k == BLOCKS // 2:
                firsts = _sources(order, begin, count, 0, UP)
                seconds = _sources(order, begin, count, 1, UP)


@gluon.jit
def _product(left, rows_at, at):
    """left times 64 rows of activations."""
    zero = gl.zeros([64, 64], gl.float32, layout=MMA)
    running = warpgroup_mma(left, rows_at.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[running])


@gluon.jit
def _sums(memory, stage, phase, GROUP: gl.constexpr, BLOCKS: gl.constexpr, TWO: gl.constexpr):
    """A group's 64 rows of weights times 64 rows, or (TWO) twice 64, over all of K."""
    codes_at, scales_at, rows_at, full, empty = memory
    first = gl.zeros([64, 64], gl.float32, layout=MMA)
    second = gl.zeros([64, 64], gl.float32, layout=MMA)
    for _ in range(BLOCKS):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        left = unpack(codes_at.index(stage * GROUPS + GROUP), scales_at.index(stage * GROUPS + GROUP))
        first += _product(left, rows_at, stage * 2)
        if TWO:
            second += _product(left, rows_at, stage * 2 + 1)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase)
    return first, second, stage, phase


@gluon.jit
def _finish(
    sums, x_scale, factors, out, order, weights, limit, begin, rows, expert, row, TOPK: gl.constexpr, UP: gl.constexpr,
    OUTPUTS: gl.constexpr,
):  # fmt: skip
    if UP:
        finish_up(sums, x_scale, factors, out, order, weights, limit, begin, rows, expert, row, TOPK, OUTPUTS)
    else:
        finish_down(sums, x_scale, factors, out, begin, rows, expert, row, OUTPUTS)


@gluon.jit
def _multiplying(
    GROUP: gl.constexpr, tensors, memory, limit, units, TOPK: gl.constexpr, UP: gl.constexpr, WIDTH: gl.constexpr,
    OUTPUTS: gl.constexpr,
):  # fmt: skip
    """One group of the warps that multiply."""
    x_scale, factors, out, blocks, order, weights = tensors
    full, empty = memory[3], memory[4]
    BLOCKS: gl.constexpr = WIDTH // 128
    HEIGHT: gl.constexpr = OUTPUTS // 64
    stage = 0
    phase = 0
    unit = gl.program_id(0)
    expert, begin, rows, tile = _unit(blocks, unit, units, HEIGHT)
    while unit < units:
        unit += gl.num_programs(0)
        next_expert, next_begin, next_rows, next_tile = _unit(blocks, unit, units, HEIGHT)
        row = (tile + GROUP) * 64
        if HEIGHT % GROUPS > 0 and row >= OUTPUTS:  # nothing left for these warps
            for _ in range(BLOCKS):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = _next(stage, phase)
        else:
            if rows > 64:
                sums, others, stage, phase = _sums(memory, stage, phase, GROUP, BLOCKS, True)
                _finish(
                    others, x_scale, factors, out, order, weights, limit, begin + 64, rows - 64, expert, row, TOPK, UP,
                    OUTPUTS,
                )  # fmt: skip
            else:
                sums, others, stage, phase = _sums(memory, stage, phase, GROUP, BLOCKS, False)
            _finish(
                sums, x_scale, factors, out, order, weights, limit, begin, rows, expert, row, TOPK, UP, OUTPUTS
            )  # fmt: skip
        expert, begin, rows, tile = next_expert, next_begin, next_rows, next_tile


@gluon.jit
def _experts_hopper(
    x, x_scale, codes, scales, factors, out, blocks, order, weights, limit, number, TOPK: gl.constexpr,
    UP: gl.constexpr, WIDTH: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """codes and scales as int32. A program takes units one after the other."""
    gdc_wait()
    codes_at = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 64, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    scales_at = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows_at = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 64, 128], gl.NVMMASharedLayout(128, 8, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)  # every thread that copies
        mbarrier.init(empty.index(stage), count=GROUPS)
    memory = (codes_at, scales_at, rows_at, full, empty)
    tensors = (x_scale, factors, out, blocks, order, weights)
    units = _used_blocks(blocks, number) * ((OUTPUTS // 64 + GROUPS - 1) // GROUPS)
    gl.warp_specialize(
        [
            (_multiplying, (0, tensors, memory, limit, units, TOPK, UP, WIDTH, OUTPUTS)),
            (_multiplying, (1, tensors, memory, limit, units, TOPK, UP, WIDTH, OUTPUTS)),
            (_multiplying, (2, tensors, memory, limit, units, TOPK, UP, WIDTH, OUTPUTS)),
            (_fetching, (x, codes, scales, blocks, order, memory, units, TOPK, UP, WIDTH, OUTPUTS)),
        ],
        [4, 4, 4],
        [MULTIPLYING, MULTIPLYING, FETCHING],
    )
    gdc_launch_dependents()


def multiply_blocks(
    x: Tensor,
    x_scale: Tensor,
    matrix: ShuffledMatrix,
    plan: ExpertPlan,
    weights: Tensor | None,
    limit: float,
    out: Tensor,
    *,
    topk: int,
    up: bool,
) -> None:
    """`experts_up` or `experts_down` in exact sums over FP8 rows x [., K] with scales [.], where the plan's blocks have
    at most BLOCK_ROWS rows."""
    launch(
        _experts_hopper,
        (num_sms(x),),
        *(x, x_scale, matrix.codes.view(torch.int32), matrix.scales.view(torch.int32), matrix.factors, out),
        *(plan.blocks, plan.order, weights, limit, len(plan.blocks)),
        TOPK=topk,
        UP=up,
        WIDTH=matrix.columns,
        OUTPUTS=matrix.rows,
        num_warps=4,
        **OVERLAP,
    )
