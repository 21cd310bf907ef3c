"""FP8 products for some hundred rows (128 to 512 of a verify step): which tile, and the launch of `dense_hopper.py`.

Operands come from the second-level cache at 10 TB/s at most (measured on an H200), which is what tiles of 128 x 128
need at full rate. Keeping a tile's weights for all tokens halves that and was slower (37 us instead of 33 for wq_b at
384 rows): it leaves too few stages for the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepinfer.kernels.triton.dense_hopper import LEAVING, PIECE, product_kernel
from deepinfer.kernels.triton.overlap import OVERLAP
from deepinfer.kernels.triton.quantize import Fp8Rows
from deepinfer.kernels.triton.runtime import INTERPRET, NUM_SMS, launch

DEPTH = 128  # values of K of a stage in shared memory: one line of its swizzle
SIDE = 64  # tokens or outputs that one transfer brings
_SHARED_BYTES = 227 * 1024 - 768  # of a program, less its barriers


class WideTile(NamedTuple):
    """A tile of 64 * groups tokens x 64 * pieces outputs."""

    groups: int  # 2 or 3, of four warps each
    pieces: int  # 1 or 2


TILES = WideTile(3, 2), WideTile(2, 2), WideTile(2, 1)


def choose_wide(rows: int, outputs: int, splits: int, *, halves: bool = False) -> WideTile:
    """The tile whose rounds over all processors multiply least; of equal ones the largest, which reads least. Of the
    three, the fastest or within 6 % of it for the released model's matrices at 96 to 512 rows on an H200. halves: of
    those with two pieces, which a rotation needs; so for many outputs, where all rounds but the last are full."""

    def work(tile: WideTile) -> int:
        tiles = triton.cdiv(rows, SIDE * tile.groups) * triton.cdiv(outputs, SIDE * tile.pieces) * splits
        return triton.cdiv(tiles, NUM_SMS) * tile.groups * tile.pieces

    return min(TILES[:2] if halves or outputs >= 128 * NUM_SMS else TILES, key=work)


def serves(codes: Tensor, depth: int) -> bool:
    """Whether a weight [N, K] can be multiplied here: on a Hopper GPU (or compiled for one), in whole tiles. depth: as
    `wide_product` takes it."""
    outputs, width = codes.shape
    if INTERPRET.value or width % depth or depth % DEPTH or outputs % (2 * SIDE):
        return False
    return not codes.is_cuda or torch.cuda.get_device_capability(codes.device)[0] == 9


def wide_product(
    rows: Fp8Rows, codes: Tensor, factors: Tensor, tile: WideTile, *, depth: int, splits: int,
    turn: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:  # fmt: skip
    """As `dense._product`. depth: values of K that the tensor core adds by itself, a multiple of 128; splits: parts of
    K. Both alone decide over the bits of a row."""
    (count, width), outputs = rows.codes.shape, codes.shape[0]
    cos, sin, head = turn if turn is not None else (factors, factors, 0)
    buffers = tile.pieces if tile.groups == 2 else 1  # of 8 KB for a group's output: else a stage less
    stages = (_SHARED_BYTES - tile.groups * buffers * 8192) // (sum(tile) * SIDE * DEPTH)
    if splits > 1:
        out = factors.new_empty(splits, count, outputs)
        to = out
    else:
        out = factors.new_empty(count, outputs, dtype=torch.bfloat16)
        to = TensorDescriptor.from_tensor(out, [SIDE, SIDE], LEAVING.value)
    x = TensorDescriptor.from_tensor(rows.codes, [SIDE, DEPTH], PIECE.value)
    w = TensorDescriptor.from_tensor(codes, [SIDE, DEPTH], PIECE.value)
    token_tiles, output_tiles = triton.cdiv(count, SIDE * tile.groups), triton.cdiv(outputs, SIDE * tile.pieces)
    tiles = token_tiles * output_tiles * splits
    launch(
        product_kernel,
        (min(tiles, NUM_SMS),),
        *(x, w, rows.scale, factors, to, cos, sin, count, outputs, token_tiles, output_tiles, tiles),
        WIDTH=width,
        HEAD=head,
        ROPE=cos.shape[-1] if head else 0,
        SPLITS=splits,
        CHAIN=depth // DEPTH,
        GROUPS=tile.groups,
        PIECES=tile.pieces,
        STAGES=stages,
        BUFFERS=buffers,
        num_warps=4,
        enable_fp_fusion=False,  # a rotation rounds as the reference does
        **OVERLAP,
    )
    return out
