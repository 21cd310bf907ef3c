"""What batch invariance compiles beside the rest for sm_90, at the released model's shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfer.kernels.triton.bf16_linear import bf16_linear
from deepinfer.kernels.triton.index_scores_plain import plain_scores

WEIGHTS = {"head": (129280, 5120), "router": (384, 5120), "compressor": (512, 5120), "index_wk": (128, 512)}


def product(name: str, rows: int) -> Callable[[], None]:
    outputs, width = WEIGHTS[name]

    def compile_it() -> None:
        x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
        bf16_linear(x, torch.empty(outputs, width, dtype=torch.bfloat16, device="meta"))

    return compile_it


def scores() -> None:
    """At nano's shape: the released one has kernels that need no flag."""
    queries = torch.empty(1, 256, 8, 64, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(1, 500, 64, dtype=torch.float32, device="meta")
    plain_scores(queries, keys, torch.empty(1, 256, 8, dtype=torch.bfloat16, device="meta"))


PRODUCTS = {f"bf16_{name}_{rows}": product(name, rows) for name in WEIGHTS for rows in (1, 64, 384)}
CASES: dict[str, Callable[[], None]] = {**PRODUCTS, "plain_scores": scores}
WGMMA = set(PRODUCTS)
