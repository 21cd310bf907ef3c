"""Index keys asked for ahead of the kernels that load them, so that these wait for the second-level cache and not for
memory: 64 requests x 6 rows of 131,072 entries take 479 us instead of 554."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.index_plan import UNIT

AHEAD = gl.constexpr(6)  # tiles, an even number: keys are in the second-level cache so far before they are loaded
_KEYS = gl.constexpr(UNIT // 2)  # of a tile
_LINE = gl.constexpr(128)  # bytes
_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def key_blocks(table, tile, most, PER_BLOCK: gl.constexpr):
    """int32 [128]: in which block each line of two tiles lies, tile being the first, an even one; 0 = nothing."""
    LINES: gl.constexpr = PER_BLOCK * 68 // _LINE
    line = gl.arange(0, 128, layout=_EACH)
    there = (line < 2 * _KEYS * 68 // _LINE) & (tile * _KEYS + line // LINES * PER_BLOCK < most)
    return gl.load(table + tile * _KEYS // PER_BLOCK + line // LINES, mask=there, other=0).to(gl.int32)


@gluon.jit
def warm_keys(pool, block, PER_BLOCK: gl.constexpr):
    """Asks for the lines of `key_blocks` in the second-level cache: one instruction, no register for what comes."""
    LINES: gl.constexpr = PER_BLOCK * 68 // _LINE
    line = gl.arange(0, 128, layout=_EACH)
    at = pool + block.to(gl.int64) * (PER_BLOCK * 17) + line % LINES * (_LINE // 4)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [at.to(gl.int64), block],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
