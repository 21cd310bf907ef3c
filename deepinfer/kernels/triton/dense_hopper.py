"""The FP8 products of `dense.py` for some hundred rows: the same operands, sums and results, in Gluon.

Here tokens are the M side of the tensor core's tile. Two warps bring rows and weights to shared memory (TMA); two or
three groups of four warps multiply 64 tokens each by the same 64 or 128 outputs. A group adds its finished product to
its float32 sums while the tensor core works for the others, so that sums which are broken off every 128 or 256 values
of K cost nothing. A program takes tiles one after the other: the next one is on its way while one is stored.

Programs do not let the next kernel start ahead of time (`overlap.start_next`). Each fills its processor, so all of the
next one's would pile up on the processors without a tile: with it, product and sum of the parts of 192 rows took 20 us,
where the product alone takes 8 on 112 of 132 processors.

The interpreter does not run Gluon; there, `dense._linear_kernel` does the same work. `dense_wide.py` launches.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

PIECE = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))  # 64 tokens or outputs x 128 values of K
LEAVING = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # 64 tokens x 64 outputs, bf16


@gluon.jit
def _place(tile, tiling, HEAD: gl.constexpr, PIECES: gl.constexpr):
    """Tile -> its token tile, the outputs from which its pieces of 64 start, and its part of K. Heads in split order:
    one piece of the even dims, one of the odd ones."""
    _, token_tiles, output_tiles = tiling
    token_tile = tile % token_tiles
    output_tile = tile // token_tiles % output_tiles
    split = tile // (token_tiles * output_tiles)
    if HEAD > 0:
        head = output_tile // (HEAD // 128)
        # Moved on from head to head: otherwise some programs get all the tiles that are rotated.
        first = head * HEAD + (output_tile + head) % (HEAD // 128) * 64
        second = first + HEAD // 2
    else:
        first = output_tile * (64 * PIECES)
        second = first + 64
    return token_tile, first, second, split


@gluon.jit
def _part(split, WIDTH: gl.constexpr, SPLITS: gl.constexpr, CHAIN: gl.constexpr):
    """Part of K -> its first stage and how many there are, in whole chains."""
    chains: gl.constexpr = (WIDTH + 128 * CHAIN - 1) // (128 * CHAIN)
    each: gl.constexpr = (chains + SPLITS - 1) // SPLITS
    first = split * each
    return first * CHAIN, gl.minimum(each, chains - first) * CHAIN


@gluon.jit
def _bring_weights(
    w, weights, tiling, WIDTH: gl.constexpr, HEAD: gl.constexpr, SPLITS: gl.constexpr, CHAIN: gl.constexpr,
    PIECES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights. It does not wait for the kernel in front, which does not write them."""
    buffer, full, empty = weights
    count = 0
    for tile in range(gl.program_id(0), tiling[0], gl.num_programs(0)):
        _, first, second, split = _place(tile, tiling, HEAD, PIECES)
        start, steps = _part(split, WIDTH, SPLITS, CHAIN)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), PIECES * 64 * 128)
            k = (start + step) * 128
            tma.async_copy_global_to_shared(w, [first, k], full.index(stage), buffer.index(PIECES * stage))
            if PIECES == 2:
                tma.async_copy_global_to_shared(w, [second, k], full.index(stage), buffer.index(2 * stage + 1))
            count += 1


@gluon.jit
def _bring_rows(
    x, tokens, tiling, WIDTH: gl.constexpr, SPLITS: gl.constexpr, CHAIN: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads rows."""
    buffer, full, empty = tokens
    gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), tiling[0], gl.num_programs(0)):
        token_tile, _, _, split = _place(tile, tiling, 0, 1)  # tokens and parts are numbered alike for all outputs
        start, steps = _part(split, WIDTH, SPLITS, CHAIN)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), GROUPS * 64 * 128)
            for group in gl.static_range(GROUPS):
                place = [(token_tile * GROUPS + group) * 64, (start + step) * 128]
                tma.async_copy_global_to_shared(x, place, full.index(stage), buffer.index(stage * GROUPS + group))
            count += 1


@gluon.jit
def _prefetch(places):
    """Towards the first-level cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(gl.int64, bitcast=True)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _turn(even, odd, cos, sin, token_start, rows, lane, HEAD: gl.constexpr, ROPE: gl.constexpr):
    """bf16 [64, 64] of even dims and of odd ones, from dim `lane` of each half on: rotated."""
    HALF: gl.constexpr = even.type.layout
    even, odd = even.to(gl.float32), odd.to(gl.float32)
    token = token_start + gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))
    angle = lane - (HEAD // 2 - ROPE) + gl.arange(0, 64, layout=gl.SliceLayout(0, HALF))
    turned = (angle >= 0)[None, :] & (token < rows)[:, None]
    places = token[:, None] * ROPE + angle[None, :]
    c = gl.load(cos + places, mask=turned, other=1.0)
    s = gl.load(sin + places, mask=turned, other=0.0)
    return (even * c - odd * s).to(gl.bfloat16), (even * s + odd * c).to(gl.bfloat16)


@gluon.jit
def _leave(y, out, buffer, token, column):
    """bf16 [64, 64] through shared memory to out[token :, column :], what lies outside of it excepted."""
    gl.thread_barrier()
    buffer.store(y)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [token, column], buffer)


@gluon.jit
def _multiply(
    scale, factor, out, cos, sin, rows, outputs, tokens, weights, leaving, tiling, GROUP: gl.constexpr,
    WIDTH: gl.constexpr, HEAD: gl.constexpr, ROPE: gl.constexpr, SPLITS: gl.constexpr, CHAIN: gl.constexpr,
    GROUPS: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 tokens times all outputs of each tile."""
    OUTPUTS: gl.constexpr = 64 * PIECES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 32])
    tokens_at, tokens_full, tokens_empty = tokens
    weights_at, weights_full, weights_empty = weights
    stacked = weights_at._reinterpret(gl.float8e4nv, [STAGES, OUTPUTS, 128], PIECE)
    zero = gl.zeros([64, OUTPUTS], gl.float32, layout=MMA)
    gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), tiling[0], gl.num_programs(0)):
        token_tile, first, second, split = _place(tile, tiling, HEAD, PIECES)
        _, steps = _part(split, WIDTH, SPLITS, CHAIN)
        token_start = (token_tile * GROUPS + GROUP) * 64
        thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        _prefetch(factor + gl.minimum(gl.where(thread < 64, first, second - 64) + thread, outputs - 1))
        _prefetch(scale + gl.minimum(token_start + thread // 2, rows - 1))
        total = zero
        for _ in range(0, steps, CHAIN):
            product = zero
            for link in gl.static_range(CHAIN):
                stage = (count + link) % STAGES
                mbarrier.wait(weights_full.index(stage), (count + link) // STAGES & 1)
                mbarrier.wait(tokens_full.index(stage), (count + link) // STAGES & 1)
                product = warpgroup_mma(
                    tokens_at.index(stage * GROUPS + GROUP), stacked.index(stage).permute((1, 0)), product,
                    use_acc=link > 0, is_async=True,
                )  # fmt: skip
            for link in gl.static_range(CHAIN):
                product = warpgroup_mma_wait(CHAIN - 1 - link, deps=[product])
                gl.thread_barrier()  # all four warps have read the stage
                mbarrier.arrive(tokens_empty.index((count + link) % STAGES))
                mbarrier.arrive(weights_empty.index((count + link) % STAGES))
            total += product
            count += CHAIN
        # Powers of two: where they are multiplied in changes no bit.
        token = token_start + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        total *= gl.load(scale + token, mask=token < rows, other=0.0)[:, None]
        column = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, MMA))
        output = gl.where(column < 64, first, second - 64) + column
        total *= gl.load(factor + output, mask=output < outputs, other=0.0)[None, :]
        if SPLITS > 1:  # out is float32 [SPLITS, rows, outputs]
            places = out + (split * rows + token).to(gl.int64)[:, None] * outputs + output[None, :]
            gl.store(places, total, mask=(token < rows)[:, None] & (output < outputs)[None, :])
        elif PIECES == 1:
            tma.store_wait(0)
            _leave(total.to(gl.bfloat16), out, leaving.index(GROUP), token_start, first)
        else:
            low, high = gl.split(total.reshape([64, 2, 64]).permute((0, 2, 1)))
            low, high = low.to(gl.bfloat16), high.to(gl.bfloat16)
            if HEAD > 0:
                lane = first % HEAD
                if lane + 64 > HEAD // 2 - ROPE:
                    low, high = _turn(low, high, cos, sin, token_start, rows, lane, HEAD, ROPE)
            tma.store_wait(0)
            _leave(low, out, leaving.index(GROUP * BUFFERS), token_start, first)
            if BUFFERS == 1:
                tma.store_wait(0)
            _leave(high, out, leaving.index(GROUP * BUFFERS + BUFFERS - 1), token_start, second)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "token_tiles", "output_tiles", "tiles"])
def product_kernel(
    x, w, scale, factor, out, cos, sin, rows, outputs, token_tiles, output_tiles, tiles,
    WIDTH: gl.constexpr, HEAD: gl.constexpr, ROPE: gl.constexpr, SPLITS: gl.constexpr, CHAIN: gl.constexpr,
    GROUPS: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    tokens_at = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, 64, 128], PIECE)
    weights_at = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PIECES, 64, 128], PIECE)
    leaving = gl.allocate_shared_memory(gl.bfloat16, [GROUPS * BUFFERS, 64, 64], LEAVING)
    tokens_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tokens_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(tokens_full.index(stage), count=1)
        mbarrier.init(tokens_empty.index(stage), count=GROUPS)
        mbarrier.init(weights_full.index(stage), count=1)
        mbarrier.init(weights_empty.index(stage), count=GROUPS)
    tokens = (tokens_at, tokens_full, tokens_empty)
    weights = (weights_at, weights_full, weights_empty)
    tiling = (tiles, token_tiles, output_tiles)
    # 65,536 registers: of those that 232 or 152 a thread leave, the first group takes the most it can.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (scale, factor, out, cos, sin, rows, outputs, tokens, weights, leaving, tiling, 0,
                             WIDTH, HEAD, ROPE, SPLITS, CHAIN, GROUPS, PIECES, STAGES, BUFFERS)),
                (_multiply, (scale, factor, out, cos, sin, rows, outputs, tokens, weights, leaving, tiling, 1,
                             WIDTH, HEAD, ROPE, SPLITS, CHAIN, GROUPS, PIECES, STAGES, BUFFERS)),
                (_bring_weights, (w, weights, tiling, WIDTH, HEAD, SPLITS, CHAIN, PIECES, STAGES)),
                (_bring_rows, (x, tokens, tiling, WIDTH, SPLITS, CHAIN, GROUPS, STAGES)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (scale, factor, out, cos, sin, rows, outputs, tokens, weights, leaving, tiling, 0,
                             WIDTH, HEAD, ROPE, SPLITS, CHAIN, GROUPS, PIECES, STAGES, BUFFERS)),
                (_multiply, (scale, factor, out, cos, sin, rows, outputs, tokens, weights, leaving, tiling, 1,
                             WIDTH, HEAD, ROPE, SPLITS, CHAIN, GROUPS, PIECES, STAGES, BUFFERS)),
                (_multiply, (scale, factor, out, cos, sin, rows, outputs, tokens, weights, leaving, tiling, 2,
                             WIDTH, HEAD, ROPE, SPLITS, CHAIN, GROUPS, PIECES, STAGES, BUFFERS)),
                (_bring_weights, (w, weights, tiling, WIDTH, HEAD, SPLITS, CHAIN, PIECES, STAGES)),
                (_bring_rows, (x, tokens, tiling, WIDTH, SPLITS, CHAIN, GROUPS, STAGES)),
            ],
            [4, 4, 1, 1],
            [152, 152, 40, 40],
        )  # fmt: skip
