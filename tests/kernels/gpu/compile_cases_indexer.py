"""What of the indexer is compiled for sm_90, at the released model's shapes: room for a million tokens, both ratios."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.triton import index_keys, indexer
from deepinfer.kernels.triton.indexer import IndexQueries, StepPlan

TOKENS, TOPK, CANDIDATES = 1 << 20, 512, 2048


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def plans(rows: int, chunks: int, ratio: int, candidates: int | None = None, tokens: int = TOKENS) -> StepPlan:
    return indexer.plan_step(
        meta(rows), meta(rows), meta(rows), chunks=chunks, ratio=ratio, topk=TOPK, max_entries=tokens // ratio,
        candidate_blocks=candidates,
    )  # fmt: skip


def choice(rows: int, chunks: int, ratio: int, *, publish: int = 0, inside: bool = False, tokens: int = TOKENS) -> None:
    queries = IndexQueries(meta(rows, 32, 128, dtype=torch.float8_e4m3fn), meta(rows, 32, dtype=torch.float32))
    per_block = 128 // ratio
    indexer.choose_entries(
        queries, meta(1024 * per_block, 68, dtype=torch.uint8), meta(chunks + 1, TOKENS // 128), per_block,
        plans(rows, chunks, ratio, CANDIDATES if inside else None, tokens), publish=publish,
        candidates=meta(rows, CANDIDATES, dtype=torch.int32) if inside else None,
    )  # fmt: skip


def queries(rows: int) -> None:
    angles = meta(rows, 32, dtype=torch.float32)
    index_keys.index_queries(meta(rows, 4096, dtype=torch.bfloat16), angles, angles, angles)


def keys(rows: int, per_block: int) -> None:
    pool = meta(1024 * per_block, 68, dtype=torch.uint8)
    index_keys.insert_keys(meta(rows, 128, dtype=torch.bfloat16), pool, meta(rows), per_block)


SCORED: dict[str, Callable[[], None]] = {
    "choose entries, decode of 64, ratio 1": lambda: choice(64, 64, 1),
    "choose entries, decode of 64, ratio 2": lambda: choice(64, 64, 2),
    "choose entries, verify 64 x 6, ratio 1": lambda: choice(384, 64, 1),
    "choose entries, verify 64 x 6, ratio 2": lambda: choice(384, 64, 2),
    "choose entries, prefill of 4,096, ratio 1": lambda: choice(4096, 1, 1),
    "choose entries, prefill of 4,096, ratio 2": lambda: choice(4096, 1, 2),
    "choose entries inside candidates, decode of 64": lambda: choice(64, 64, 1, inside=True),
    "choose entries inside candidates, verify 64 x 6": lambda: choice(384, 64, 1, inside=True),
    "choose entries inside candidates, verify 64 x 6, few entries": lambda: choice(
        384, 64, 1, inside=True, tokens=32768
    ),
    "choose entries and candidates, decode of 64": lambda: choice(64, 64, 1, publish=CANDIDATES),
}
CASES: dict[str, Callable[[], None]] = SCORED | {
    "index queries": lambda: queries(64),
    "index keys, ratio 1": lambda: keys(64, 128),
    "index keys, ratio 2": lambda: keys(64, 64),
}
WGMMA = set(SCORED)
# Three loads before the loop, for a program more an SM (single rows, gathered ones); the plan of groups of rows.
STACK = {
    "choose entries, decode of 64, ratio 1": 16,
    "choose entries, decode of 64, ratio 2": 16,
    "choose entries, verify 64 x 6, ratio 1": 8,
    "choose entries, verify 64 x 6, ratio 2": 8,
    "choose entries, prefill of 4,096, ratio 2": 8,
    "choose entries inside candidates, decode of 64": 8,
    "choose entries inside candidates, verify 64 x 6": 8,
    "choose entries inside candidates, verify 64 x 6, few entries": 8,
    "choose entries and candidates, decode of 64": 16,
}
