"""Scores of the lightning indexer (model specification 2.6): sum over heads of w * relu(q . k), and best of every 8.

Keys stand on the M side of the tensor core and come from registers: FP4 words -> e4m3 bytes by PRMT, the groups'
scales inside the table that it looks up. Queries stand on the N side, their columns ordered so that all 32 heads of a
query lie in one thread (of four in a quad): relu, weights and the sum over heads need no exchange. A score depends on
its own query and key alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.index_gathered_hopper import gathered_scores_hopper
from deepinfer.kernels.triton.index_keys import KEY_BYTES
from deepinfer.kernels.triton.index_paged_hopper import paged_scores_hopper
from deepinfer.kernels.triton.index_plan import (
    COST_END,
    COUNT,
    HEADER,
    PLACE,
    SEEN,
    SLOT,
    UNIT,
    UNITS,
    VISIBLE,
    IndexPlan,
)
from deepinfer.kernels.triton.runtime import INTERPRET, launch, num_sms

_ROWS = 256  # of a plan that are looked at at once
_UNIT = tl.constexpr(UNIT)
_WORDS = tl.constexpr(KEY_BYTES // 4)  # 17 words of 32 bits an entry


def score_memory(plan: IndexPlan) -> Tensor:
    """float32 for one pass: scores [units * 128], then their maxima over 8, 64 and 512 entries."""
    entries = plan.units * UNIT
    return torch.empty(
        entries + entries // 8 + entries // 64 + entries // 512, dtype=torch.float32, device=plan.rows.device
    )


def paged_scores(
    codes: Tensor, weights: Tensor, pool: Tensor, tables: Tensor, per_block: int, plan: IndexPlan, number: int,
    out: Tensor, *, gluon: bool | None = None,
) -> None:  # fmt: skip
    """Scores and maxima of 8 of pass `number` into `out` (`score_memory`), -inf for entries that a row does not see.

    gluon: by `index_paged_hopper` instead of this module's kernel; the same bits. None: where rows share keys. Measured
    on an H200, 131,072 entries: 64 rows of one request 83 us against 93, 64 requests x 6 rows 479 against 621; but 64
    requests of one row 198 to 250 against 185. Memory is not what the latter wait for: they take 177 us with all keys
    in the second-level cache.
    """
    n = codes.shape[0]
    if gluon is None:
        gluon = plan.width > 1
    tensors = (weights, pool.view(torch.int32), tables, plan.rows, plan.header, out)
    numbers = (n, plan.units * UNIT, number, tables.stride(0))
    options = {"PER_BLOCK": per_block, "WIDTH": plan.width, "num_warps": 4}
    plain = {"KEYS": 128, "STAGES": 6, "BLOCK": _ROWS}
    if gluon and not INTERPRET.value:
        programs, registers = (2, {}) if plan.width > 4 else (3, {"maxnreg": 168})
        grid = (programs * num_sms(codes),)
        launch(paged_scores_hopper, grid, codes.view(torch.uint8), *tensors, *numbers, **options, **registers)
    elif plan.width > 1:
        launch(_paged_scores, (_programs(2, codes),), codes, *tensors, *numbers, **options, **plain)
    else:
        grid = (_programs(5, codes),)
        launch(_paged_scores, grid, codes, *tensors, *numbers, **options, **plain, maxnreg=96)


def gathered_scores(
    codes: Tensor, weights: Tensor, pool: Tensor, tables: Tensor, per_block: int, candidates: Tensor, plan: IndexPlan,
    number: int, out: Tensor, *, gluon: bool = True,
) -> None:  # fmt: skip
    """The same for candidates int32 [N, blocks] (blocks of 8 entries, ascending, -1 = empty): score i of a row is that
    of entry 8 * candidates[i // 8] + i % 8. gluon: as above; 64 rows of 16,384 entries take 38 us against 40."""
    n = codes.shape[0]
    tensors = (weights, pool.view(torch.int32), tables, candidates, plan.rows, plan.header, out)
    numbers = (n, plan.units * UNIT, number, tables.stride(0), candidates.stride(0))
    options = {"PER_BLOCK": per_block, "num_warps": 4}
    plain = {"KEYS": 128, "STAGES": 8, "BLOCK": _ROWS}
    if gluon and not INTERPRET.value:
        grid = (4 * num_sms(codes),)
        launch(gathered_scores_hopper, grid, codes.view(torch.uint8), *tensors, *numbers, **options, maxnreg=128)
    else:
        launch(_gathered_scores, (_programs(3, codes),), codes, *tensors, *numbers, **options, **plain)


def _programs(per_sm: int, x: Tensor) -> int:
    return 3 if INTERPRET.value else per_sm * num_sms(x)


@triton.jit
def _unpack(words, scales, shifts):
    """words int32 [K, 16], scales int32 [K, 4] (the same word four times), shifts 0, 4, 8, 12 -> e4m3 [K, 128], value
    32 t + 8 w + 4 o + b at position 32 w + 16 o + 4 t + b.

    Shifts come from memory because the layout of a load can be that of the tensor core's operand and the layout of
    `arange` cannot: with it, keys would go through shared memory once more."""
    keys: tl.constexpr = words.shape[0]
    shape: tl.constexpr = [keys, 4, 4, 2, 4]  # key, t, w, o, b
    c = (scales >> shifts[None, :]) & 15
    low = tl.broadcast_to((0x14100800 + c * 0x08080800)[:, :, None, None, None], shape)
    high = tl.broadcast_to((0x24201C18 + c * 0x08080808)[:, :, None, None, None], shape)
    x = tl.broadcast_to(tl.reshape(words, [keys, 4, 4])[:, :, :, None, None], shape)
    if INTERPRET:
        o, b = tl.arange(0, 2)[:, None], tl.arange(0, 4)[None, :]
        code = (x >> (16 * o + 4 * b)[None, None, None]) & 7
        byte = (tl.where(code < 4, low, high) >> (8 * (code & 3))) & 0xFF
        sign = (x << (4 * o)[None, None, None]) >> (8 * b)[None, None, None]
        value = (byte | (sign & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        # The tensor core's operand holds, one after the other, the four bytes b of key g, those of key g + 8 ($4 and
        # $8: inputs do not depend on b), and both again for o = 1. In another layout this would be wrong.
        value = tl.inline_asm_elementwise(
            """{ .reg .b32 m, n, t;
            and.b32 m, $4, 0x77777777; and.b32 n, $8, 0x77777777;
            prmt.b32 t, $20, $36, m; lop3.b32 $0, $4, 0x80808080, t, 0xEA;
            prmt.b32 t, $24, $40, n; lop3.b32 $1, $8, 0x80808080, t, 0xEA;
            shr.u32 m, m, 16; shr.u32 n, n, 16;
            prmt.b32 t, $20, $36, m; shl.b32 m, $4, 4; lop3.b32 $2, m, 0x80808080, t, 0xEA;
            prmt.b32 t, $24, $40, n; shl.b32 n, $8, 4; lop3.b32 $3, n, 0x80808080, t, 0xEA; }""",
            "=&r,=&r,=&r,=&r" + ",r" * 48,
            [x, low, high],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=16,
        )
    return tl.reshape(tl.permute(value, (0, 2, 3, 1, 4)), [keys, 128])


@triton.jit
def _columns(WIDTH: tl.constexpr):
    """Query and head of every column of the product: those of one query lie in 4 / WIDTH threads of a quad."""
    column = tl.arange(0, 32 * WIDTH)
    lanes: tl.constexpr = 4 // WIDTH
    lane = column // 2 % 4
    return lane // lanes, column // 8 * (2 * lanes) + lane % lanes * 2 + column % 2


@triton.jit
def _heads(x, WIDTH: tl.constexpr):
    """[K, columns] -> [K, query, b, e, a, a'], head 16 a + 8 a' + 2 b + e; b is lane and column, split by the width."""
    keys: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [keys, 2, 2, WIDTH, WIDTH, 4 // WIDTH, 2])  # a, a', b above, query, b below, e
    return tl.reshape(tl.permute(x, (0, 4, 3, 5, 6, 1, 2)), [keys, WIDTH, 4, 2, 2, 2])


@triton.jit
def _chain(x, w):
    """Sum of x * w over the last three dimensions, in one order and with one rounding a step at every width."""
    x0, x1 = tl.split(x)
    w0, w1 = tl.split(w)
    x00, x01 = tl.split(x0)
    w00, w01 = tl.split(w0)
    x10, x11 = tl.split(x1)
    w10, w11 = tl.split(w1)
    a, b = tl.split(x00)
    u, v = tl.split(w00)
    sums = tl.fma(b, v, a * u)
    a, b = tl.split(x10)
    u, v = tl.split(w10)
    sums = tl.fma(b, v, tl.fma(a, u, sums))
    a, b = tl.split(x01)
    u, v = tl.split(w01)
    sums = tl.fma(b, v, tl.fma(a, u, sums))
    a, b = tl.split(x11)
    u, v = tl.split(w11)
    return tl.fma(b, v, tl.fma(a, u, sums))


@triton.jit
def _scores(words, scales, shifts, queries, weights, WIDTH: tl.constexpr):
    """-> float32 [K, 4], column u that of query u // (4 / WIDTH)."""
    keys: tl.constexpr = words.shape[0]
    lanes: tl.constexpr = 4 // WIDTH
    values = _unpack(words, scales, shifts)
    dots = tl.dot(values.to(tl.float32), queries.to(tl.float32)) if INTERPRET else tl.dot(values, queries)
    weights = tl.broadcast_to(weights[None, :], [keys, 32 * WIDTH])
    sums = _chain(_heads(dots + tl.abs(dots), WIDTH), _heads(weights, WIDTH))
    sums = tl.reshape(sums, [keys, WIDTH, 2, 2])
    sums = tl.sum(tl.sum(sums, 2), 2)
    sums = tl.reshape(tl.broadcast_to(sums[:, :, None], [keys, WIDTH, lanes]), [keys, 4])
    return sums * ((scales & 0xFF0000) << 7).to(tl.float32, bitcast=True)


@triton.jit
def write(pointers, values, mask):
    """A store in whatever layout the values have: tl.store would move them through shared memory for longer lines."""
    if INTERPRET:
        tl.store(pointers, values, mask=mask)
    else:
        pointers, values, mask = tl.broadcast(pointers, values)[0], values, mask.to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointers.to(tl.int64), values, mask],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _first_row(plan, first, n, BLOCK: tl.constexpr):
    """The row whose group holds place `first` of the running sum of costs."""
    row = 0
    for base in range(0, n, BLOCK):
        r = base + tl.arange(0, BLOCK)
        ends = tl.load(plan + COST_END * n + r, mask=r < n, other=0x7FFFFFFF)
        row += tl.sum((ends <= first).to(tl.int32), 0)
    return row


@triton.jit
def _share(header, number):
    """First and last place of this program in the running sum of costs of a pass."""
    begin, end = tl.load(header + HEADER + number), tl.load(header + HEADER + 1 + number)
    part = (end - begin).to(tl.int64)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    return begin + (part * pid // programs).to(tl.int32), begin + (part * (pid + 1) // programs).to(tl.int32)


@triton.jit
def _queries(codes, weights, row, count, WIDTH: tl.constexpr):
    """Columns of a group's rows: e4m3 [128, columns], and half their weights, since x + |x| = 2 relu(x) is one addition
    where a maximum takes the slower unit."""
    q, head = _columns(WIDTH)
    mine = (row + q).to(tl.int64) * 32 + head
    there = q < count
    source = codes + mine[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(source, mask=there[:, None], other=0.0)
    return tl.trans(values), 0.5 * tl.load(weights + mine, mask=there, other=0.0)


@triton.jit
def _paged_group(
    codes, weights, pool, tables, plan, header, out, n, capacity, row, count, begin, end, table_stride,
    PER_BLOCK: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Units begin .. end - 1 of one group."""
    lanes: tl.constexpr = 4 // WIDTH
    u = tl.arange(0, 4)
    mine = row + u // lanes
    there = (u // lanes < count) & (u % lanes == 0)
    visible = tl.load(plan + VISIBLE * n + mine, mask=u // lanes < count, other=0)
    scores = out + tl.load(plan + PLACE * n + mine, mask=there, other=0).to(tl.int64) * _UNIT
    maxima = out + capacity + tl.load(plan + PLACE * n + mine, mask=there, other=0).to(tl.int64) * (_UNIT // 8)
    most = tl.max(visible, 0)
    table = tables + tl.load(plan + SLOT * n + row).to(tl.int64) * table_stride
    shifts = tl.load(header + u)
    q, w = _queries(codes, weights, row, count, WIDTH)
    key = tl.arange(0, KEYS)
    word = tl.arange(0, 16)
    eighth = tl.arange(0, KEYS // 8)
    for tile in tl.range(begin * (_UNIT // KEYS), end * (_UNIT // KEYS), num_stages=STAGES):
        entry = tile * KEYS + key
        if KEYS <= PER_BLOCK:
            block = tl.load(table + tile * KEYS // PER_BLOCK, mask=tile * KEYS < most, other=0).to(tl.int64)
            base = pool + block * (PER_BLOCK * _WORDS)
            inside = (tile & (PER_BLOCK // KEYS - 1)) * KEYS
            words = tl.load(base + (inside * 16 + key * 16)[:, None] + word[None, :])
            scales = tl.load(base + PER_BLOCK * 16 + (inside + key)[:, None] + 0 * u[None, :])
        else:
            block = tl.load(table + entry // PER_BLOCK, mask=entry < most, other=0).to(tl.int64)
            base = pool + block * (PER_BLOCK * _WORDS)
            inside = key % PER_BLOCK
            words = tl.load((base + inside * 16)[:, None] + word[None, :])
            scales = tl.load((base + PER_BLOCK * 16 + inside)[:, None] + 0 * u[None, :])
        values = _scores(words, scales, shifts, q, w, WIDTH)
        values = tl.where(entry[:, None] < visible[None, :], values, float("-inf"))
        best = tl.max(tl.reshape(values, [KEYS // 8, 8, 4]), 1)
        write(scores[None, :] + entry[:, None], values, tl.broadcast_to(there[None, :], [KEYS, 4]))
        write(
            maxima[None, :] + (tile * (KEYS // 8) + eighth)[:, None], best,
            tl.broadcast_to(there[None, :], [KEYS // 8, 4]),
        )  # fmt: skip


@triton.jit
def _paged_scores(
    codes, weights, pool, tables, plan, header, out, n, capacity, number, table_stride,
    PER_BLOCK: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position, last = _share(header, number)
    if position < last:
        row = _first_row(plan, position, n, BLOCK)
        while position < last:
            count = tl.load(plan + COUNT * n + row)
            units = tl.load(plan + UNITS * n + row)
            behind = tl.load(plan + COST_END * n + row)
            if behind > position:
                cost = 1
                if WIDTH > 1:
                    cost = 2 + (count > 2).to(tl.int32) + (count > 4).to(tl.int32)
                zero = behind - units * cost
                begin = (position - zero + cost - 1) // cost
                end = tl.minimum((last - zero + cost - 1) // cost, units)
                if WIDTH > 1:
                    if count > 2:
                        _paged_group(
                            codes, weights, pool, tables, plan, header, out, n, capacity, row, tl.minimum(count, 4),
                            begin, end, table_stride, PER_BLOCK, KEYS, 4, STAGES,
                        )  # fmt: skip
                    first = tl.where(count > 4, 4, 0)  # of one or two rows, or the last ones of five or six
                    if (count <= 2) | (count > 4):
                        _paged_group(
                            codes, weights, pool, tables, plan, header, out, n, capacity, row + first, count - first,
                            begin, end, table_stride, PER_BLOCK, KEYS, 2, STAGES,
                        )  # fmt: skip
                else:
                    _paged_group(
                        codes, weights, pool, tables, plan, header, out, n, capacity, row, count, begin, end,
                        table_stride, PER_BLOCK, KEYS, 1, STAGES,
                    )  # fmt: skip
                position = behind
            row += tl.maximum(count, 1)


@triton.jit
def _gathered_scores(
    codes, weights, pool, tables, candidates, plan, header, out, n, capacity, number, table_stride, candidate_stride,
    PER_BLOCK: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position, last = _share(header, number)
    if position < last:
        row = _first_row(plan, position, n, BLOCK)
        u = tl.arange(0, 4)
        shifts = tl.load(header + u)
        key = tl.arange(0, KEYS)
        word = tl.arange(0, 16)
        eighth = tl.arange(0, KEYS // 8)
        while position < last:
            units = tl.load(plan + UNITS * n + row)
            behind = tl.load(plan + COST_END * n + row)
            if behind > position:
                begin = position - behind + units
                end = tl.minimum(last - behind + units, units)
                offered = tl.load(plan + VISIBLE * n + row)
                seen = tl.load(plan + SEEN * n + row)
                place = tl.load(plan + PLACE * n + row).to(tl.int64)
                table = tables + tl.load(plan + SLOT * n + row).to(tl.int64) * table_stride
                chosen = candidates + row.to(tl.int64) * candidate_stride
                q, w = _queries(codes, weights, row, 1, 1)
                for tile in tl.range(begin * (_UNIT // KEYS), end * (_UNIT // KEYS), num_stages=STAGES):
                    i = tile * KEYS + key
                    entry = tl.load(chosen + i // 8, mask=i < offered, other=-1) * 8 + i % 8
                    there = (entry >= 0) & (entry < seen)
                    block = tl.load(table + entry // PER_BLOCK, mask=there, other=0).to(tl.int64)
                    base = pool + block * (PER_BLOCK * _WORDS)
                    inside = tl.where(there, entry, 0) % PER_BLOCK
                    words = tl.load((base + inside * 16)[:, None] + word[None, :])
                    scales = tl.load((base + PER_BLOCK * 16 + inside)[:, None] + 0 * u[None, :])
                    values = _scores(words, scales, shifts, q, w, 1)
                    values = tl.where(there[:, None], values, float("-inf"))
                    best = tl.max(tl.reshape(values, [KEYS // 8, 8, 4]), 1)
                    mine = tl.broadcast_to((u == 0)[None, :], [KEYS, 4])
                    write((out + place * _UNIT + i)[:, None] + 0 * u[None, :], values, mine)
                    to = out + capacity + place * (_UNIT // 8) + tile * (KEYS // 8) + eighth
                    write(to[:, None] + 0 * u[None, :], best, tl.broadcast_to((u == 0)[None, :], [KEYS // 8, 4]))
                position = behind
            row += 1
