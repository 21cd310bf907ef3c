"""mHC, Engram and compressor kernels at the shapes of the full-size model, for the compile test."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.triton import compressor, engram, hyper

D = 5120
META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def bf16(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.bfloat16)


def step(rows: int, *, updated: bool) -> None:
    w = HyperWeights(empty(4 * D, 24), empty(3), empty(24), empty(D), 20, 1e-6, 1e-20)
    update = (bf16(rows, D), empty(rows, 4), empty(rows, 4, 4)) if updated else None
    hyper.hyper_step_quantized(bf16(rows, 4, D), update, empty(rows, 4), w)
    hyper.hyper_step(bf16(rows, 4, D), update, empty(rows, 4), w)


def inject(dead: bool) -> None:
    mask = empty(64, dtype=torch.bool) if dead else None
    engram.engram_inject(bf16(64, 4, D), bf16(64, 5 * D), empty(4, D), mask, 1e-20)


def hashes(mapped: bool) -> None:
    long = [empty(*shape, dtype=torch.int64) for shape in ((64, 4), (2, 4), (2, 3, 8), (2, 24), (129280,))]
    engram.ngram_rows(*long[:4], pad=2, token_map=long[4] if mapped else None)


def table_rows(gathered: bool) -> None:
    rows = 64 * 24 if gathered else 384_006_168
    table = empty(rows, 256, dtype=torch.uint8), empty(rows, 8, dtype=torch.uint8)
    ids = None if gathered else empty(64, 24, dtype=torch.int64)
    problems = empty(1, dtype=torch.int32)
    engram.fold_table_rows(*table, ids, problems, columns=24, out=engram.empty_rows(64, 24 * 256, META))


def close(index: torch.dtype) -> None:
    numbers = [empty(64, dtype=index) for _ in range(3)]
    tables = empty(65, 8192, dtype=torch.int64)
    compressor.close_pairs_rows(
        empty(64, 2, 512), *numbers, empty(65, 4, 2, 512), tables, empty(512), 1e-20, per_block=64
    )
    compressor.compress_pairs(empty(64, 2, 512), empty(64, 2, 512), empty(512), 1e-20, torch.bfloat16)


CASES: dict[str, Callable[[], None]] = {
    **{
        f"hyper_step {rows}{' updated' if updated else ''}": lambda rows=rows, updated=updated: step(
            rows, updated=updated
        )
        for rows in (64, 192, 384, 4096)
        for updated in (False, True)
    },
    "hyper_expand": lambda: [hyper.hyper_expand(bf16(64, 4, D), bf16(64, D), empty(64, 4), empty(64, 4, 4)), None][1],
    "hyper_collapse_norm": lambda: [hyper.hyper_collapse_norm(bf16(64, 4, D), empty(64, 4), empty(D), 1e-20), None][1],
    "engram_inject": lambda: inject(dead=False),
    "engram_inject dead": lambda: inject(dead=True),
    "ngram_rows": lambda: hashes(mapped=True),
    "fold_table_rows": lambda: table_rows(gathered=False),
    "fold_table_rows gathered": lambda: table_rows(gathered=True),
    "close_pairs_rows": lambda: close(torch.int64),
    "close_pairs_rows int32": lambda: close(torch.int32),
}
WGMMA = {name for name in CASES if name.startswith("hyper_step")}
