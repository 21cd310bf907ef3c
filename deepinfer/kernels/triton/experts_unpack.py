"""FP4 weights on their way into the tensor core: unpacked in registers, multiplied, and waited for.

Each thread has 16 bytes of a row: 32 weights under one scale, of the 128 that a step multiplies. It looks four of them
up at once with a byte permute in a table that holds the scale (`experts_layout.py`), and has what wgmma takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.runtime import INTERPRET


@triton.jit
def settled(x):
    """x, float32, once it has been computed: no instruction, but one that needs x as far as the compiler knows, so that
    it waits for the tensor core. That still reads the registers that the next step's weights are written to; without
    this, results are wrong, silently, at large tiles."""
    if INTERPRET:
        return x
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def weight_values(words, steps, ROWS: tl.constexpr, KERNEL_ORDER: tl.constexpr):
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
def weight_codes(words, steps, ROWS: tl.constexpr, KERNEL_ORDER: tl.constexpr):
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
def add_product(words, steps, x, total, ROWS: tl.constexpr, WIDE: tl.constexpr, FRESH: tl.constexpr):
    """total [ROWS, slots] + weights [ROWS, 128] times x [slots, 128]^T; FRESH: without total."""
    if INTERPRET:
        product = tl.dot(weight_values(words, steps, ROWS, not WIDE), tl.trans(x.to(tl.float32)))
        return product if FRESH else total + product
    weights = weight_codes(words, steps, ROWS, not WIDE)
    if WIDE:
        weights = weights.to(tl.bfloat16)
    if FRESH:
        return settled(tl.dot(weights, tl.trans(x)))
    return settled(tl.dot(weights, tl.trans(x), total))
