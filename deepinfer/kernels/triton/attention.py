"""Attention of every query over its own list of packed records: one program a row, all heads, 64 keys at a time.

All heads of a row share their keys, so a tile of keys is unpacked once into shared memory and serves both products,
logits = Q K^T and out += P K. Logits, maxima and sums are float32; probabilities are rounded to bf16 before the second
product, as the release does it (model specification 2.4, 2.7).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.records import compressed_bytes, window_bytes
from deepinfer.kernels.triton.attention_keys import compressed_tile, prefetch_records, window_tile
from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.runtime import INTERPRET, launch, num_sms

KEYS = 64  # a tile; also the official block of the online softmax
LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
_KEYS_UNIT = tl.constexpr(2.0**64)  # tiles of keys hold values times 2^-64
_NO_MAXIMUM = tl.constexpr(-1e30)  # below every logit, but finite: differences of maxima stay numbers


def serves(q: Tensor, window_pool: Tensor, kv_pool: Tensor | None) -> bool:
    """Whether `sparse_attention` takes these: bf16 queries of 8, 16, 32 or 64 heads of 128, 256 or 512 dims, pools of
    packed records."""
    heads, size = q.shape[1:]
    if q.dtype != torch.bfloat16 or heads not in (8, 16, 32, 64) or size not in (128, 256, 512):
        return False
    pools = [(window_pool, window_bytes(size))] + ([] if kv_pool is None else [(kv_pool, compressed_bytes(size))])
    return all(p.dtype == torch.uint8 and p.shape[1] == width and p.is_contiguous() for p, width in pools)


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    invariant: bool = False,
) -> Tensor:
    """q bf16 [N, heads, D] in split order (`rope.split_order`) over window_pool uint8 [R, D + D / 32] at window_indices
    [N, W], then kv_pool uint8 [R2, D / 2 + D / 16] at kv_indices [N, K]; both or neither of the last two. -> bf16
    [N, heads, D] in split order.

    Indices int32 or int64, -1 = empty wherever it stands. sink float32 [heads] joins the denominator unscaled and has
    no value. A row with no key gives exactly 0. Records that no index names are not read.

    A few rows do not fill the device, so their lists are cut into parts that are put together by a second launch; how
    many depends on N. `invariant`: never, so that a row's bits do not depend on the rows beside it.
    """
    if not serves(q, window_pool, kv_pool):
        raise ValueError(f"queries {q.dtype} {tuple(q.shape)} over these pools are not served (see `serves`)")
    if kv_pool is None or kv_indices is None:
        kv_pool, kv_indices = window_pool, window_indices[:, :0]
    rows, heads, size = q.shape
    q = q.contiguous()
    window_tiles = triton.cdiv(window_indices.shape[1], KEYS)
    tiles = window_tiles + triton.cdiv(kv_indices.shape[1], KEYS)
    part = tiles if invariant else part_tiles(rows, tiles, num_sms(q))
    parts = max(1, triton.cdiv(tiles, max(part, 1)))
    out = torch.empty_like(q)
    partial = q.new_empty(rows, parts, heads, size, dtype=torch.float32) if parts > 1 else out
    state = q.new_empty(2, rows, parts, heads, dtype=torch.float32) if parts > 1 else sink
    launch(
        _attention,
        (rows, parts),
        *(q, window_pool, window_indices, kv_pool, kv_indices, sink, partial, state),
        *(scale * LOG2E * 2.0**64, window_indices.shape[1], kv_indices.shape[1], window_tiles, tiles, part),
        *(window_indices.stride(0), kv_indices.stride(0), rows * parts * heads),
        HEADS=heads,
        TILE_HEADS=max(16, heads),
        D=size,
        B=KEYS,
        SPLIT=parts > 1,
        num_warps=8 if heads == 64 else 4,
    )
    if parts > 1:
        launch(
            _merge,
            (rows, heads),
            *(partial, state, sink, out, rows * parts * heads),
            PARTS=parts,
            HEADS=heads,
            D=size,
            num_warps=1,
        )
    return out


def part_tiles(rows: int, tiles: int, sms: int) -> int:
    """Tiles of a part: as many parts as fill the device once, of equal length but for the last. Measured on an H200
    with 10 tiles, parts and whole lists: 1 row 12 and 45 us, 16 rows 20 and 45, 64 rows 37 and 51."""
    return triton.cdiv(max(tiles, 1), max(1, min(tiles, sms // max(rows, 1))))


@triton.jit
def _attention(
    q, window_pool, window_indices, kv_pool, kv_indices, sink, out, state, logit_scale,
    window, selected, window_tiles, tiles, part, window_stride, kv_stride, states,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    window_indices += n * window_stride
    kv_indices += n * kv_stride
    head = tl.arange(0, TILE_HEADS)
    here = head < HEADS  # a product takes 16 rows at least
    places = head[:, None] * D + tl.arange(0, D)[None, :]
    top = tl.full([TILE_HEADS], _NO_MAXIMUM, tl.float32)
    total = tl.zeros([TILE_HEADS], tl.float32)
    acc = tl.zeros([TILE_HEADS, D], tl.float32)
    first = 0
    if SPLIT:
        first = tl.program_id(1) * part
        tiles = tl.minimum(tiles, first + part)
    lists = window_indices, kv_indices, window, selected, window_tiles
    next_rows = tile_rows(lists, first, B)
    _prefetch_tile(window_pool, kv_pool, next_rows, first < window_tiles, D)  # before the 64 KB of queries
    if TILE_HEADS == HEADS:
        queries = tl.load(q + n * HEADS * D + places)
    else:
        queries = tl.load(q + n * HEADS * D + places, mask=here[:, None], other=0.0)
    if INTERPRET:
        queries = queries.to(tl.float32)
    for tile in tl.range(first, tiles, num_stages=1):  # the compiler's own pipelines only cost registers here
        rows = next_rows
        next_rows = tile_rows(lists, tile + 1, B)
        in_window = tile < window_tiles
        # One loop over both kinds: of two, the second was compiled with three slow moves for every wgmma.
        if in_window:  # noqa: SIM108 (a ternary is for scalars)
            keys = window_tile(window_pool, rows, B, D)
        else:
            keys = compressed_tile(kv_pool, rows, B, D)
        _prefetch_tile(window_pool, kv_pool, next_rows, tile + 1 < window_tiles, D)
        top, total, acc = attend(queries, keys, rows >= 0, tile < tiles, top, total, acc, logit_scale)
    if SPLIT:
        block = n * tl.num_programs(1) + tl.program_id(1)
        tl.store(out + block * HEADS * D + places, acc * _KEYS_UNIT, mask=here[:, None])
        tl.store(state + block * HEADS + head, top, mask=here)
        tl.store(state + states + block * HEADS + head, total, mask=here)
    else:
        total += tl.exp2(tl.load(sink + head, mask=here, other=0.0) * _LOG2E - top)
        tl.store(out + n * HEADS * D + places, quotient(acc * _KEYS_UNIT, total), mask=here[:, None])


@triton.jit
def tile_rows(lists, tile, B: tl.constexpr):
    """Pool rows int32 [B] of a tile, window tiles first; -1 behind the end of a list and behind the last tile."""
    window_indices, kv_indices, window, selected, window_tiles = lists
    in_window = tile < window_tiles
    indices = window_indices if in_window else kv_indices
    place = tl.where(in_window, tile, tile - window_tiles) * B + tl.arange(0, B)
    rows = tl.load(indices + place, mask=place < tl.where(in_window, window, selected), other=-1)
    return rows.to(tl.int32)


@triton.jit
def _prefetch_tile(window_pool, kv_pool, rows, in_window, D: tl.constexpr):
    if in_window:
        prefetch_records(window_pool, rows, D + D // 32)
    else:
        prefetch_records(kv_pool, rows, D // 2 + D // 16)


@triton.jit
def attend(queries, keys, real, always, top, total, acc, logit_scale):
    """One tile of the online softmax: queries [H, D], keys [B, D], real bool [B] -> the new state.

    `always` is true and hides that the second product hangs on the first. A compiler that sees two chained products
    lets every warp group compute all logits, which costs twice the first product and more registers than there are.
    """
    logits = tl.dot(queries, keys.T)
    logits = tl.where(real[None, :], logits * logit_scale, float("-inf"))
    new_top = top
    probabilities = tl.zeros(logits.shape, keys.dtype)
    rescale = top
    if always:
        new_top = tl.maximum(top, tl.max(logits, 1))
        exact = tl.exp2(logits - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(exact, 1)  # the denominator keeps float32 probabilities
        probabilities = to_type(exact, tl.bfloat16).to(keys.dtype)
    return new_top, total, tl.dot(probabilities, keys, acc * rescale[:, None])


@triton.jit
def quotient(numerator, denominator):
    """bf16 [H, D]: 0 where nothing, not even a sink, is in the denominator [H]."""
    factor = tl.where(denominator > 0.0, 1.0 / denominator, 0.0)
    return to_type(numerator * factor[:, None], tl.bfloat16)


@triton.jit
def _merge(partial, state, sink, out, states, PARTS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """The parts of one head's list, in their order: float32 [PARTS, D] and their maxima and sums."""
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = n * PARTS * HEADS + head
    top = tl.load(state + first)
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.load(state + first + part * HEADS))
    total = tl.exp2(tl.load(sink + head) * _LOG2E - top)
    acc = tl.zeros([D], tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp2(tl.load(state + first + part * HEADS) - top)
        total += weight * tl.load(state + states + first + part * HEADS)
        acc += weight * tl.load(partial + (first + part * HEADS) * D + tl.arange(0, D))
    factor = tl.where(total > 0.0, 1.0 / total, 0.0)
    tl.store(out + (n * HEADS + head) * D + tl.arange(0, D), to_type(acc * factor, tl.bfloat16))
