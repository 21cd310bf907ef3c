"""Index keys and queries in the form that the scores' kernel multiplies: FP4 keys in pages, queries as e4m3.

A cache block holds the keys of `per_block` entries (128 / ratio) in per_block * 68 bytes: first the codes, 64 bytes a
key, then one 32-bit word of scales a key. Nothing is lost against the release's Q4 (32 values share a power of two;
model specification 2.0), with one exception that real keys never reach: a group more than 11 octaves below its
vector's largest group is rounded with a scale 11 octaves below it, since only so many octaves fit into one e4m3 code.

Codes: word 4 * t + w of a key (t = group of 32, w = 0..3) holds values 32 t + 8 w + 0..7. Value i's magnitude code lies
in bits 4i .. 4i+2, which is what the byte permute PRMT takes as its selector; the signs of values 0..3 lie in bits 7,
15, 23, 31 and those of 4..7 in bits 3, 11, 19, 27, which are the sign bits of the four e4m3 bytes, once as they stand
and once after a shift by 4.

Scale word: bits 4t .. 4t+3 hold c = e_t - e_max + 11 of group t (0 = 11 octaves below the largest, or all zero), bits
16..23 hold e_max - 6, e being the E8M0 byte. A value is e2m1 * 2^(c - 5) * 2^(byte - 127): the first two factors make
an e4m3 code (0.5 * 2^-5 is its smallest normal number, 6 * 2^6 = 384 still fits), the last is applied to the score.

Queries [32 heads, 128]: e4m3 codes whose position 32 w + 16 o + 4 t + b holds value 32 t + 8 w + 4 o + b, the order in
which a thread of the tensor core's quad meets the values of one group. The factor 2^(e_max - 6 - 127) of a head goes
into that head's weight: relu commutes with positive factors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference import quant
from deepinfer.kernels.triton.runtime import launch

HEADS, DIM = 32, 128
GROUPS, OCTAVES = 4, 11
CODE_BYTES, SCALE_BYTES = 64, 4
KEY_BYTES = CODE_BYTES + SCALE_BYTES
BIAS = 6  # 2^BIAS times the largest group's codes stay below 448


class IndexQueries(NamedTuple):
    """codes float8_e4m3fn [N, 32, 128] in the kernel's order; weights float32 [N, 32], the codes' factors in them."""

    codes: Tensor
    weights: Tensor


# -- on the device ------------------------------------------------------------------------------------------------


def insert_keys(keys: Tensor, pool: Tensor, rows: Tensor, per_block: int) -> None:
    """keys bf16 [G, 128], normed and rotated -> their places in pool uint8 [pool rows, 68]; rows int [G], block *
    per_block + number inside the block, all different but for those that nobody reads."""
    _check_pool(pool, per_block)
    count, block = keys.shape[0], 4
    launch(
        _insert_keys,
        (triton.cdiv(count, block),),
        keys.contiguous(),
        rows,
        pool.view(torch.int32),
        count,
        PER_BLOCK=per_block,
        BLOCK=block,
        num_warps=4,
    )


def index_queries(q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 1.0) -> IndexQueries:
    """q bf16 [N, 4096] or [N, 32, 128] as projected, weights float32 [N, 32] (times `scale`), cos, sin float32 [N, 32]
    -> rotated (values 64..127, rounded to bf16), quantised and folded."""
    rows = q.shape[0]
    codes = torch.empty((rows, HEADS, DIM), dtype=torch.float8_e4m3fn, device=q.device)
    folded = torch.empty((rows, HEADS), dtype=torch.float32, device=q.device)
    heads = 4
    launch(
        _index_queries,
        (rows, HEADS // heads),
        q.contiguous(),
        weights.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        codes.view(torch.int32),
        folded,
        scale,
        BLOCK=heads,
        num_warps=4,
        enable_fp_fusion=False,  # the reference rounds both products of a rotation
    )
    return IndexQueries(codes, folded)


@triton.jit
def _quantize_groups(x):
    """x float32 [R, 4, 32] -> e2m1 magnitudes 0..7 and signs 0..1 int32 [R, 4, 32], c int32 [R, 4], e_max - 6 [R]."""
    amax = tl.maximum(tl.max(tl.abs(x), 2), 6.0 * 2.0**-126)
    bits = (amax * 0.16666667163372040).to(tl.int32, bitcast=True)  # the float32 next to 1/6
    exponent = tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 1)  # [R, 4]
    least = tl.max(exponent, 1) - 11  # [R]
    used = tl.maximum(exponent, least[:, None])
    inverse = ((254 - used) << 23).to(tl.float32, bitcast=True)
    v = tl.abs(x) * inverse[:, :, None]
    # Round to nearest, ties to the even code: strictly above a midpoint below an odd code, at or above the others.
    code = (v > 0.25).to(tl.int32) + (v >= 0.75).to(tl.int32) + (v > 1.25).to(tl.int32) + (v >= 1.75).to(tl.int32)
    code += (v > 2.5).to(tl.int32) + (v >= 3.5).to(tl.int32) + (v > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    return code, sign, used - least[:, None], tl.maximum(least + 5, 0)


@triton.jit
def _insert_keys(keys, rows, pool, count, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < count
    k = tl.arange(0, 128)
    x = tl.load(keys + row.to(tl.int64)[:, None] * 128 + k[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    code, sign, c, exponent = _quantize_groups(tl.reshape(x, [BLOCK, 4, 32]))
    i = tl.arange(0, 8)
    sign_bit = tl.where(i < 4, 8 * i + 7, 8 * i - 29)
    code = tl.reshape(code, [BLOCK, 16, 8]) << (4 * i)[None, None, :]
    words = tl.sum(code | (tl.reshape(sign, [BLOCK, 16, 8]) << sign_bit[None, None, :]), 2)  # disjoint bits
    scales = tl.sum(c << (4 * tl.arange(0, 4))[None, :], 1) | (exponent << 16)
    target = tl.load(rows + row, mask=live, other=0).to(tl.int64)
    inside = target % PER_BLOCK
    base = pool + target // PER_BLOCK * (PER_BLOCK * 17)
    tl.store((base + inside * 16)[:, None] + tl.arange(0, 16)[None, :], words, mask=live[:, None])
    tl.store(base + PER_BLOCK * 16 + inside, scales, mask=live)


@triton.jit
def _index_queries(q, weights, cos, sin, codes, folded, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, 64)
    source = q + row * 4096 + (head * 128)[:, None] + (2 * pair)[None, :]
    even, odd = tl.load(source).to(tl.float32), tl.load(source + 1).to(tl.float32)
    turned = pair >= 32
    c = tl.load(cos + row * 32 + pair - 32, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + row * 32 + pair - 32, mask=turned, other=0.0)[None, :]
    x = _bf16(tl.join(even * c - odd * s, even * s + odd * c))  # [BLOCK, 64, 2]
    code, sign, c4, exponent = _quantize_groups(tl.reshape(x, [BLOCK, 4, 32]))
    byte = tl.where(code > 0, _e4m3_of_e2m1(code) + 8 * c4[:, :, None], 0) | (sign << 7)
    byte = tl.reshape(byte, [BLOCK, 4, 8, 4])  # [heads, t, 2 w + o, b]
    word = tl.sum(byte << (8 * tl.arange(0, 4))[None, None, None, :], 3)
    t, u = tl.arange(0, 4), tl.arange(0, 8)
    place = 4 * u[None, :] + t[:, None]  # position / 4 = 8 w + 4 o + t
    tl.store(codes + row * 1024 + (head * 32)[:, None, None] + place[None, :, :], word)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(folded + row * 32 + head, tl.load(weights + row * 32 + head) * scale * factor)


@triton.jit
def _e4m3_of_e2m1(code):
    """Magnitude codes 0..7 -> e4m3 codes of those values times 2^-5: 0, 8, 16, 20, 24, 28, 32, 36."""
    return tl.where(code < 2, 8 * code, 4 * code + 8)


@triton.jit
def _bf16(x):
    """float32 rounded to bfloat16's values, nearest even, as float32: the interpreter's own cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


# -- in plain PyTorch ---------------------------------------------------------------------------------------------


def key_rows(pool: Tensor, rows: Tensor, per_block: int) -> Tensor:
    """Bytes of the keys at `rows` int [...], codes then scales, uint8 [..., 68]: for checksums and copies."""
    return pool.view(-1)[_places(pool, rows, per_block)]


def put_key_rows(pool: Tensor, rows: Tensor, per_block: int, record: Tensor) -> None:
    """What `key_rows` gives, uint8 [..., 68], back to its places."""
    pool.view(-1)[_places(pool, rows, per_block)] = record


def pack_keys(values: Tensor) -> Tensor:
    """[..., 128] -> uint8 [..., 68] as `key_rows` gives them."""
    codes, c, exponent = _folded_codes(values)
    i = torch.arange(8, device=values.device)
    sign_bit = torch.where(i < 4, 8 * i + 7, 8 * i - 29)
    codes = codes.unflatten(-1, (-1, 8)).long()
    words = (((codes & 7) << (4 * i)) | ((codes >> 3) << sign_bit)).sum(-1)  # [..., 16]
    t = torch.arange(GROUPS, device=values.device)
    scales = (c.long() << (4 * t)).sum(-1, keepdim=True) | (exponent.long().unsqueeze(-1) << 16)
    return torch.cat((words, scales), -1).to(torch.int32).contiguous().view(torch.uint8)


def unpack_keys(record: Tensor) -> Tensor:
    """uint8 [..., 68] -> float32 [..., 128]."""
    numbers = record.contiguous().view(torch.int32)
    words, scales = numbers[..., :16].unsqueeze(-1), numbers[..., 16:]
    i = torch.arange(8, device=record.device)
    sign_bit = torch.where(i < 4, 8 * i + 7, 8 * i - 29)
    codes = ((words >> (4 * i)) & 7) | (((words >> sign_bit) & 1) << 3)  # [..., 16, 8]
    t = torch.arange(GROUPS, device=record.device)
    exponent = ((scales >> 16) & 0xFF) + ((scales >> (4 * t)) & 15) - 5
    values = quant.FP4_TABLE.to(record.device)[codes.flatten(-2).long()].unflatten(-1, (GROUPS, -1)).double()
    return (values * torch.exp2(exponent.double() - 127).unsqueeze(-1)).flatten(-2).float()


def pack_queries(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries [..., 128] -> codes float8_e4m3fn [..., 128] in the kernel's order and factors float32 [...]."""
    codes, c, exponent = _folded_codes(values)
    magnitude = (codes & 7).int()
    base = torch.where(magnitude < 2, 8 * magnitude, 4 * magnitude + 8)
    byte = torch.where(magnitude > 0, base + 8 * c.int().repeat_interleave(32, -1), 0) | ((codes >> 3).int() << 7)
    ordered = byte.unflatten(-1, (4, 8, 4)).transpose(-3, -2).flatten(-3)  # t, 2 w + o, b -> 2 w + o, t, b
    factor = (exponent.int() << 23).view(torch.float32)
    return ordered.to(torch.uint8).contiguous().view(torch.float8_e4m3fn), factor


def query_values(codes: Tensor) -> Tensor:
    """Codes of `IndexQueries` float8_e4m3fn [..., 128] -> float32 [..., 128] in the values' own order."""
    return codes.float().unflatten(-1, (8, 4, 4)).transpose(-3, -2).flatten(-3)


def _folded_codes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., 128] -> e2m1 codes uint8 [..., 128], c [..., 4], and e_max - 6 [...] (at least 0)."""
    _, scale = quant.quantize_fp4_e8m0(values)
    exponent = quant.float_to_e8m0(scale).int()
    least = exponent.amax(-1, keepdim=True) - OCTAVES
    used = torch.maximum(exponent, least)
    inverse = ((254 - used) << 23).view(torch.float32)
    codes = quant.fp4_codes(values.float().unflatten(-1, (GROUPS, -1)) * inverse.unsqueeze(-1)).flatten(-2)
    return codes, used - least, (least.squeeze(-1) + OCTAVES - BIAS).clamp_min(0)


def _places(pool: Tensor, rows: Tensor, per_block: int) -> Tensor:
    """Offsets of the 68 bytes of every row in the flat pool, int64 [..., 68]."""
    _check_pool(pool, per_block)
    rows = rows.long().unsqueeze(-1)
    base, inside = rows // per_block * (per_block * KEY_BYTES), rows % per_block
    code = base + inside * CODE_BYTES + torch.arange(CODE_BYTES, device=pool.device)
    scale = base + per_block * CODE_BYTES + inside * SCALE_BYTES + torch.arange(SCALE_BYTES, device=pool.device)
    return torch.cat((code, scale), -1)


def _check_pool(pool: Tensor, per_block: int) -> None:
    if pool.dtype != torch.uint8 or pool.shape[1:] != (KEY_BYTES,) or pool.shape[0] % per_block:
        raise ValueError(
            f"a pool of index keys is uint8 [blocks * {per_block}, {KEY_BYTES}], not {pool.dtype} {list(pool.shape)}"
        )
