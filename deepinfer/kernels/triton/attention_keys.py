"""Packed records as tiles of keys for the tensor cores: integer operations on whole words, one multiplication a pair.

A tile is bf16 [B, D] in split order (even dims, then odd ones), times 2^-64. Both halves of a word of codes become bf16
pairs at once: the bits of a code are moved to where bf16 has its sign, its lowest exponent bits and its mantissa, which
reads as the value times a small power of two (bf16's denormals stand for the codes' own), and a multiplication by
scale * 2^n makes it right. 2^-64 keeps both factors within bf16's range; it is exact, and whoever uses the tile undoes
it. All products are exact too: an e2m1 or e4m3 code times its scale has at most 6 significant bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.runtime import INTERPRET

# e2m1 s.ee.m in bits 3..0 of a nibble -> bf16 bits 15 (s) and 8..6 (ee.m): the value times 2^-126.
# Four bytes a call, $4; their scale times 2^62 twice, $5 (the inputs behind it are the same). Low nibbles: even dims.
_UNPACK_FP4 = tl.constexpr("""
{
 .reg .b32 t, u, a, b;
 prmt.b32 t, $4, 0, 0x1100;
 prmt.b32 u, $4, 0, 0x3322;
 shl.b32 a, t, 6; and.b32 a, a, 0x01C001C0; shl.b32 b, t, 4; lop3.b32 a, b, 0x80008000, a, 0xEA;
 mul.rn.bf16x2 $0, a, $5;
 shl.b32 a, u, 6; and.b32 a, a, 0x01C001C0; shl.b32 b, u, 4; lop3.b32 a, b, 0x80008000, a, 0xEA;
 mul.rn.bf16x2 $1, a, $5;
 shl.b32 a, t, 2; and.b32 a, a, 0x01C001C0; lop3.b32 a, t, 0x80008000, a, 0xEA;
 mul.rn.bf16x2 $2, a, $5;
 shl.b32 a, u, 2; and.b32 a, a, 0x01C001C0; lop3.b32 a, u, 0x80008000, a, 0xEA;
 mul.rn.bf16x2 $3, a, $5;
}
""")
# e4m3 s.eeee.mmm -> bf16 bits 15 and 10..4: the value times 2^-120. Two pairs of bytes a call, $2; their scale times
# 2^56 twice, $3. The lower byte of a pair is the even dim.
_UNPACK_FP8 = tl.constexpr("""
{
 .reg .b32 a, b;
 and.b32 a, $2, 0x007F007F; shl.b32 a, a, 4; shl.b32 b, $2, 8; lop3.b32 a, b, 0x80008000, a, 0xEA;
 mul.rn.bf16x2 $0, a, $3;
 shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, $2, 0x80008000, a, 0xEA;
 mul.rn.bf16x2 $1, a, $3;
}
""")


@triton.jit
def window_tile(pool, rows, B: tl.constexpr, D: tl.constexpr):
    """Window records of pool uint8 [R, D + D / 32] at rows [B], 0 where a row is -1: bf16 [B, D] (float32 in the
    interpreter), split order, times 2^-64."""
    WORDS: tl.constexpr = D // 128  # int32 words of four scale bytes
    record = pool + rows.to(tl.int64) * (D + D // 32)
    real = (rows >= 0)[:, None]
    pairs = record.to(tl.pointer_type(tl.uint16))[:, None] + tl.arange(0, D // 2)[None, :]
    codes = tl.load(pairs, mask=real, other=0)
    words = (record + D).to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, WORDS)[None, :]
    scale = tl.broadcast_to(tl.load(words, mask=real, other=0)[:, :, None], [B, WORDS, 64])
    exponent = (scale >> ((tl.arange(0, 64) // 16) * 8)) & 0xFF  # 16 pairs of dims share a scale
    codes = tl.reshape(codes, [B, WORDS, 64])
    if INTERPRET:
        scale = (tl.maximum(exponent - 64, 0) << 23).to(tl.float32, bitcast=True)
        even = _e4m3_value(codes.to(tl.int32) & 0xFF) * scale
        odd = _e4m3_value(codes.to(tl.int32) >> 8) * scale
    else:
        scale = tl.minimum(exponent + 56, 254) * 0x00800080
        even, odd = tl.inline_asm_elementwise(
            _UNPACK_FP8, "=r,=r,r,r,r", [codes, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return _split_order(even, odd, B, D)


@triton.jit
def compressed_tile(pool, rows, B: tl.constexpr, D: tl.constexpr):
    """The same of compressed records, pool uint8 [R, D / 2 + D / 16]."""
    WORDS: tl.constexpr = D // 64
    record = pool + rows.to(tl.int64) * (D // 2 + D // 16)
    real = (rows >= 0)[:, None]
    codes = tl.load(record[:, None] + tl.arange(0, D // 2)[None, :], mask=real, other=0)
    words = (record + D // 2).to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, WORDS)[None, :]
    scale = tl.broadcast_to(tl.load(words, mask=real, other=0)[:, :, None], [B, WORDS, 32])
    scale = (scale >> ((tl.arange(0, 32) // 8) * 8)) & 0xFF  # 8 bytes of dims share an e4m3 scale
    # Its bits as a float32's are the scale times 2^-120; 2^62 of it are wanted, in two steps that do not overflow.
    scale = (scale << 20).to(tl.float32, bitcast=True) * 2.0**127 * 2.0**55
    codes = tl.reshape(codes, [B, WORDS, 32])
    if INTERPRET:
        scale = scale * 2.0**-126
        even = _e2m1_value(codes.to(tl.int32)) * scale
        odd = _e2m1_value(codes.to(tl.int32) >> 4) * scale
    else:
        bits = scale.to(tl.int32, bitcast=True)  # at most 4 significant bits: the lower half is zero
        even, odd = tl.inline_asm_elementwise(
            _UNPACK_FP4,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, bits | ((bits >> 16) & 0xFFFF)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return _split_order(even, odd, B, D)


@triton.jit
def prefetch_records(pool, rows, SIZE: tl.constexpr, PIECES: tl.constexpr = 8):
    """Ask for records of SIZE bytes of pool at rows [B] (-1 = none) to be brought into the second-level cache."""
    if not INTERPRET:
        piece = tl.arange(0, PIECES) * (SIZE // PIECES)
        places = pool + rows.to(tl.int64)[:, None] * SIZE + piece[None, :]
        wanted = tl.broadcast_to((rows >= 0)[:, None], places.shape).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [places, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _split_order(even, odd, B: tl.constexpr, D: tl.constexpr):
    """[B, words, D / 2 / words] twice -> [B, D]: a thread's registers only get other names."""
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 3, 1, 2)), [B, D])


@triton.jit
def _e4m3_value(code):
    """e4m3 codes int32 0..255 -> float32; NaN codes as the number that their bits would be."""
    magnitude = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where(code & 0x80 != 0, -magnitude, magnitude)


@triton.jit
def _e2m1_value(code):
    """The lower 4 bits of int32 as an e2m1 code -> float32."""
    c = code & 7
    magnitude = tl.where(c < 4, c * 0.5, tl.where(c < 6, c - 2, c * 2 - 8).to(tl.float32))
    return tl.where(code & 8 != 0, -magnitude, magnitude)
