"""The first half of the output projection: heads turned back, each group through its wo_a (specification 2.4, 5 and 6).

The release multiplies bf16 outputs with wo_a widened to bf16. Here wo_a stays FP8 in memory and is widened on its way
into the tensor core; its power-of-two row factors follow the sum, so the product is that of the widened matrix. Many
rows: the library's product with a matrix that was widened whole, for this call or once at load.

Turning the heads inside the product was tried: its operand then goes through registers and is turned again by every
tile of outputs. At 1 and 64 rows that took 20 and 26 us with the Q8 behind it; in a launch of its own it is 16 and 21.

A thread of the tensor core needs, of every 16 columns, two and the two that lie 8 further on. Columns are stored so
that what it needs of 64 lies together, 16 bytes: one shared-memory load where there would be eight (`column_order`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.dense import Tile, add_parts
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows, quantize_rows, to_type
from deepinfer.kernels.triton.rope import rope_split_, split_order
from deepinfer.kernels.triton.runtime import INTERPRET, launch

RUN = 64  # columns that are reordered among themselves
WIDENED_ROWS = 512  # from here on a widened copy of wo_a (64 MiB), made for one product, pays
KEPT_ROWS = 96  # and from here on one that is kept


def column_order(head_dim: int) -> Tensor:
    """int64 [head_dim]: which natural dim of its head each stored column of wo_a belongs to: the split order, every run
    of 64 reordered. head_dim: a multiple of 128."""
    if head_dim % (2 * RUN):
        raise ValueError(f"head_dim {head_dim} is not a multiple of {2 * RUN}")
    # A run as [product of 4, half, thread of 4, two columns] is stored as [thread, product, half, two columns].
    run = torch.arange(RUN).view(4, 2, 4, 2).permute(2, 0, 1, 3).flatten()
    return split_order(head_dim).view(-1, RUN)[:, run].flatten()


def choose_tile(rows: int, rank: int, width: int, invariant: bool) -> Tile:
    """rank outputs from `width` values a group. From measurements on an H200. Only `splits` changes the order in which
    terms are added; with `invariant` it does not look at the rows."""
    outputs = min(64, triton.next_power_of_2(rank))
    cut = 2 if width >= 1024 and width % 512 == 0 else 1
    if rows > 64:  # three programs share a processor: 60 KB of shared memory each
        return Tile(outputs, 128, RUN, cut if invariant or rows <= 256 else 1, 3, 4)
    tokens = max(16, triton.next_power_of_2(rows))
    return Tile(outputs, tokens, 256 if tokens == 16 and width % (256 * cut) == 0 else 128, cut, 4, 4)


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


@triton.jit(do_not_specialize=["rows"])  # one kernel for every number of rows
def _grouped_kernel(
    o, w, factor, out, rows, RANK: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    token_tile, output_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles: tl.constexpr = (RANK + OUTPUTS - 1) // OUTPUTS  # of a group
    group = output_tile // tiles
    place = (output_tile % tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = group * RANK + place
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    here = token[None, :] < rows
    within = (place < RANK)[:, None]
    k = split * (WIDTH // SPLITS) + tl.arange(0, DEPTH)
    w_places = w + output.to(tl.int64)[:, None] * WIDTH + k[None, :]
    o_places = o + (token.to(tl.int64) * GROUPS + group)[None, :] * WIDTH + k[:, None]
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
    for _ in range(WIDTH // SPLITS // DEPTH):
        stored = tl.load(w_places, mask=within, other=0.0)
        values = tl.load(o_places, mask=here, other=0.0)
        weights = _in_order(stored, OUTPUTS, DEPTH)
        if INTERPRET:
            total = tl.dot(_widened(weights), values.to(tl.float32), total)
        else:
            total = tl.dot(_widened(weights), values, total)
            _finished()
        w_places += DEPTH
        o_places += DEPTH
    start_next()
    total *= tl.load(factor + output, mask=place < RANK, other=0.0)[:, None]
    width: tl.constexpr = GROUPS * RANK
    if SPLITS > 1:  # out is float32 [SPLITS, rows, width]
        out += split * rows.to(tl.int64) * width
    offsets = token.to(tl.int64)[None, :] * width + output[:, None]
    tl.store(out + offsets, to_type(total, out.dtype.element_ty), mask=within & here)


@triton.jit
def _widen_kernel(codes, factor, out, width, BLOCK: tl.constexpr):
    wait_for_previous()
    start_next()
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
    grid = (rows, triton.cdiv(width, block))
    launch(_widen_kernel, grid, codes, factors, out, width, BLOCK=block, num_warps=4, **OVERLAP)
    return out


def _product(o: Tensor, codes: Tensor, factors: Tensor, groups: int, tile: Tile) -> Tensor:
    """Of heads that are turned back: bf16 [N, groups * rank], or float32 [splits, N, groups * rank]."""
    rows, (outputs, width) = len(o), codes.shape
    rank = outputs // groups
    if tile.splits > 1:
        out = o.new_empty(tile.splits, rows, outputs, dtype=torch.float32)
    else:
        out = o.new_empty(rows, outputs, dtype=torch.bfloat16)
    launch(
        _grouped_kernel,
        (triton.cdiv(rows, tile.tokens), groups * triton.cdiv(rank, tile.outputs), tile.splits),
        *(o, codes, factors, out, rows),
        RANK=rank,
        WIDTH=width,
        GROUPS=groups,
        OUTPUTS=tile.outputs,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        SPLITS=tile.splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAP,
    )
    return out


def split_sums(
    o: Tensor, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, groups: int, *,
    wide: Tensor | None = None, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """`grouped_output` for a reader that adds (`quantize_rows`): float32 [splits, N, groups * rank] where K is cut,
    else its bf16 [N, groups * rank]."""
    rope_split_(o, cos, sin, inverse=True)
    if o.is_cuda and len(o) >= (WIDENED_ROWS if wide is None else KEPT_ROWS) and not invariant:
        return library_product(o, widen(codes, factors) if wide is None else wide, groups)
    return _product(o, codes, factors, groups, choose_tile(len(o), len(codes) // groups, codes.shape[1], invariant))


def grouped_output(
    o: Tensor, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, groups: int, *,
    wide: Tensor | None = None, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """o bf16 [N, heads, head_dim] in split order, contiguous (turned in place), turned back by cos, sin float32 [N,
    rope_dim / 2] and rounded to bf16, then each group of heads through its wo_a -> bf16 [N, groups * rank].

    codes e4m3 [groups * rank, heads / groups * head_dim], columns in `column_order` per head, factors float32 [groups *
    rank] (`quantize.fold_fp8`). wide: `widen` of both where there is room to keep it, for 96 rows and more (at 384 rows
    37 instead of 56 us). invariant: a row's bits do not depend on N.
    """
    out = split_sums(o, codes, factors, cos, sin, groups, wide=wide, invariant=invariant)
    return add_parts(out) if out.dim() == 3 else out


def grouped_rows(
    o: Tensor, codes: Tensor, factors: Tensor, cos: Tensor, sin: Tensor, groups: int, *,
    wide: Tensor | None = None, invariant: bool = False,
) -> Fp8Rows:  # fmt: skip
    """Q8 of `grouped_output`, what wo_b multiplies, without a pass over it in between."""
    return quantize_rows(split_sums(o, codes, factors, cos, sin, groups, wide=wide, invariant=invariant))


def library_product(o: Tensor, wide: Tensor, groups: int) -> Tensor:
    """The second step alone: heads that are turned back already times a widened matrix, bf16 [N, groups * rank]."""
    z = o.new_empty(len(o), groups, len(wide) // groups)
    weights = wide.unflatten(0, (groups, -1))  # [groups, rank, K]
    torch.bmm(o.view(len(o), groups, -1).transpose(0, 1), weights.transpose(1, 2), out=z.transpose(0, 1))
    return z.flatten(1)
