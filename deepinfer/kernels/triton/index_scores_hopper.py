"""Parts of the index scores with explicit layouts (`index_scores.py`): the same operands, sums and results, in Gluon.

Two things that Triton does not do by itself: keys go from memory into the registers that the tensor core reads, with no
shared memory and no barrier between; and the product of one tile runs under the relu, weights and sums of the tile
before it. Two tiles a round, each with registers of its own: PTX forbids to touch a product's inputs before it is
waited for, also those of the next round.

`index_paged_hopper.py` and `index_gathered_hopper.py` make kernels of them. The interpreter does not run Gluon; there,
those of `index_scores.py` do the same work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deepinfer.kernels.triton.index_plan import COST_END, HEADER, PLACE, SLOT, VISIBLE

KEYS = gl.constexpr(64)  # of a tile; one warpgroup's rows

# Keys of the tensor core's left operand as [key, t, w, o, b]: value 32 t + 8 w + 4 o + b.
_LANES = [[0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
_VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [8, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0]],
        _LANES,
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        [],
        [64, 4, 4, 2, 4],
    )
)
WORDS = gl.constexpr(gl.SliceLayout(3, gl.SliceLayout(4, _VALUES.value)))  # [key, t, w]
GROUPS = gl.constexpr(gl.SliceLayout(2, WORDS.value))  # [key, t]
# The same words with w fastest, so that a thread loads its four with one instruction.
LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)


def _sums(lanes: list[list[int]], width: int) -> gl.constexpr:
    """[key, query, thread of the query]: a row's sums of a quad's four threads."""
    return gl.constexpr(
        gl.DistributedLinearLayout(
            [[8, 0, 0]],
            [*lanes, [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]],
            [],
            [64, width, 4 // width],
        )
    )


SUMS_1 = _sums([[0, 0, 1], [0, 0, 2]], 1)
SUMS_2 = _sums([[0, 0, 1], [0, 1, 0]], 2)
SUMS_4 = _sums([[0, 1, 0], [0, 2, 0]], 4)
_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_PAGES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def fetch_keys(pool, block, tile, PER_BLOCK: gl.constexpr):
    """Words int32 [64, 4, 4] and scale words int32 [64, 4] (each four times) of a tile in `block`."""
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LOADED)))
    at = (key[:, None] * 16 + t[None, :] * 4).expand_dims(2) + w.expand_dims(0).expand_dims(0)
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, GROUPS))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    inside = (tile & (PER_BLOCK // KEYS - 1)) * KEYS
    base = pool + block * (PER_BLOCK * 17)
    words = gl.load(base + inside * 16 + at)
    scales = gl.load(base + PER_BLOCK * 16 + inside + row[:, None] + group[None, :] * 0)
    return gl.convert_layout(words, WORDS), scales


@gluon.jit
def unpack(words, scales, OPERAND: gl.constexpr):
    """-> e4m3 [64, 128], the tensor core's left operand; see `index_scores._unpack`."""
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    c = (scales >> (4 * t)[None, :]) & 15
    zero = gl.zeros([KEYS, 4, 4, 2, 4], gl.int32, layout=_VALUES)
    low = (0x14100800 + c * 0x08080800).expand_dims(2).expand_dims(3).expand_dims(4) + zero
    high = (0x24201C18 + c * 0x08080808).expand_dims(2).expand_dims(3).expand_dims(4) + zero
    x = words.expand_dims(3).expand_dims(4) + zero
    values = gl.inline_asm_elementwise(
        """{ .reg .b32 m, n, t;
        and.b32 m, $4, 0x77777777; and.b32 n, $8, 0x77777777;
        prmt.b32 t, $20, $36, m; lop3.b32 $0, $4, 0x80808080, t, 0xEA;
        prmt.b32 t, $24, $40, n; lop3.b32 $1, $8, 0x80808080, t, 0xEA;
        shr.u32 m, m, 16; shr.u32 n, n, 16;
        prmt.b32 t, $20, $36, m; shl.b32 m, $4, 4; lop3.b32 $2, m, 0x80808080, t, 0xEA;
        prmt.b32 t, $24, $40, n; shl.b32 n, $8, 4; lop3.b32 $3, n, 0x80808080, t, 0xEA; }""",
        "=&r,=&r,=&r,=&r" + ",r" * 48,
        [x, low, high],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=16,
    )
    values = values.permute((0, 2, 3, 1, 4)).reshape([KEYS, 128])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def _heads(x, WIDTH: gl.constexpr):
    """[64, columns] -> [64, query, b, e, a, a'], head 16 a + 8 a' + 2 b + e."""
    x = x.reshape([KEYS, 2, 2, WIDTH, WIDTH, 4 // WIDTH, 2])  # a, a', b above, query, b below, e
    return x.permute((0, 4, 3, 5, 6, 1, 2)).reshape([KEYS, WIDTH, 4, 2, 2, 2])


@gluon.jit
def _chain(x, w):
    """Sum of x * w over the last three dimensions, in one order and with one rounding a step at every width."""
    x0, x1 = gl.split(x)
    w0, w1 = gl.split(w)
    x00, x01 = gl.split(x0)
    w00, w01 = gl.split(w0)
    x10, x11 = gl.split(x1)
    w10, w11 = gl.split(w1)
    a, b = gl.split(x00)
    u, v = gl.split(w00)
    sums = gl.fma(b, v, a * u)
    a, b = gl.split(x10)
    u, v = gl.split(w10)
    sums = gl.fma(b, v, gl.fma(a, u, sums))
    a, b = gl.split(x01)
    u, v = gl.split(w01)
    sums = gl.fma(b, v, gl.fma(a, u, sums))
    a, b = gl.split(x11)
    u, v = gl.split(w11)
    return gl.fma(b, v, gl.fma(a, u, sums))


@gluon.jit
def finish(dots, scales, weights, shown, tile, end, scores, maxima, there, WIDTH: gl.constexpr, SUMS: gl.constexpr):
    """relu, weights (halved: x + |x| is 2 relu(x), one addition instead of a slower maximum), sums, stores.

    shown int1 [64, 4]: where there is an entry that the row sees."""
    weights = gl.broadcast(weights[None, :], dots)[0]
    sums = _chain(_heads(dots + gl.abs(dots), WIDTH), _heads(weights, WIDTH))
    sums = gl.sum(gl.sum(sums.reshape([KEYS, WIDTH, 2, 2]), 2), 2)
    sums = gl.convert_layout(sums, gl.SliceLayout(2, SUMS), assert_trivial=True)
    sums = sums.expand_dims(2) + gl.zeros([KEYS, WIDTH, 4 // WIDTH], gl.float32, layout=SUMS)
    sums = gl.convert_layout(sums.reshape([KEYS, 4]), GROUPS, assert_trivial=True)
    values = sums * ((scales & 0xFF0000) << 7).to(gl.float32, bitcast=True)
    values = gl.where(shown, values, float("-inf"))
    entry = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, GROUPS))
    gl.store(scores[None, :] + entry[:, None], values, mask=there[None, :] & (entry[:, None] < end * KEYS))
    best = gl.max(values.reshape([KEYS // 8, 8, 4]), 1)
    EIGHTHS: gl.constexpr = best.type.layout
    eighth = tile * (KEYS // 8) + gl.arange(0, KEYS // 8, layout=gl.SliceLayout(1, EIGHTHS))
    maxima = gl.convert_layout(maxima, gl.SliceLayout(0, EIGHTHS))
    there = gl.convert_layout(there, gl.SliceLayout(0, EIGHTHS))
    gl.store(
        maxima[None, :] + eighth[:, None],
        best,
        mask=there[None, :] & (eighth[:, None] < end * (KEYS // 8)),
    )


@gluon.jit
def block_of(table, tile, most, PER_BLOCK: gl.constexpr):
    """The block that holds a tile; the null block behind the last visible entry."""
    return gl.load(table + tile * KEYS // PER_BLOCK, mask=tile * KEYS < most, other=0).to(gl.int64)


@gluon.jit
def shown_entries(tile, visible):
    """int1 [64, 4]: entries of a tile that the columns' rows see."""
    entry = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, GROUPS))
    return entry[:, None] < visible[None, :]


@gluon.jit
def load_queries(codes, weights, row, count, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """The tensor core's right operand, e4m3 [128, columns] in shared memory, and half of the columns' weights. Columns
    as in `index_scores._columns`."""
    COUNTED: gl.constexpr = 32 * WIDTH
    LANES: gl.constexpr = 4 // WIDTH
    column = gl.arange(0, COUNTED, layout=gl.SliceLayout(1, _CODES))
    lane = column // 2 % 4
    query, head = lane // LANES, column // 8 * (2 * LANES) + lane % LANES * 2 + column % 2
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, _CODES))
    source = codes + ((row + query).to(gl.int64) * 4096 + head * 128)[:, None] + k[None, :]
    loaded = gl.load(source, mask=(query < count)[:, None], other=0)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [COUNTED, 128], _PAGES, loaded.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    column = gl.arange(0, COUNTED, layout=gl.SliceLayout(0, MMA))
    lane = column // 2 % 4
    query, head = lane // LANES, column // 8 * (2 * LANES) + lane % LANES * 2 + column % 2
    weights = gl.load(weights + (row + query).to(gl.int64) * 32 + head, mask=query < count, other=0.0)
    return queries.permute((1, 0)), 0.5 * weights


@gluon.jit
def group_scores(
    codes, weights, pool, tables, plan, out, n, capacity, row, count, begin, end, table_stride,
    PER_BLOCK: gl.constexpr, WIDTH: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Tiles begin .. end - 1 (begin < end) of the group of `count` rows from `row` on."""
    COUNTED: gl.constexpr = 32 * WIDTH
    LANES: gl.constexpr = 4 // WIDTH
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNTED, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    u = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    mine = row + u // LANES
    there = (u // LANES < count) & (u % LANES == 0)
    visible = gl.load(plan + VISIBLE * n + mine, mask=u // LANES < count, other=0)
    place = gl.load(plan + PLACE * n + mine, mask=there, other=0).to(gl.int64)
    scores, maxima = out + place * 128, out + capacity + place * 16
    most = gl.max(visible, 0)
    table = tables + gl.load(plan + SLOT * n + row).to(gl.int64) * table_stride

    right, w = load_queries(codes, weights, row, count, WIDTH, MMA)
    zero = gl.zeros([KEYS, COUNTED], gl.float32, layout=MMA)
    x0, s0 = fetch_keys(pool, block_of(table, begin, most, PER_BLOCK), begin, PER_BLOCK)
    x1, s1 = fetch_keys(pool, block_of(table, begin + 1, most, PER_BLOCK), begin + 1, PER_BLOCK)
    block = block_of(table, begin + 2, most, PER_BLOCK)
    running = warpgroup_mma(unpack(x0, s0, OPERAND), right, zero, use_acc=False, is_async=True)
    f0 = s0
    for tile in range(begin, end, 2):
        x0, s0 = fetch_keys(pool, block, tile + 2, PER_BLOCK)
        block = block_of(table, tile + 3, most, PER_BLOCK)
        left = unpack(x1, s1, OPERAND)
        dots = warpgroup_mma_wait(0, deps=[running])
        other = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
        finish(dots, f0, w, shown_entries(tile, visible), tile, end, scores, maxima, there, WIDTH, SUMS)
        f1 = s1
        x1, s1 = fetch_keys(pool, block, tile + 3, PER_BLOCK)
        block = block_of(table, tile + 4, most, PER_BLOCK)
        left = unpack(x0, s0, OPERAND)
        dots = warpgroup_mma_wait(0, deps=[other])
        running = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
        finish(dots, f1, w, shown_entries(tile + 1, visible), tile + 1, end, scores, maxima, there, WIDTH, SUMS)
        f0 = s0
    warpgroup_mma_wait(0, deps=[running])


@gluon.jit
def share(header, number):
    """`index_scores._share`."""
    begin, end = gl.load(header + HEADER + number), gl.load(header + HEADER + 1 + number)
    part = (end - begin).to(gl.int64)
    pid, programs = gl.program_id(0), gl.num_programs(0)
    return begin + (part * pid // programs).to(gl.int32), begin + (part * (pid + 1) // programs).to(gl.int32)


@gluon.jit
def first_row(plan, first, n):
    """`index_scores._first_row`. Written otherwise (more rows at once, halves) it makes the loops behind it spill."""
    row = 0
    for base in range(0, n, 64):
        r = base + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
        ends = gl.load(plan + COST_END * n + r, mask=r < n, other=0x7FFFFFFF)
        row += gl.sum((ends <= first).to(gl.int32), 0)
    return row
