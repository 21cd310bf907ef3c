"""FP8 operands with one scale per row: activations on their way into a matrix product, dense weights at load.

The release scales activations per 32 values and dense weights per 32 x 32 tile, always by powers of two (model
specification 2.0). A power of two only moves exponents, so all scales of a row may be moved into its e4m3 codes, which
then differ from the definition only where a code falls among e4m3's denormals (relative change of an operand below
1e-6), and the product needs one scale per row and per column behind the sum over K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.quant import FP8_GROUP, FP8_MAX, WEIGHT_TILE, e8m0_to_float
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.runtime import INTERPRET, launch

_GROUP = tl.constexpr(FP8_GROUP)
_FP8_MAX = tl.constexpr(FP8_MAX)


class Fp8Rows(NamedTuple):
    """Rows as an FP8 product takes them: value [n, k] = codes[n, k] * scale[n]."""

    codes: Tensor  # e4m3 [N, K]
    scale: Tensor  # float32 [N], powers of two

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        return self.codes.float() * self.scale.unsqueeze(-1)


def fold_groups(codes: Tensor, scale: Tensor) -> Fp8Rows:
    """e4m3 codes [N, K] with a power of two per group, float32 [N, K / 32], to the largest scale of each row. Plain
    torch: what `quantize_rows` gives, written down."""
    top = scale.amax(-1)  # [N]
    moved = codes.float().unflatten(-1, (scale.shape[-1], -1)) * (scale / top.unsqueeze(-1)).unsqueeze(-1)
    return Fp8Rows(moved.flatten(-2).to(torch.float8_e4m3fn), top)


def fold_fp8(codes: Tensor, tile_scales: Tensor) -> tuple[Tensor, Tensor, int]:
    """A dense weight at load: e4m3 codes [N, K], E8M0 scales [ceil(N / 32), ceil(K / 32)] -> e4m3 codes [N, K], factors
    float32 [N] (powers of two) and how many values changed.

    A row's factor is the smallest that keeps its largest value within 448. That is at most the largest scale of its
    tiles, so no value loses more than it would under that one.
    """
    folded = torch.empty_like(codes)
    factors = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
    changed = 0
    columns = torch.arange(codes.shape[1], device=codes.device) // WEIGHT_TILE
    step = 64 * WEIGHT_TILE  # rows at a time: 42 MB of float32 at K = 5120, instead of four bytes for every code
    for start in range(0, len(codes), step):
        rows = slice(start, min(start + step, len(codes)))
        scales = e8m0_to_float(tile_scales[start // WEIGHT_TILE : -(-rows.stop // WEIGHT_TILE)])[:, columns]
        values = codes[rows].float() * scales.repeat_interleave(WEIGHT_TILE, 0)[: rows.stop - start]
        factor = power_of_two_above(values.abs().amax(1) / FP8_MAX)
        folded[rows] = (values / factor.unsqueeze(1)).to(torch.float8_e4m3fn)
        factors[rows] = factor
        changed += int((folded[rows].float() * factor.unsqueeze(1) != values).sum())
    return folded, factors, changed


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x, float32, x >= 0; 1 for x = 0."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


@triton.jit
def to_fp8(v):
    """float32 within 448 -> e4m3, to nearest, ties to even. The interpreter's own cast loses a factor of two where the
    mantissa overflows, so there the value is put on e4m3's grid first."""
    if INTERPRET:
        bits = v.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
        magic = 24576.0  # 1.5 * 2^14: its float32 has the last digit 2^-9, e4m3's smallest step
        v = tl.where(tl.abs(v) < 0.015625, (v + magic) - magic, normal)
    return v.to(tl.float8e4nv)


@triton.jit
def to_type(v, dtype: tl.constexpr):
    """float32 -> dtype, to nearest, ties to even. The interpreter cuts bfloat16 off, so there v is rounded first."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        v = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
    return v.to(dtype)


@triton.jit
def fold_tile(v):
    """One row as a tile float32 [groups, 32] -> e4m3 codes [groups, 32] and the row's scale, float32: `quantize_fp8`
    of the reference, moved to the row's largest scale. Groups that are all zero do not raise it."""
    amax = tl.maximum(tl.max(tl.abs(v), axis=1), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # [groups], biased; amax > 0: no sign
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / scale, exact
    scaled = tl.minimum(tl.maximum(v * inverse[:, None], -_FP8_MAX), _FP8_MAX)
    codes = to_fp8(scaled).to(tl.float32)
    top = tl.max(exponent, axis=0)
    # A group 127 octaves below the largest is zero under its scale anyway.
    shift = (tl.maximum(127 + exponent - top, 0) << 23).to(tl.float32, bitcast=True)
    return to_fp8(codes * shift[:, None]), (top << 23).to(tl.float32, bitcast=True)


@triton.jit
def added(source, row, rows, offsets, inside, stride, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Values of a row as float32 that holds `dtype`'s values. SPLITS > 0: the sum over float32 [SPLITS, rows, K]."""
    if SPLITS == 0:
        return tl.load(source + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(source + row * stride + offsets, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(source + (split * rows + row) * stride + offsets, mask=inside, other=0.0)
    return to_type(total, dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(
    x, codes, scale, rows, stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = offsets < WIDTH
    folded, top = fold_tile(added(x, row, rows, offsets, inside, stride, SPLITS, tl.bfloat16))
    tl.store(codes + row * WIDTH + offsets, folded, mask=inside)
    tl.store(scale + row, top)


@triton.jit
def _norm_quantize_kernel(
    x, weight, normed, codes, scale, stride, eps, WIDTH: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    wait_for_previous()
    start_next()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = offsets < WIDTH
    v = tl.load(x + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(v * v, axis=1), axis=0) / WIDTH
    y = to_type(v * tl.rsqrt(mean + eps) * w, normed.dtype.element_ty)
    tl.store(normed + row * WIDTH + offsets, y, mask=inside)
    folded, top = fold_tile(y.to(tl.float32))  # of the rounded row: a rounding point of the release
    tl.store(codes + row * WIDTH + offsets, folded, mask=inside)
    tl.store(scale + row, top)


def row_warps(width: int) -> int:
    """Warps for one row of `width` values: 16 bytes a thread and load, at most four loads."""
    return 4 if width <= 2048 else 8


def _groups(width: int) -> int:
    if width % FP8_GROUP:
        raise ValueError(f"rows of {width} values are no multiple of the quantisation group {FP8_GROUP}")
    return triton.next_power_of_2(width // FP8_GROUP)


def _rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(codes, torch.empty(rows, dtype=torch.float32, device=device))


def quantize_rows(x: Tensor) -> Fp8Rows:
    """Q8 of x [N, K] (any float dtype, rows contiguous, K a multiple of 32), folded to one scale per row. Of the parts
    of a sum, float32 [splits, N, K]: of their sum, added in order and rounded to bf16."""
    rows, width = x.shape[-2:]
    out = _rows(rows, width, x.device)
    launch(
        _quantize_kernel,
        (rows,),
        *(x, out.codes, out.scale, rows, x.stride(-2)),
        WIDTH=width,
        GROUPS=_groups(width),
        SPLITS=x.shape[0] if x.dim() == 3 else 0,
        num_warps=row_warps(width),
        **OVERLAP,
    )
    return out


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """RMSNorm of x [N, K], in float32, rounded to x's dtype -> that [N, K], and Q8 of it folded per row."""
    rows, width = x.shape
    normed, out = torch.empty(rows, width, dtype=x.dtype, device=x.device), _rows(rows, width, x.device)
    launch(
        _norm_quantize_kernel,
        (rows,),
        *(x, weight, normed, out.codes, out.scale, x.stride(0), eps),
        WIDTH=width,
        GROUPS=_groups(width),
        num_warps=row_warps(width),
        **OVERLAP,
    )
    return normed, out
