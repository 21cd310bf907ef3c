"""The first half of the output projection: heads turned back, each group through its wo_a (specification 2.4, 5 and 6).

The release multiplies bf16 outputs with wo_a widened to bf16. Here wo_a stays FP8 in memory and is widened on its way
into the tensor core; its power-of-two row factors follow the sum, so the product is that of the widened matrix. Few
rows: one launch that turns the heads as it reads them. Many: turned in place, and the library's product with a matrix
that was widened whole.

A thread of the tensor core needs, of every 16 columns, two and the two that lie 8 further on. Columns are stored so
that what it needs of 64 lies together, 16 bytes: one shared-memory load where there would be eight (`column_order`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.dense import arrivals
from deepinfer.kernels.triton.overlap import OVERLAP, prefetch, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.rope import rope_split_, split_order
from deepinfer.kernels.triton.runtime import INTERPRET, launch

RUN = 64  # columns that are reordered among themselves
LIBRARY_ROWS = 512  # from here on a widened copy of wo_a (64 MiB a layer, made anew each time) pays
FUSED_ROWS = 64  # up to here the cosines of a tile fit into registers


def column_order(head_dim: int) -> Tensor:
    """int64 [head_dim]: which natural dim of its head each stored column of wo_a belongs to. head_dim: a multiple of
    128, so that both halves of the split order are whole runs of 64."""
    if head_dim % (2 * RUN):
        raise ValueError(f"head_dim {head_dim} is not a multiple of {2 * RUN}")
    # A run as [product of 4, half, thread of 4, two columns] is stored as [thread, product, half, two columns].
    run = torch.arange(RUN).view(4, 2, 4, 2).permute(2, 0, 1, 3).flatten()
    return split_order(head_dim).view(-1, RUN)[:, run].flatten()


class Tile(NamedTuple):
    """outputs x tokens x K of a program's step, the parts that the heads of a group are cut into, warps, stages."""

    outputs: int
    tokens: int
    depth: int
    splits: int
    stages: int
    warps: int


def choose_tile(rows: int, rank: int, heads: int) -> Tile:
    """rank outputs from `heads` heads a group. From measurements on an H200; `splits` and `depth` do not look at the
    rows."""
    tokens = min(max(16, triton.next_power_of_2(rows)), 128)
    outputs = min(128, triton.next_power_of_2(rank))
    return Tile(outputs, tokens, RUN, 2 if heads % 2 == 0 else 1, 4, 4)


@triton.jit
def _finished():
    """Waits until the tensor core has read its operands: Triton keeps a product in flight into the next round of a
    loop, which may then overwrite the registers that weights are taken from (seen as wrong sums at large tiles)."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;",
            "=r,r",
            [tl.arange(0, 128)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _widened(codes):
    """e4m3 -> bfloat16, exact: sign, exponent and mantissa are moved to their places, times 2^120 for the difference of
    the exponents' biases (127 - 7). Five instructions for two values; the hardware's conversion goes through float16 at
    a quarter of the rate."""
    if INTERPRET:
        return codes.to(tl.float32)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.b32 c, a, 4;
        shr.b32 d, b, 4;
        and.b32 c, c, 0x07f007f0;
        and.b32 d, d, 0x07f007f0;
        lop3.b32 a, a, 0x80008000, c, 0xea;
        lop3.b32 b, b, 0x80008000, d, 0xea;
        mov.b32 c, 0x7b807b80;
        mul.rn.bf16x2 $0, a, c;
        mul.rn.bf16x2 $1, b, c;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _in_order(stored, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] as stored -> columns in split order. In a product it moves nothing: names of registers change."""
    runs = tl.reshape(stored, (ROWS, WIDTH // 64, 4, 4, 2, 2))
    return tl.reshape(tl.permute(runs, (0, 1, 3, 4, 2, 5)), (ROWS, WIDTH))


@triton.jit
def _add_product(stored, values, total, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """total += e4m3 [outputs, K], columns as stored, times bf16 [K, tokens]."""
    weights = _in_order(stored, OUTPUTS, DEPTH)
    if INTERPRET:
        return tl.dot(_widened(weights), values.to(tl.float32), total)
    total = tl.dot(_widened(weights), values, total)
    _finished()
    return total


@triton.jit(do_not_specialize=["rows"])  # one kernel for every number of rows
def _grouped_kernel(
    o, w, factor, out, parts, arrived, cos, sin, rows,
    RANK: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, GROUPS: tl.constexpr, ROPE: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    start_next()
    token_tile, output_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles: tl.constexpr = (RANK + OUTPUTS - 1) // OUTPUTS  # of a group
    group = output_tile // tiles
    place = (output_tile % tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = group * RANK + place
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    here = token[None, :] < rows
    within = (place < RANK)[:, None]
    each: tl.constexpr = HEADS // SPLITS
    half: tl.constexpr = HEAD // 2
    k = tl.arange(0, DEPTH)
    w_rows = w + output.to(tl.int64) * (HEADS * HEAD) + split * each * HEAD
    w_places = w_rows[:, None] + k[None, :]
    o_places = o + (token.to(tl.int64) * (GROUPS * HEADS) + group * HEADS + split * each)[None, :] * HEAD + k[:, None]
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
    if AHEAD > 0:  # the first weights are on their way while the kernel before still runs
        prefetch(w_rows, AHEAD)
    wait_for_previous()

    plain: tl.constexpr = half // DEPTH - 1 if ROPE else half // DEPTH  # steps of a half head that nothing turns
    per_half: tl.constexpr = plain if plain > 0 else 1
    for step in range(2 * each * plain):
        column = step // per_half * half + step % per_half * DEPTH
        if RANK % OUTPUTS == 0:
            weights = tl.load(w_places + column)
        else:
            weights = tl.load(w_places + column, mask=within, other=0.0)
        total = _add_product(weights, tl.load(o_places + column, mask=here, other=0.0), total, OUTPUTS, DEPTH)

    if ROPE:
        angle = k[:, None] - (DEPTH - ROPE)  # the last DEPTH places of both halves; those before the last ROPE stay
        turned = here & (angle >= 0)
        c = tl.load(cos + token[None, :] * ROPE + angle, mask=turned, other=1.0)
        s = tl.load(sin + token[None, :] * ROPE + angle, mask=turned, other=0.0)
        for head in range(each):
            column = head * HEAD + half - DEPTH
            even = tl.load(o_places + column, mask=here, other=0.0).to(tl.float32)
            odd = tl.load(o_places + column + half, mask=here, other=0.0).to(tl.float32)
            left = to_type(even * c + odd * s, o.dtype.element_ty)
            right = to_type(odd * c - even * s, o.dtype.element_ty)
            total = _add_product(tl.load(w_places + column, mask=within, other=0.0), left, total, OUTPUTS, DEPTH)
            total = _add_product(
                tl.load(w_places + column + half, mask=within, other=0.0), right, total, OUTPUTS, DEPTH
            )

    total *= tl.load(factor + output, mask=place < RANK, other=0.0)[:, None]
    inside = within & here
    width: tl.constexpr = GROUPS * RANK
    offsets = token.to(tl.int64)[None, :] * width + output[:, None]
    if SPLITS > 1:
        size = rows.to(tl.int64) * width
        tl.store(parts + split * size + offsets, total, mask=inside)
        tl.debug_barrier()  # all threads' stores, before one thread tells of them
        counter = arrived + output_tile * tl.num_programs(0) + token_tile
        if tl.atomic_add(counter, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counter, 0)  # as the next product expects it
        total = tl.load(parts + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            total += tl.load(parts + other * size + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(out + offsets, to_type(total, out.dtype.element_ty), mask=inside)


@triton.jit
def _widen_kernel(codes, factor, out, width, BLOCK: tl.constexpr):
    start_next()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < width
    v = _in_order(tl.load(codes + row * width + column, mask=inside, other=0.0), 1, BLOCK)
    v = v.to(tl.float32) * tl.load(factor + row)
    tl.store(out + row * width + column, v.to(tl.bfloat16), mask=inside)  # exact: a power of two times 4 digits


def widen(codes: Tensor, factors: Tensor) -> Tensor:
    """e4m3 codes [N, K], columns as stored, with power-of-two factors float32 [N] -> bf16 [N, K] in split order."""
    rows, width = codes.shape
    out = codes.new_empty(rows, width, dtype=torch.bfloat16)
    block = min(4096, triton.next_power_of_2(width))
    launch(
        _widen_kernel,
        (rows, triton.cdiv(width, block)),
        codes,
        factors,
        out,
        width,
        BLOCK=block,
        num_warps=4,
        **OVERLAP,
    )
    return out


def _launch(
    o: Tensor,
    codes: Tensor,
    factors: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    groups: int,
    tile: Tile,
    ahead: int = 512,
    pdl: bool = True,
) -> Tensor:
    rows, heads, head_dim = o.shape
    rank = len(codes) // groups
    out = o.new_empty(rows, len(codes), dtype=torch.bfloat16)
    grid = (triton.cdiv(rows, tile.tokens), groups * triton.cdiv(rank, tile.outputs), tile.splits)
    parts, counters = out, out
    if tile.splits > 1:
        parts = o.new_empty(tile.splits, rows, len(codes), dtype=torch.float32)
        counters = arrivals(o, grid[0] * grid[1])
    cos, sin = turn if turn is not None else (factors, factors)
    launch(
        _grouped_kernel,
        grid,
        *(o, codes, factors, out, parts, counters, cos, sin, rows),
        RANK=rank,
        HEADS=heads // groups,
        HEAD=head_dim,
        GROUPS=groups,
        ROPE=cos.shape[-1] if turn is not None else 0,
        OUTPUTS=tile.outputs,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        SPLITS=tile.splits,
        AHEAD=ahead if rank % tile.outputs == 0 else 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,  # a rotation rounds as the reference does
        **(OVERLAP if pdl else {}),
    )
    return out


def grouped_output(
    o: Tensor, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, groups: int, *, invariant: bool = False
) -> Tensor:
    """o bf16 [N, heads, head_dim] in split order, contiguous (may be overwritten), turned back by cos, sin float32 [N,
    rope_dim / 2] and rounded to bf16, then each group of heads through its wo_a -> bf16 [N, groups * rank].

    codes e4m3 [groups * rank, heads / groups * head_dim], columns in `column_order` per head, factors float32 [groups *
    rank] (`quantize.fold_fp8`). invariant: a row's bits do not depend on N (otherwise they change at LIBRARY_ROWS).
    """
    rows, heads = o.shape[:2]
    tile = choose_tile(rows, len(codes) // groups, heads // groups)
    if rows <= FUSED_ROWS and cos.shape[-1] <= tile.depth:
        return _launch(o, codes, factors, (cos, sin), groups, tile)
    rope_split_(o, cos, sin, inverse=True)
    if not o.is_cuda or rows < LIBRARY_ROWS or invariant:
        return _launch(o, codes, factors, None, groups, tile)
    return library_product(o, codes, factors, groups)


def library_product(o: Tensor, codes: Tensor, factors: Tensor, groups: int) -> Tensor:
    """The second step alone, for heads that are turned back already, on a widened matrix: bf16 [N, groups * rank]."""
    z = o.new_empty(len(o), groups, len(codes) // groups)
    weights = widen(codes, factors).unflatten(0, (groups, -1))  # [groups, rank, K]
    torch.bmm(o.view(len(o), groups, -1).transpose(0, 1), weights.transpose(1, 2), out=z.transpose(0, 1))
    return z.flatten(1)
