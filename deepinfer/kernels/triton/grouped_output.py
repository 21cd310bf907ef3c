"""The first half of the output projection: heads turned back, each group through its wo_a (specification 2.4, 5 and 6).

The release multiplies bf16 outputs with wo_a widened to bf16. Here wo_a stays FP8 in memory and is widened on its way
into the tensor core; its power-of-two row factors follow the sum, so the product is that of the widened matrix. Few
rows: one launch that turns the heads as it reads them. Many: turned in place, and the library's product with a matrix
that was widened whole.

Two things decide how the columns of wo_a are stored (`column_order`). What is turned comes last of a head, so that the
rest is one loop over whole 128 bytes. And a thread of the tensor core needs, of every 16 columns, two and the two that
lie 8 further on: what it needs of 64 lies together, one shared-memory load where there would be eight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.dense import add_parts
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, quantize_rows, to_type
from deepinfer.kernels.triton.rope import rope_split_, split_order
from deepinfer.kernels.triton.runtime import INTERPRET, launch

RUN = 64  # columns that are reordered among themselves; the last so many of both halves of a head may be turned
LIBRARY_ROWS = 512  # from here on a widened copy of wo_a (64 MiB a layer, made anew each time) pays
FUSED_ROWS = 64  # up to here the cosines of a tile fit into registers


def column_order(head_dim: int) -> Tensor:
    """int64 [head_dim]: which natural dim of its head each stored column of wo_a belongs to. head_dim: a multiple of
    128. In split order, the last run of 64 of both halves goes to the end; then every run is reordered."""
    if head_dim % (2 * RUN):
        raise ValueError(f"head_dim {head_dim} is not a multiple of {2 * RUN}")
    even, odd = split_order(head_dim).view(2, -1)
    columns = torch.cat((even[:-RUN], odd[:-RUN], even[-RUN:], odd[-RUN:]))
    # A run as [product of 4, half, thread of 4, two columns] is stored as [thread, product, half, two columns].
    run = torch.arange(RUN).view(4, 2, 4, 2).permute(2, 0, 1, 3).flatten()
    return columns.view(-1, RUN)[:, run].flatten()


class Tile(NamedTuple):
    """outputs x tokens of a program, the parts that the heads of a group are cut into, stages, warps."""

    outputs: int
    tokens: int
    splits: int
    stages: int
    warps: int


def choose_tile(rows: int, rank: int, heads: int) -> Tile:
    """rank outputs from `heads` heads a group. From measurements on an H200; `splits` does not look at the rows."""
    tokens = max(16, triton.next_power_of_2(rows))
    return Tile(min(128, triton.next_power_of_2(rank)), min(tokens, 64), 2 if heads % 2 == 0 else 1, 4, 8)


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
    o, w, factor, out, cos, sin, rows,
    RANK: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, GROUPS: tl.constexpr, ROPE: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_previous()
    token_tile, output_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles: tl.constexpr = (RANK + OUTPUTS - 1) // OUTPUTS  # of a group
    group = output_tile // tiles
    place = (output_tile % tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = group * RANK + place
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    here = token[None, :] < rows
    within = (place < RANK)[:, None]
    each: tl.constexpr = HEADS // SPLITS
    w_rows = w + (output.to(tl.int64) * (HEADS * HEAD) + split * each * HEAD)[:, None]
    o_rows = o + ((token.to(tl.int64) * GROUPS + group) * HEADS + split * each)[None, :] * HEAD
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)

    half: tl.constexpr = HEAD // 2
    plain: tl.constexpr = HEAD - 2 * RUN  # columns of a head before those that may be turned, of both halves
    steps: tl.constexpr = plain // (2 * RUN)
    per_head: tl.constexpr = steps if steps > 0 else 1
    k = tl.arange(0, 2 * RUN)
    for step in range(each * steps):
        column = step // per_head * HEAD
        stored = step % per_head * (2 * RUN) + k
        dim = stored + tl.where(stored >= plain // 2, RUN, 0)  # the odd half begins behind the whole even one
        dim = tl.max_contiguous(tl.multiple_of(dim, RUN), RUN)
        weights = tl.load(w_rows + column + stored[None, :], mask=within, other=0.0)
        values = tl.load(o_rows + column + dim[:, None], mask=here, other=0.0)
        total = _add_product(weights, values, total, OUTPUTS, 2 * RUN)

    lane = tl.arange(0, RUN)
    if ROPE:
        angle = lane[:, None] - (RUN - ROPE)
        turned = here & (angle >= 0)
        c = tl.load(cos + token[None, :] * ROPE + angle, mask=turned, other=1.0)
        s = tl.load(sin + token[None, :] * ROPE + angle, mask=turned, other=0.0)
    for head in tl.range(0, each, num_stages=2):
        left = tl.load(o_rows + head * HEAD + (half - RUN) + lane[:, None], mask=here, other=0.0)
        right = tl.load(o_rows + head * HEAD + (HEAD - RUN) + lane[:, None], mask=here, other=0.0)
        if ROPE:
            even, odd = left.to(tl.float32), right.to(tl.float32)
            left = to_type(even * c + odd * s, o.dtype.element_ty)
            right = to_type(odd * c - even * s, o.dtype.element_ty)
        for_left = tl.load(w_rows + head * HEAD + plain + lane[None, :], mask=within, other=0.0)
        for_right = tl.load(w_rows + head * HEAD + plain + RUN + lane[None, :], mask=within, other=0.0)
        total = _add_product(for_left, left, total, OUTPUTS, RUN)
        total = _add_product(for_right, right, total, OUTPUTS, RUN)

    total *= tl.load(factor + output, mask=place < RANK, other=0.0)[:, None]
    width: tl.constexpr = GROUPS * RANK
    if SPLITS > 1:  # out is float32 [SPLITS, rows, width]
        out += split * rows.to(tl.int64) * width
    offsets = token.to(tl.int64)[None, :] * width + output[:, None]
    tl.store(out + offsets, to_type(total, out.dtype.element_ty), mask=within & here)


@triton.jit
def _widen_kernel(codes, factor, out, WIDTH: tl.constexpr, HEAD: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr):
    start_next()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    v = _in_order(tl.load(codes + row * WIDTH + column, mask=inside, other=0.0), 1, BLOCK)
    v = v.to(tl.float32) * tl.load(factor + row)
    dim = column % HEAD
    plain: tl.constexpr = HEAD // 2 - RUN  # of a half
    tail = dim - 2 * plain  # from 0 on: the last runs of both halves
    dim = tl.where(tail < 0, dim + tl.where(dim >= plain, RUN, 0), plain + tail + tl.where(tail >= RUN, plain, 0))
    dim = tl.max_contiguous(tl.multiple_of(dim, (1, RUN)), (1, RUN))
    # Exact: a power of two times 4 digits.
    tl.store(out + row * WIDTH + column // HEAD * HEAD + dim, v.to(tl.bfloat16), mask=inside)


def widen(codes: Tensor, factors: Tensor, head_dim: int) -> Tensor:
    """e4m3 codes [N, K], columns as stored, with power-of-two factors float32 [N] -> bf16 [N, K] in split order."""
    rows, width = codes.shape
    out = codes.new_empty(rows, width, dtype=torch.bfloat16)
    block = min(4096, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    sizes = {"WIDTH": width, "HEAD": head_dim, "RUN": RUN, "BLOCK": block}
    launch(_widen_kernel, grid, codes, factors, out, **sizes, num_warps=4, **OVERLAP)
    return out


def _product(
    o: Tensor, codes: Tensor, factors: Tensor, turn: tuple[Tensor, Tensor] | None, groups: int, tile: Tile
) -> Tensor:
    """bf16 [N, groups * rank], or float32 [splits, N, groups * rank]. turn: cos, sin; None for heads turned already."""
    rows, heads, head_dim = o.shape
    rank = len(codes) // groups
    if tile.splits > 1:
        out = o.new_empty(tile.splits, rows, len(codes), dtype=torch.float32)
    else:
        out = o.new_empty(rows, len(codes), dtype=torch.bfloat16)
    cos, sin = turn if turn is not None else (factors, factors)
    launch(
        _grouped_kernel,
        (triton.cdiv(rows, tile.tokens), groups * triton.cdiv(rank, tile.outputs), tile.splits),
        *(o, codes, factors, out, cos, sin, rows),
        RANK=rank,
        HEADS=heads // groups,
        HEAD=head_dim,
        GROUPS=groups,
        ROPE=cos.shape[-1] if turn is not None else 0,
        OUTPUTS=tile.outputs,
        TOKENS=tile.tokens,
        SPLITS=tile.splits,
        RUN=RUN,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,  # a rotation rounds as the reference does
        **OVERLAP,
    )
    return out


def split_sums(
    o: Tensor, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, groups: int, *, invariant: bool = False
) -> Tensor:
    """`grouped_output` for a reader that adds (`quantize_rows`): float32 [splits, N, groups * rank] where K is cut,
    else its bf16 [N, groups * rank]."""
    rows, heads = o.shape[:2]
    tile = choose_tile(rows, len(codes) // groups, heads // groups)
    if rows <= FUSED_ROWS and cos.shape[-1] <= RUN:
        return _product(o, codes, factors, (cos, sin), groups, tile)
    rope_split_(o, cos, sin, inverse=True)
    if not o.is_cuda or rows < LIBRARY_ROWS or invariant:
        return _product(o, codes, factors, None, groups, tile)
    return library_product(o, codes, factors, groups)


def grouped_output(
    o: Tensor, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, groups: int, *, invariant: bool = False
) -> Tensor:
    """o bf16 [N, heads, head_dim] in split order, contiguous (may be overwritten), turned back by cos, sin float32 [N,
    rope_dim / 2] and rounded to bf16, then each group of heads through its wo_a -> bf16 [N, groups * rank].

    codes e4m3 [groups * rank, heads / groups * head_dim], columns in `column_order` per head, factors float32 [groups *
    rank] (`quantize.fold_fp8`). invariant: a row's bits do not depend on N (otherwise they change at LIBRARY_ROWS).
    """
    out = split_sums(o, codes, factors, cos, sin, groups, invariant=invariant)
    return add_parts(out) if out.dim() == 3 else out


def grouped_rows(
    o: Tensor, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, groups: int, *, invariant: bool = False
) -> Fp8Rows:
    """Q8 of `grouped_output`, what wo_b multiplies, without a pass over it in between."""
    return quantize_rows(split_sums(o, codes, factors, cos, sin, groups, invariant=invariant))


def library_product(o: Tensor, codes: Tensor, factors: Tensor, groups: int) -> Tensor:
    """The second step alone, for heads that are turned back already, on a widened matrix: bf16 [N, groups * rank]."""
    z = o.new_empty(len(o), groups, len(codes) // groups)
    weights = widen(codes, factors, o.shape[2]).unflatten(0, (groups, -1))  # [groups, rank, K]
    torch.bmm(o.view(len(o), groups, -1).transpose(0, 1), weights.transpose(1, 2), out=z.transpose(0, 1))
    return z.flatten(1)
