"""Engram on the device (model specification 2.3): rows of the n-gram hash, table rows as operands of wkv, gate and
injection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.quant import FP8_GROUP
from deepinfer.kernels.triton.quantize import Fp8Rows, fold_tile
from deepinfer.kernels.triton.runtime import launch

_GROUP = tl.constexpr(FP8_GROUP)
HASH_ROWS = 32  # tokens of a program
INJECT_WARPS = 8
NAN, OUTSIDE = 1, 2  # what `fold_table_rows` leaves in a problem word
_NAN, _OUTSIDE = tl.constexpr(NAN), tl.constexpr(OUTSIDE)


@triton.jit(do_not_specialize=["tokens"])
def _hash_kernel(
    history, token_map, multipliers, primes, offsets, out, tokens, pad,
    MAPPED: tl.constexpr, ORDERS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, layer)."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    layer = tl.program_id(1)
    live = row < tokens
    head = tl.arange(0, LANES)
    there = head < HEADS
    blocked = row < 0  # no token is, yet
    running = tl.zeros((R,), tl.int64)
    for back in tl.static_range(ORDERS + 1):
        ids = tl.load(history + row.to(tl.int64) * (ORDERS + 1) + back, mask=live, other=-1)
        blocked = blocked | (ids < 0)
        if MAPPED:
            ids = tl.load(token_map + ids, mask=live & (ids >= 0), other=0)
        ids = tl.where(blocked, pad, ids).to(tl.int64)
        running = running ^ (ids * tl.load(multipliers + layer * (ORDERS + 1) + back))
        if back > 0:
            column = (back - 1) * HEADS + head
            at = layer * (ORDERS * HEADS) + column
            prime = tl.load(primes + at, mask=there, other=1)
            bucket = running[:, None] % prime[None, :] + tl.load(offsets + at, mask=there, other=0)[None, :]
            target = out + (layer * tokens + row)[:, None].to(tl.int64) * (ORDERS * HEADS) + column[None, :]
            tl.store(target, bucket, mask=live[:, None] & there[None, :])


def ngram_rows(
    history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int, token_map: Tensor | None = None
) -> Tensor:
    """Table rows of every token for all Engram layers, one launch: int64 [layers, N, orders * heads].

    history: int64 [N, orders + 1], column s the token s positions back, -1 ends the look-back: raw token ids where a
    token_map (int64 [vocabulary]) is given, compressed ids without. multipliers int64 [layers, orders + 1] (products
    below 2^63), primes int64 [layers, orders, heads], offsets int64 [layers, orders * heads].
    """
    layers, orders, heads = primes.shape
    tokens = history.shape[0]
    out = torch.empty(layers, tokens, orders * heads, dtype=torch.int64, device=history.device)
    launch(
        _hash_kernel,
        (triton.cdiv(tokens, HASH_ROWS), layers),
        *(history.contiguous(), history if token_map is None else token_map),
        *(multipliers.contiguous(), primes.contiguous(), offsets.contiguous(), out, tokens, pad),
        MAPPED=token_map is not None,
        ORDERS=orders,
        HEADS=heads,
        LANES=triton.next_power_of_2(heads),
        R=HASH_ROWS,
        num_warps=4,
    )
    return out


@triton.jit
def _e4m3_values(codes):
    """uint8 e4m3 codes -> float32. By hand, so that the interpreter agrees with hardware; NaN codes become +-480."""
    magnitude = (codes & 0x7F).to(tl.int32)
    # exponent field and mantissa moved into a float32, 2^120 too small; exact for denormals, too
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(codes >= 0x80, -value, value)


@triton.jit(do_not_specialize=["table_rows"])
def _fold_rows_kernel(
    table_codes, table_scales, ids, codes, scale, problems, table_rows, stride,
    COLUMNS: tl.constexpr, HEAD: tl.constexpr, GROUPS: tl.constexpr, SEQUENTIAL: tl.constexpr,
):  # fmt: skip
    """Program: a token, whose COLUMNS table rows are GROUPS groups of 32 (padded)."""
    token = tl.program_id(0)
    per_row: tl.constexpr = HEAD // _GROUP
    group = tl.arange(0, GROUPS)
    column = group // per_row
    there = column < COLUMNS
    if SEQUENTIAL:
        row = (token * COLUMNS + column).to(tl.int64)
    else:
        row = tl.load(ids + token.to(tl.int64) * stride + column, mask=there, other=0).to(tl.int64)
    fine = there & (row >= 0) & (row < table_rows)
    lane = tl.arange(0, _GROUP)
    at = (row * HEAD + group % per_row * _GROUP)[:, None] + lane[None, :]
    raw = tl.load(table_codes + at, mask=fine[:, None], other=0)
    exponent = tl.load(table_scales + row * per_row + group % per_row, mask=fine, other=127).to(tl.int32)
    worst = tl.max((raw & 0x7F).to(tl.int32), axis=1)  # [GROUPS]
    damaged = (worst == 0x7F) | (exponent == 255)
    problem = tl.max(tl.where(damaged, _NAN, 0) | tl.where(there & (fine == 0), _OUTSIDE, 0), axis=0)
    if problem > 0:
        tl.store(problems, problem)  # a plain store: whoever is last, some problem stands there
    # 2^(byte - 127); byte 0 would be a denormal, whose values are far below the floor of Q8
    step = (tl.where(damaged, 127, exponent) << 23).to(tl.float32, bitcast=True)
    folded, top = fold_tile(_e4m3_values(raw) * step[:, None])
    out = codes + token.to(tl.int64) * (COLUMNS * HEAD) + group[:, None] * _GROUP + lane[None, :]
    tl.store(out, folded, mask=there[:, None])
    tl.store(scale + token, top)


def fold_table_rows(
    table_codes: Tensor,
    table_scales: Tensor,
    ids: Tensor | None,
    problems: Tensor,
    *,
    columns: int,
    out: Fp8Rows,
) -> Fp8Rows:
    """Rows of an Engram table, side by side per token, as the product with wkv takes them: the same codes as Q8 of the
    values, folded per token. -> out: codes [N, columns * head_dim], scale [N].

    table_codes uint8 [rows, head_dim] and table_scales uint8 [rows, head_dim / 32]: of the device, or in page-locked
    memory of the host. ids int64 [N, columns], or None: rows 0, 1, 2 ... in order, gathered before. problems int32 [1],
    of the device or page-locked: set to NAN or OUTSIDE where a row that was read holds NaN or is none of the table (its
    values then count as something finite).
    """
    table_rows, head_dim = table_codes.shape
    launch(
        _fold_rows_kernel,
        (out.codes.shape[0],),
        *(table_codes, table_scales, problems if ids is None else ids, *out, problems, table_rows),
        ids.stride(0) if ids is not None else 0,
        COLUMNS=columns,
        HEAD=head_dim,
        GROUPS=triton.next_power_of_2(columns * head_dim // FP8_GROUP),
        SEQUENTIAL=ids is None,
        num_warps=8 if columns * head_dim > 2048 else 4,
    )
    return out


def empty_rows(tokens: int, width: int, device: torch.device) -> Fp8Rows:
    """Room for the result of `fold_table_rows`."""
    codes = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(codes, torch.empty(tokens, dtype=torch.float32, device=device))


@triton.jit
def _inject_kernel(
    stream, kv, weight, dead, out, eps, D: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, HAS_DEAD: tl.constexpr
):  # fmt: skip
    """Program: a token. Its stream stays in registers (40 KB of bf16: 40 each of 256 threads) until the gate is known.
    The weights are every token's, so they are the ones to stay in the first-level cache."""
    token = tl.program_id(0).to(tl.int64)
    copy = tl.arange(0, 4)[:, None]
    lane = tl.arange(0, C)[None, :]
    squares = tl.zeros((4, C // 8), tl.float32)
    key_squares = tl.zeros((4, C // 8), tl.float32)
    dots = tl.zeros((4, C // 8), tl.float32)
    tiles = ()
    for tile in tl.static_range(TILES):
        inside = tile * C + lane < D
        at = copy * D + tile * C + lane
        kept = tl.load(stream + token * (4 * D) + at, mask=inside, other=0.0, eviction_policy="evict_first")
        k = tl.load(kv + token * (5 * D) + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(weight + at, mask=inside, other=0.0, eviction_policy="evict_last")
        x = kept.to(tl.float32)
        tiles += (kept,)  # type: ignore[assignment]
        # a thread's own eight first: three sums take 6 registers instead of 48
        squares += tl.sum(tl.reshape(x * x, (4, C // 8, 8)), axis=2)
        key_squares += tl.sum(tl.reshape(k * k, (4, C // 8, 8)), axis=2)
        dots += tl.sum(tl.reshape(x * w * k, (4, C // 8, 8)), axis=2)
    rho = tl.rsqrt(tl.sum(squares, axis=1) / D + eps) * tl.rsqrt(tl.sum(key_squares, axis=1) / D + eps)
    d = tl.sum(dots, axis=1) * rho * (1.0 / tl.sqrt(D * 1.0))  # [4]
    root = tl.sqrt(tl.maximum(tl.abs(d), 1e-6))
    # copysign: +0 counts as positive, -0 as negative
    gate = tl.sigmoid(tl.where(d.to(tl.int32, bitcast=True) < 0, -root, root))
    if HAS_DEAD:
        gate = tl.where(tl.load(dead + token) != 0, 0.0, gate)
    gate = gate[:, None]
    for tile in tl.static_range(TILES):
        inside = tile * C + lane < D
        v = tl.load(kv + token * (5 * D) + 4 * D + tile * C + lane, mask=inside, other=0.0).to(tl.float32)
        new = (tiles[tile].to(tl.float32) + gate * v).to(out.dtype.element_ty)
        tl.store(out + token * (4 * D) + copy * D + tile * C + lane, new, mask=inside)


def engram_inject(stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float) -> Tensor:
    """stream bf16 [N, 4, D], kv bf16 [N, 5 * D] (four keys, then the value), weight float32 [4, D], dead bool [N] or
    None -> the stream with the gated value added to every copy of every live token. A token is added up in an order of
    its own width alone."""
    tokens, copies, width = stream.shape
    if copies != 4:
        raise ValueError(f"a stream of {copies} copies: this kernel takes 4")
    out = torch.empty_like(stream, memory_format=torch.contiguous_format)
    tile = min(1024, triton.next_power_of_2(width))
    launch(
        _inject_kernel,
        (tokens,),
        *(stream.contiguous(), kv.contiguous(), weight.contiguous()),
        *(kv if dead is None else dead.contiguous().view(torch.uint8), out, eps),
        D=width,
        C=tile,
        TILES=triton.cdiv(width, tile),
        HAS_DEAD=dead is not None,
        num_warps=INJECT_WARPS,
    )
    return out
