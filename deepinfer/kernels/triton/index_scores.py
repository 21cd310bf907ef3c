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

from deepinfer.kernels.triton.index_keys import KEY_BYTES
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
    out: Tensor, **meta: int,
) -> None:  # fmt: skip
    """Scores and maxima of 8 of pass `number` into `out` (`score_memory`), -inf for entries that a row does not see."""
    n = codes.shape[0]
    options = {"KEYS": 64 if plan.width == 4 else 128, "num_stages": 4, "num_warps": 4} | meta
    programs = options.pop("programs", 3 if plan.width == 4 else 5)
    launch(
        _paged_scores,
        (_programs(programs, codes),),
        codes, weights, pool.view(torch.int32), tables, plan.rows, plan.header, out, n, plan.units * UNIT, number,
        tables.stride(0), PER_BLOCK=per_block, WIDTH=plan.width, BLOCK=min(1024, triton.next_power_of_2(max(n, 16))),
        STAGES=options.pop("num_stages"), **options,
    )  # fmt: skip


def gathered_scores(
    codes: Tensor, weights: Tensor, pool: Tensor, tables: Tensor, per_block: int, candidates: Tensor, plan: IndexPlan,
    number: int, out: Tensor, **meta: int,
) -> None:  # fmt: skip
    """The same for candidates int32 [N, blocks] (blocks of 8 entries, ascending, -1 = empty): score i of a row is that
    of entry 8 * candidates[i // 8] + i % 8."""
    n = codes.shape[0]
    options = {"KEYS": 128, "num_stages": 5, "num_warps": 4} | meta
    programs = options.pop("programs", 5)
    launch(
        _gathered_scores,
        (_programs(programs, codes),),
        codes, weights, pool.view(torch.int32), tables, candidates, plan.rows, plan.header, out, n, plan.units * UNIT,
        number, tables.stride(0), candidates.stride(0), PER_BLOCK=per_block,
        BLOCK=min(1024, triton.next_power_of_2(max(n, 16))), STAGES=options.pop("num_stages"), **options,
    )  # fmt: skip


def _programs(per_sm: int, x: Tensor) -> int:
    return 3 if INTERPRET.value else per_sm * num_sms(x)


@triton.jit
def _half(selector, sign, low, high):
    """selector, sign int32 [K, t, w], tables int32 [K, t] -> e4m3 [K, 64], position 16 w + 4 t + b."""
    keys: tl.constexpr = selector.shape[0]
    shape: tl.constexpr = [keys, 4, 4, 4]
    selector = tl.broadcast_to(selector[:, :, :, None], shape)
    sign = tl.broadcast_to(sign[:, :, :, None], shape)
    low = tl.broadcast_to(low[:, :, None, None], shape)
    high = tl.broadcast_to(high[:, :, None, None], shape)
    if INTERPRET:
        b = tl.arange(0, 4)[None, None, None, :]
        code = (selector >> (4 * b)) & 7
        byte = (tl.where(code < 4, low, high) >> (8 * (code & 3))) & 0xFF
        value = (byte | ((sign >> (8 * b)) & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        # Four neighbouring elements are the four bytes b of one word here: all of them have the same inputs.
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $9, $13, $1; lop3.b32 $0, $5, 0x80808080, t, 0xEA; }",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [selector, sign, low, high],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=4,
        )
    return tl.reshape(tl.permute(value, (0, 2, 1, 3)), [keys, 64])


@triton.jit
def _unpack(words, scales, shifts):
    """words int32 [K, 16], scales int32 [K, 4] (the same word four times), shifts 0, 4, 8, 12 -> e4m3 [K, 64] twice.

    Shifts come from memory because the layout of a load can be that of the tensor core's operand and the layout of
    `arange` cannot: with it, keys would go through shared memory once more."""
    keys: tl.constexpr = words.shape[0]
    c = (scales >> shifts[None, :]) & 15
    low = 0x14100800 + c * 0x08080800
    high = 0x24201C18 + c * 0x08080808
    x = tl.reshape(words, [keys, 4, 4])
    selector = x & 0x77777777
    return _half(selector, x, low, high), _half(selector >> 16, x << 4, low, high)


@triton.jit
def _columns(WIDTH: tl.constexpr):
    """Query and head of every column of the product: those of one query lie in 4 / WIDTH threads of a quad."""
    column = tl.arange(0, 32 * WIDTH)
    lanes: tl.constexpr = 4 // WIDTH
    lane = column // 2 % 4
    return lane // lanes, column // 8 * (2 * lanes) + lane % lanes * 2 + column % 2


@triton.jit
def _scores(words, scales, shifts, first, second, weights, WIDTH: tl.constexpr):
    """-> float32 [K, 4], column u that of query u // (4 / WIDTH)."""
    keys: tl.constexpr = words.shape[0]
    lanes: tl.constexpr = 4 // WIDTH
    a, b = _unpack(words, scales, shifts)
    if INTERPRET:
        dots = tl.dot(a.to(tl.float32), first.to(tl.float32)) + tl.dot(b.to(tl.float32), second.to(tl.float32))
    else:
        dots = tl.dot(b, second, tl.dot(a, first))
    dots = tl.maximum(dots, 0.0) * weights[None, :]
    dots = tl.reshape(dots, [keys, 4 * WIDTH, WIDTH, lanes * 2])
    dots = tl.reshape(tl.permute(dots, (0, 2, 1, 3)), [keys, WIDTH, 32])
    sums = tl.sum(dots, 2)  # in one chain: multiply-adds
    sums = tl.reshape(tl.broadcast_to(sums[:, :, None], [keys, WIDTH, lanes]), [keys, 4])
    return sums * ((scales & 0xFF0000) << 7).to(tl.float32, bitcast=True)


@triton.jit
def _write(pointers, values, mask):
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
    """Columns of a group's rows: e4m3 [64, columns] twice and their weights."""
    q, head = _columns(WIDTH)
    mine = (row + q).to(tl.int64) * 32 + head
    there = q < count
    k = tl.arange(0, 64)
    source = codes + mine[:, None] * 128 + k[None, :]
    first = tl.load(source, mask=there[:, None], other=0.0)
    second = tl.load(source + 64, mask=there[:, None], other=0.0)
    return tl.trans(first), tl.trans(second), tl.load(weights + mine, mask=there, other=0.0)


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
    first, second, w = _queries(codes, weights, row, count, WIDTH)
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
        values = _scores(words, scales, shifts, first, second, w, WIDTH)
        values = tl.where(entry[:, None] < visible[None, :], values, float("-inf"))
        best = tl.max(tl.reshape(values, [KEYS // 8, 8, 4]), 1)
        _write(scores[None, :] + entry[:, None], values, tl.broadcast_to(there[None, :], [KEYS, 4]))
        _write(
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
                cost = 1 if WIDTH == 1 else tl.where(count > 2, 3, 2)
                zero = behind - units * cost
                begin = (position - zero + cost - 1) // cost
                end = tl.minimum((last - zero + cost - 1) // cost, units)
                if WIDTH == 4:
                    if count > 2:
                        _paged_group(
                            codes, weights, pool, tables, plan, header, out, n, capacity, row, count, begin, end,
                            table_stride, PER_BLOCK, KEYS, 4, STAGES,
                        )  # fmt: skip
                    else:
                        _paged_group(
                            codes, weights, pool, tables, plan, header, out, n, capacity, row, count, begin, end,
                            table_stride, PER_BLOCK, KEYS, 2, STAGES,
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
                first, second, w = _queries(codes, weights, row, 1, 1)
                for tile in tl.range(begin * (_UNIT // KEYS), end * (_UNIT // KEYS), num_stages=STAGES):
                    i = tile * KEYS + key
                    entry = tl.load(chosen + i // 8, mask=i < offered, other=-1) * 8 + i % 8
                    there = (entry >= 0) & (entry < seen)
                    block = tl.load(table + entry // PER_BLOCK, mask=there, other=0).to(tl.int64)
                    base = pool + block * (PER_BLOCK * _WORDS)
                    inside = tl.where(there, entry, 0) % PER_BLOCK
                    words = tl.load((base + inside * 16)[:, None] + word[None, :])
                    scales = tl.load((base + PER_BLOCK * 16 + inside)[:, None] + 0 * u[None, :])
                    values = _scores(words, scales, shifts, first, second, w, 1)
                    values = tl.where(there[:, None], values, float("-inf"))
                    best = tl.max(tl.reshape(values, [KEYS // 8, 8, 4]), 1)
                    mine = tl.broadcast_to((u == 0)[None, :], [KEYS, 4])
                    _write((out + place * _UNIT + i)[:, None] + 0 * u[None, :], values, mine)
                    to = out + capacity + place * (_UNIT // 8) + tile * (KEYS // 8) + eighth
                    _write(to[:, None] + 0 * u[None, :], best, tl.broadcast_to((u == 0)[None, :], [KEYS // 8, 4]))
                position = behind
            row += 1
