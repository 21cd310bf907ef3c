"""Index scores of any shape of indexer over keys that are unpacked, each alone: for batch invariance where the paged
kernels (`index_scores.py`) do not serve the shape. Multiplied and added on the ordinary units, in the steps and
roundings of `reference/indexer.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.quantize import to_type
from deepinfer.kernels.triton.runtime import launch

ENTRIES = 32  # of a program


@triton.jit
def _scores_kernel(
    queries, keys, weights, out, rows, entries, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    row, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    d = tl.arange(0, WIDTH)
    inside = entry < entries
    places = (batch * entries + entry)[:, None] * D + d[None, :]
    key = tl.load(keys + places, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    own = batch * rows + row
    dtype: tl.constexpr = queries.dtype.element_ty
    total = tl.zeros((ENTRIES,), tl.float32)
    for head in range(HEADS):
        query = tl.load(queries + (own * HEADS + head) * D + d, mask=d < D, other=0.0).to(tl.float32)
        dot = tl.maximum(to_type(tl.sum(key * query[None, :], axis=1), dtype).to(tl.float32), 0.0)
        weight = tl.load(weights + own * HEADS + head).to(tl.float32)
        total += to_type(dot * weight, dtype).to(tl.float32)
    tl.store(out + own * entries + entry, to_type(total, dtype).to(tl.float32), mask=inside)


def plain_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """queries [B, T, H, D] and weights [B, T, H] of one dtype, keys [B, M, D] any float dtype -> float32 [B, T, M]: the
    weighted sum over heads of relu(q . k), each step rounded to the queries' dtype."""
    batch, rows, heads, size = queries.shape
    entries = keys.shape[1]
    out = torch.empty(batch, rows, entries, device=queries.device)
    launch(
        _scores_kernel,
        (triton.cdiv(entries, ENTRIES), rows, batch),
        *(queries.contiguous(), keys.contiguous(), weights.contiguous(), out, rows, entries),
        HEADS=heads,
        D=size,
        WIDTH=triton.next_power_of_2(size),
        ENTRIES=ENTRIES,
        num_warps=4,
        enable_fp_fusion=False,  # a product and its sum round apart, in whatever order they are compiled
    )
    return out
