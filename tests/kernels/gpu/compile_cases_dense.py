"""What of the dense operations is compiled for sm_90, at the released model's shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.triton import dense, grouped_output, norm, quantize, rope
from deepinfer.kernels.triton.quantize import Fp8Rows

WEIGHTS = {
    "wq_a_wkv": (1792, 5120),
    "wq_b": (32768, 1280),
    "index_wq_b": (4096, 1280),
    "wo_b": (5120, 8192),
    "shared_w1_w3": (4608, 5120),
    "shared_w2": (5120, 2304),
    "engram_wkv": (25600, 6144),
}
ROWS = (1, 64, 384, 512)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(count: int, width: int) -> Fp8Rows:
    return Fp8Rows(meta(count, width, dtype=torch.float8_e4m3fn), meta(count, dtype=torch.float32))


def weight(outputs: int, width: int) -> tuple[Tensor, Tensor]:
    return meta(outputs, width, dtype=torch.float8_e4m3fn), meta(outputs, dtype=torch.float32)


def angles(count: int) -> tuple[Tensor, Tensor]:
    return meta(count, 32, dtype=torch.float32), meta(count, 32, dtype=torch.float32)


def product(name: str, count: int) -> Callable[[], None]:
    outputs, width = WEIGHTS[name]
    return lambda: (dense.fp8_linear(rows(count, width), *weight(outputs, width)), None)[1]


def queries(count: int) -> None:
    dense.fp8_queries(rows(count, 1280), *weight(*WEIGHTS["wq_b"]), *angles(count), 512)


def output(count: int) -> None:
    grouped_output.grouped_output(meta(count, 64, 512), *weight(8192, 4096), *angles(count), 8)


def norms(splits: int) -> None:
    merged = meta(splits, 64, 1792, dtype=torch.float32) if splits else meta(64, 1792)
    q_norm, kv_norm = meta(1280, dtype=torch.float32), meta(512, dtype=torch.float32)
    norm.query_norms(merged, q_norm, kv_norm, 1e-20, *angles(64))
    norm.query_norms(merged, q_norm, kv_norm, 1e-20, *angles(64), meta(64, 528, dtype=torch.uint8))


PRODUCTS: dict[str, Callable[[], None]] = {
    **{f"{name} {count}": product(name, count) for name in WEIGHTS for count in ROWS},
    **{f"queries {count}": lambda count=count: queries(count) for count in ROWS},  # type: ignore[misc]
    **{f"grouped output {count}": lambda count=count: output(count) for count in ROWS[:3]},  # type: ignore[misc]
    "parts of wq_a_wkv": lambda: (dense.split_sums(rows(64, 5120), *weight(1792, 5120)), None)[1],
    "parts of wq_a_wkv, 256": lambda: (dense.split_sums(rows(256, 5120), *weight(1792, 5120)), None)[1],
    "parts of wq_a_wkv, 384": lambda: (
        dense.split_sums(rows(384, 5120), *weight(1792, 5120), invariant=True),
        None,
    )[1],
}
CASES: dict[str, Callable[[], None]] = {
    **PRODUCTS,
    "norms behind a merged product": lambda: norms(0),
    "norms behind its parts": lambda: norms(4),
    "norm": lambda: (norm.rms_norm(meta(64, 5120), meta(5120, dtype=torch.float32), 1e-20), None)[1],
    "norm and Q8": lambda: (
        quantize.rms_norm_quantize(meta(64, 5120), meta(5120, dtype=torch.float32), 1e-20),
        None,
    )[1],
    "Q8": lambda: (quantize.quantize_rows(meta(64, 8192)), None)[1],
    "Q8 of parts": lambda: (quantize.quantize_rows(meta(2, 64, 8192, dtype=torch.float32)), None)[1],
    "split rotation": lambda: (rope.rope_split_(meta(64, 64, 512), *angles(64)), None)[1],
    "natural rotation": lambda: (rope.apply_rope(meta(64, 512), *angles(64)), None)[1],
    "widened weight": lambda: (grouped_output.widen(*weight(8192, 4096)), None)[1],
}
WGMMA = set(PRODUCTS)
