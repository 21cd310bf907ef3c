"""bfloat16 of streams in registers: widened and rounded two at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.runtime import INTERPRET


@triton.jit
def widened(x):
    """bfloat16 -> float32, two instructions for two values: a bfloat16 is the upper half of its float32."""
    if INTERPRET or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
        "=r,=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def rounded(v, dtype: tl.constexpr):
    """float32 -> dtype, to nearest, ties to even. Two values with one instruction; cast one at a time, as the compiler
    does where a value is used again, each goes to a unit with an eighth of the rate (worked out: 28 us of 4,096
    rows)."""
    if INTERPRET or dtype != tl.bfloat16:
        return to_type(v, dtype)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [v],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def reciprocal(x):
    """1 / x within a unit in the last place, for x that is normal: one instruction where a division takes nine."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
