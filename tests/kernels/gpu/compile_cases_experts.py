"""What of the mixture of experts is compiled for sm_90, at the released model's shapes: 48 of its 384 experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.triton import experts_plan, experts_rows, experts_shared
from deepinfer.kernels.triton.experts import experts_down, experts_up
from deepinfer.kernels.triton.experts_combine import combine_experts
from deepinfer.kernels.triton.experts_layout import ShuffledBank
from deepinfer.kernels.triton.quantize import Fp8Rows
from deepinfer.kernels.triton.router import gate_logits, route

EXPERTS, TOTAL, TOPK, INNER, WIDTH = 48, 384, 6, 2304, 5120


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def folded(count: int, width: int) -> Fp8Rows:
    return Fp8Rows(meta(count, width, dtype=torch.float8_e4m3fn), meta(count, dtype=torch.float32))


def ids_of(tokens: int, topk: int = TOPK) -> Tensor:
    return meta(tokens, topk, dtype=torch.int32)


def up(tokens: int, rows: int, exact: bool, wide: bool = False) -> None:
    plan = experts_plan.plan_buffers(ids_of(tokens), EXPERTS, rows).plan
    bank = ShuffledBank.empty(EXPERTS, INNER, WIDTH, "meta")
    x = meta(tokens, WIDTH) if wide else folded(tokens, WIDTH)
    weights = meta(tokens, TOPK, dtype=torch.float32)
    experts_up(x, plan, weights, bank.up, 10.0, exact=exact)


def down(tokens: int, rows: int, exact: bool, wide: bool = False) -> None:
    plan = experts_plan.plan_buffers(ids_of(tokens), EXPERTS, rows).plan
    bank = ShuffledBank.empty(EXPERTS, INNER, WIDTH, "meta")
    x = meta(tokens * TOPK, INNER) if wide else folded(tokens * TOPK, INNER)
    experts_down(x, plan, bank.down, exact=exact)


def small_steps(tokens: int) -> None:
    ids = ids_of(tokens)
    buffers = experts_plan.plan_buffers(ids, EXPERTS, 16)
    experts_rows.plan_and_quantize(ids, buffers, meta(tokens, WIDTH))
    experts_rows.quantize_for_experts(meta(tokens * TOPK, INNER))
    experts_plan.plan_experts(ids, EXPERTS, 16)
    experts_shared.swiglu(meta(tokens, 2 * INNER), 10.0)
    combine_experts(meta(tokens * TOPK, WIDTH), buffers.plan, meta(tokens, WIDTH), TOPK)


def choice(tokens: int, experts: int, topk: int) -> None:
    logits, bias = meta(tokens, experts, dtype=torch.float32), meta(experts, dtype=torch.float32)
    route(logits, bias, topk=topk, scale=1.5, normalize=True, with_scores=True)


def gate(tokens: int) -> None:
    gate_logits(meta(tokens, WIDTH), meta(EXPERTS, WIDTH))


SHAPES = [(64, 16), (64, 32), (384, 64), (4096, 128)]
WGMMA: set[str] = set()
# Arguments that wait while the roles are dealt out; nothing in the loops.
STACK = {"experts up 128 rows exact": 16, "experts down 128 rows exact": 16}
CASES: dict[str, Callable[[], None]] = {
    "experts plan, rows and sum, decode": lambda: small_steps(64),
    "experts plan, rows and sum, prefill": lambda: small_steps(4096),
    "router 384": lambda: choice(64, 384, 6),
    "router 128": lambda: choice(64, 128, 3),
}


def _add(name: str, run: Callable[[], None]) -> None:
    CASES[name] = run
    WGMMA.add(name)


for tokens in (64, 4096):  # in parts, and whole
    _add(f"logits of {tokens} tokens", lambda t=tokens: gate(t))  # type: ignore[misc]
for tokens, rows in SHAPES:
    for exact in (True, False):
        kind = "exact" if exact else "chained"
        _add(f"experts up {rows} rows {kind}", lambda t=tokens, r=rows, e=exact: up(t, r, e))  # type: ignore[misc]
        _add(f"experts down {rows} rows {kind}", lambda t=tokens, r=rows, e=exact: down(t, r, e))  # type: ignore[misc]
for rows in (16, 64):
    _add(f"experts up {rows} rows W4A16", lambda r=rows: up(64, r, True, wide=True))  # type: ignore[misc]
    _add(f"experts down {rows} rows W4A16", lambda r=rows: down(64, r, True, wide=True))  # type: ignore[misc]
