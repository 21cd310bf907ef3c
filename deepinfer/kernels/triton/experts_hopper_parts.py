"""What four warps of `experts_hopper.py` do with one tile of 64 rows of weights by 64 slots: weights unpacked into the
registers that the tensor core reads, and finished sums written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
# The tensor core's left operand, 64 rows x 128 of K, as [row, t, w, o, b]: value 32 t + 8 w + 4 o + b.
_VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [8, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0]],
        [[0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        [],
        [64, 4, 4, 2, 4],
    )
)
_FOURS = gl.constexpr(gl.SliceLayout(4, _VALUES.value))  # [row, t, w, o]
_WORDS = gl.constexpr(gl.SliceLayout(3, _FOURS.value))  # [row, t, w]
_STEPS = gl.constexpr(gl.SliceLayout(2, _WORDS.value))  # [row, t]
# Words as they lie, [row, 4 t + w]: a thread loads its four of a row with one instruction.
_LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
# [channels, slots] on their way out: 16 bytes a thread, and the channels of a slot side by side.
_HALF_OUT = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))
_ALL_OUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))


@gluon.jit
def unpack(codes, scales):
    """Shared memory int32 [64, 16] (words of a tile) and int32 [64] (its scales, four bytes a row) -> the left operand,
    e4m3 [64, 128].

    In two parts, neither of them pure: the operand's registers may only be written while no product runs (the assembler
    otherwise makes every product wait for the one before), so that only the second part has to wait for one."""
    words = gl.convert_layout(codes.load(_LOADED).reshape([64, 4, 4]), _WORDS)
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, _STEPS))
    c = (scales.load(gl.SliceLayout(1, _STEPS))[:, None] >> (8 * t)[None, :]) & 255
    zero = gl.zeros([64, 4, 4, 2], gl.int32, layout=_FOURS)
    # The table of `experts_unpack.weight_codes`.
    low = (0x14100800 + c * 0x08080800).expand_dims(2).expand_dims(3) + zero
    high = (0x24201C18 + c * 0x08080808).expand_dims(2).expand_dims(3) + zero
    magnitudes = gl.inline_asm_elementwise(
        """{ .reg .b32 m, n;
        and.b32 m, $4, 0x77777777; and.b32 n, $5, 0x77777777;
        prmt.b32 $0, $8, $12, m; prmt.b32 $1, $9, $13, n;
        shr.u32 m, m, 16; shr.u32 n, n, 16;
        prmt.b32 $2, $8, $12, m; prmt.b32 $3, $9, $13, n; }""",
        "=&r,=&r,=&r,=&r" + ",r" * 12,  # rows g and g + 8, each with o = 0 and 1
        [words.expand_dims(3) + zero, low, high],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )
    zero = gl.zeros([64, 4, 4, 2, 4], gl.int32, layout=_VALUES)
    values = gl.inline_asm_elementwise(
        """{ .reg .b32 m, n;
        shl.b32 m, $20, 4; shl.b32 n, $24, 4;
        lop3.b32 $0, $20, 0x80808080, $4, 0xEA; lop3.b32 $1, $24, 0x80808080, $8, 0xEA;
        lop3.b32 $2, m, 0x80808080, $12, 0xEA; lop3.b32 $3, n, 0x80808080, $16, 0xEA; }""",
        "=&r,=&r,=&r,=&r" + ",r" * 32,  # as above; each register four times, once for each of its bytes
        [magnitudes.expand_dims(4) + zero, words.expand_dims(3).expand_dims(4) + zero],
        dtype=gl.float8e4nv,
        is_pure=False,
        pack=16,
    )
    values = values.permute((0, 2, 3, 1, 4)).reshape([64, 128])
    return gl.convert_layout(values, _OPERAND, assert_trivial=True)


@gluon.jit
def finish_up(
    sums, x_scale, factors, out, order, weights, limit, begin, rows, expert, row, TOPK: gl.constexpr,
    OUTPUTS: gl.constexpr,
):  # fmt: skip
    """`experts._finish_up` of 64 rows by 64 slots."""
    inside = gl.arange(0, 64, layout=gl.SliceLayout(0, MMA))
    slots = gl.load(order + begin + inside, mask=inside < rows, other=0)
    sums *= gl.load(factors + expert * OUTPUTS + row + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)))[:, None]
    sums *= gl.load(x_scale + slots // TOPK, mask=inside < rows, other=0.0)[None, :]
    gate, up = gl.split(sums.reshape([4, 2, 8, 64]).permute((0, 2, 3, 1)))
    gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)
    up = up.to(gl.bfloat16).to(gl.float32)
    up = gl.minimum(gl.maximum(up, -limit), limit)
    act = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, 64])
    HALF: gl.constexpr = gl.SliceLayout(0, act.type.layout)
    inside = gl.arange(0, 64, layout=HALF)
    slots = gl.load(order + begin + inside, mask=inside < rows, other=0)
    act *= gl.load(weights + slots, mask=inside < rows, other=0.0)[None, :]
    _store(act.to(gl.bfloat16), out, begin, rows, row // 2, OUTPUTS // 2, _HALF_OUT)


@gluon.jit
def finish_down(sums, x_scale, factors, out, begin, rows, expert, row, OUTPUTS: gl.constexpr):
    """`experts._finish_down` of 64 rows by 64 slots."""
    inside = gl.arange(0, 64, layout=gl.SliceLayout(0, MMA))
    sums *= gl.load(factors + expert * OUTPUTS + row + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)))[:, None]
    sums *= gl.load(x_scale + begin + inside, mask=inside < rows, other=0.0)[None, :]
    _store(sums.to(gl.bfloat16), out, begin, rows, row, OUTPUTS, _ALL_OUT)


@gluon.jit
def _store(values, out, begin, rows, channel, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """values bf16 [channels, 64] -> out [place, channel], through shared memory."""
    values = gl.convert_layout(values, LAYOUT)
    inside = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    to = channel + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    where = ((begin + inside).to(gl.int64) * WIDTH)[None, :] + to[:, None]
    gl.store(out + where, values, mask=(inside < rows)[None, :])
