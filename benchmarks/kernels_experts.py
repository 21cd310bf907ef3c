"""Routed experts at the released model's shapes, 48 of 384 on the device, for `kernels.py`.

Weights are larger than the second-level cache many times over, so they come from memory without rotation. The products
are checked against the float64 product of the same operands on three experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_cases import KernelCase, Prepared
from torch import Tensor

from deepinfer.kernels.reference.experts import swiglu
from deepinfer.kernels.triton import moe
from deepinfer.kernels.triton.experts import block_rows, experts_down, experts_up
from deepinfer.kernels.triton.experts_combine import combine_experts
from deepinfer.kernels.triton.experts_layout import ShuffledBank, ShuffledMatrix, unpair_rows
from deepinfer.kernels.triton.experts_plan import ExpertPlan, plan_experts
from deepinfer.kernels.triton.experts_rows import kernel_order, quantize_for_experts
from deepinfer.kernels.triton.quantize import Fp8Rows
from deepinfer.kernels.triton.router import route

EXPERTS, INNER, WIDTH, LIMIT = 48, 2304, 5120, 10.0
WEIGHT_BYTES = 17 / 32  # of an FP4 weight with its share of a scale
EXACT, CHAINED = 1.8e-3, 2.2e-3  # 1.65e-3 is the rounding of the result to bf16
SEEN = (0, 17, 47)
# Issue 6: us of the up projection, and triton_kernels' figure there.
UP_TARGETS = {(1, 8): (33.0, None), (8, 8): (112.0, 177.0), (64, 8): (150.0, 207.0), (1024, 8): (502.0, 1055.0)}
UP_TARGETS[4096, 8] = (1662.0, 3047.0)  # 930 TFLOP/s
UP_SHAPES = [(1, 8), (8, 8), (64, 6), (64, 8), (384, 6), (1024, 8), (4096, 8)]
DOWN_SHAPES = [(64, 6), (384, 6), (4096, 8)]
WHOLE_SHAPES = [(1, 6), (64, 6), (384, 6), (4096, 6)]


def random_matrix(rows: int, columns: int, device: torch.device) -> ShuffledMatrix:
    """Random codes; scales mostly within four octaves of the row's largest."""
    matrix = ShuffledMatrix.empty(EXPERTS, rows, columns, device)
    matrix.codes.random_(0, 256)
    for scales in matrix.scales:
        scales.copy_((11 - 1.5 * torch.randn(scales.shape, device=device).abs()).clamp(0, 11))
    matrix.factors.copy_(torch.exp2(torch.randint(-17, -15, matrix.factors.shape, device=device).float()))
    return matrix


def random_ids(tokens: int, topk: int, device: torch.device, experts: int = EXPERTS) -> Tensor:
    return torch.rand(tokens, experts, device=device).topk(topk).indices.int()


def random_rows(tokens: int, width: int, device: torch.device) -> Tensor:
    outliers = torch.exp(0.7 * torch.randn(width, device=device))
    return (torch.randn(tokens, width, device=device) * outliers).bfloat16()


def in_kernel_order(weight: Tensor) -> Tensor:
    return kernel_order(weight).double()


def seen_error(out: Tensor, plan: ExpertPlan, ids: Tensor, expected: Callable[[int, Tensor], Tensor]) -> float:
    """Of the rows of three experts; expected(expert, slots) is float64."""
    difference, size = 0.0, 0.0
    for expert in SEEN:
        slots = (ids.flatten() == expert).nonzero().flatten()[:256]
        if len(slots):
            right = expected(expert, slots)
            difference += float((out[plan.places[slots].long()].double() - right).square().sum())
            size += float(right.square().sum())
    return (difference / size) ** 0.5 if size else 0.0


def values(rows: Fp8Rows, which: Tensor) -> Tensor:
    return rows.codes[which].double() * rows.scale[which, None].double()


def up(tokens: int, topk: int, exact: bool) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        matrix = random_matrix(2 * INNER, WIDTH, device)
        rows = quantize_for_experts(random_rows(tokens, WIDTH, device))
        ids, weights = random_ids(tokens, topk, device), torch.rand(tokens, topk, device=device)
        plan = plan_experts(ids, EXPERTS, block_rows(ids.numel(), EXPERTS))

        def expected(expert: int, slots: Tensor) -> Tensor:
            w1, w3 = (in_kernel_order(weight) for weight in unpair_rows(matrix.dense(expert)))
            x = values(rows, slots // topk)
            act = swiglu((x @ w1.t()).bfloat16(), (x @ w3.t()).bfloat16(), LIMIT)
            return (act * weights.flatten()[slots, None]).double()

        def check() -> float:
            out = torch.full((ids.numel(), INNER), float("nan"), dtype=torch.bfloat16, device=device)
            experts_up(rows, plan, weights, matrix, LIMIT, exact=exact, out=out)
            return seen_error(out, plan, ids, expected)

        # Two products, and their roundings, in one result.
        tolerance = 2 * (EXACT if exact else CHAINED)
        return Prepared(
            lambda _: experts_up(rows, plan, weights, matrix, LIMIT, exact=exact), check=check, tolerance=tolerance
        )

    return make


def down(tokens: int, topk: int, exact: bool) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        matrix = random_matrix(WIDTH, INNER, device)
        ids = random_ids(tokens, topk, device)
        rows = quantize_for_experts(random_rows(ids.numel(), INNER, device))
        plan = plan_experts(ids, EXPERTS, block_rows(ids.numel(), EXPERTS))

        def expected(expert: int, slots: Tensor) -> Tensor:
            return values(rows, plan.places[slots].long()) @ in_kernel_order(matrix.dense(expert)).t()

        def check() -> float:
            out = torch.full((ids.numel(), WIDTH), float("nan"), dtype=torch.bfloat16, device=device)
            experts_down(rows, plan, matrix, exact=exact, out=out)
            return seen_error(out, plan, ids, expected)

        tolerance = EXACT if exact else CHAINED
        return Prepared(lambda _: experts_down(rows, plan, matrix, exact=exact), check=check, tolerance=tolerance)

    return make


def whole(tokens: int, topk: int, exact: bool, wide: bool) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        matrices = random_matrix(2 * INNER, WIDTH, device), random_matrix(WIDTH, INNER, device)
        bank = ShuffledBank(*matrices, INNER, WIDTH)
        x, ids = random_rows(tokens, WIDTH, device), random_ids(tokens, topk, device)
        weights = torch.rand(tokens, topk, device=device)
        return Prepared(lambda _: moe.routed_experts(x, ids, weights, bank, LIMIT, exact=exact, wide=wide))

    return make


def small(kind: str, tokens: int, topk: int) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        ids = random_ids(tokens, topk, device)
        plan = plan_experts(ids, EXPERTS, 16)
        routed = torch.randn(ids.numel(), WIDTH, device=device).bfloat16()
        logits, bias = torch.randn(tokens, 384, device=device), torch.randn(384, device=device)
        runs: dict[str, Callable[[int], object]] = {
            "plan": lambda _: plan_experts(ids, EXPERTS, 16),
            "rows": lambda _: quantize_for_experts(routed[:tokens]),
            "sum": lambda _: combine_experts(routed, plan, None, topk),
            "router": lambda _: route(logits, bias, topk=topk, scale=1.5, normalize=True),
        }
        return Prepared(runs[kind])

    return make


def active(tokens: int, topk: int) -> int:
    """Experts that are read, where every token chooses evenly: expected."""
    return round(EXPERTS * (1 - (1 - topk / EXPERTS) ** tokens))


def product_bytes(tokens: int, topk: int, outputs: int, width: int) -> int:
    return int(active(tokens, topk) * outputs * width * WEIGHT_BYTES) + tokens * topk * (width + 2 * outputs)


def cases() -> list[KernelCase]:
    found = []
    for tokens, topk in UP_SHAPES:
        slots, shape = tokens * topk, {"tokens": tokens, "slots": topk, "experts": EXPERTS}
        for exact in (True, False) if tokens >= 384 else (True,):
            kind = ", exact sums" if exact else ""
            target, peer = UP_TARGETS.get((tokens, topk), (None, None))
            if exact and tokens == 4096:
                target = 1818.0  # 850 TFLOP/s
            found.append(
                KernelCase(
                    f"experts up, {tokens} x {topk}{kind}",
                    "experts",
                    {**shape, "n": 2 * INNER, "k": WIDTH},
                    up(tokens, topk, exact),
                    # x once, half as many outputs as rows of weights
                    int(active(tokens, topk) * 2 * INNER * WIDTH * WEIGHT_BYTES) + tokens * WIDTH + 2 * slots * INNER,
                    4 * slots * INNER * WIDTH,
                    "fp8",
                    target_us=target,
                    peer_us=peer,
                    peer="triton_kernels, issue 6" if peer else "",
                    peer_key="triton_kernels",
                )
            )
            if (tokens, topk) not in DOWN_SHAPES:
                continue
            found.append(
                KernelCase(
                    f"experts down, {tokens} x {topk}{kind}",
                    "experts",
                    {**shape, "n": WIDTH, "k": INNER},
                    down(tokens, topk, exact),
                    product_bytes(tokens, topk, WIDTH, INNER),
                    2 * slots * INNER * WIDTH,
                    "fp8",
                )
            )
    for tokens, topk in WHOLE_SHAPES:
        weights = int(active(tokens, topk) * 3 * INNER * WIDTH * WEIGHT_BYTES)
        for kind, exact, wide in (("", False, False), (", exact sums", True, False), (", W4A16", True, True)):
            if (exact and not wide and tokens < 4096) or (wide and tokens != 64):
                continue  # few rows: sums are exact anyway
            found.append(
                KernelCase(
                    f"experts, all steps, {tokens} x {topk}{kind}",
                    "experts",
                    {"tokens": tokens, "slots": topk, "experts": EXPERTS, "inner": INNER, "width": WIDTH},
                    whole(tokens, topk, exact, wide),
                    weights + 4 * tokens * WIDTH,
                    6 * tokens * topk * INNER * WIDTH,
                    "bf16" if wide else "fp8",
                    target_us=242.0 if (tokens, topk, wide) == (64, 6, False) else None,
                    note="plan, Q8, up, SwiGLU, Q8, down, sum; without router and shared expert",
                )
            )
    for kind in ("plan", "rows", "sum", "router"):
        shape = {"tokens": 64, "slots": 6, "experts": EXPERTS}
        found.append(
            KernelCase(f"experts: {kind}, 64 x 6", "experts", shape, small(kind, 64, 6), _small_bytes(kind, 64, 6))
        )
    return found


def _small_bytes(kind: str, tokens: int, topk: int) -> int:
    return {
        "plan": 3 * 4 * tokens * topk,
        "rows": 3 * tokens * WIDTH,
        "sum": 2 * tokens * (topk + 1) * WIDTH,
        "router": 4 * tokens * (384 + 2 * topk),
    }[kind]
