"""mHC, Engram and compressor kernels at the shapes of the full-size model, for `kernels.py`.

Bytes of an mHC step: the stream read and written (2 x 4 x 10,240 bytes a row), the update read, x written. fn (2 MB)
counts once, coefficients do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from kernel_cases import KernelCase, Prepared, copies_beyond_cache
from torch import Tensor

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.reference import compressor as reference_compressor
from deepinfer.kernels.reference import engram as reference_engram
from deepinfer.kernels.reference import hyper as reference_hyper
from deepinfer.kernels.reference.norm import rms_norm
from deepinfer.kernels.reference.quant import e8m0_to_float, quantize_fp8

D, COPIES, MIXES, HEAD = 5120, 4, 24, 512
COLUMNS, TABLE_WIDTH = 24, 256
ROW = 2 * D  # bytes of one copy of a row
EPS, NORM_EPS = 1e-6, 1e-20
# The stream may round the other way where float32 sums differ in their last bits: 1 in about 2,000 values then moves by
# 2^-8 of itself.
ROUNDED = 3e-4


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


def hyper_weights(device: torch.device) -> HyperWeights:
    return HyperWeights(
        fn=torch.randn(COPIES * D, MIXES, device=device) * (COPIES * D) ** -0.5,
        scale=torch.tensor([0.9, 1.1, 1.7], device=device),
        base=torch.randn(MIXES, device=device),
        norm=1 + 0.1 * torch.randn(D, device=device),
        iterations=20,
        eps=EPS,
        norm_eps=NORM_EPS,
    )


Inputs = tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]


def stream_inputs(rows: int, device: torch.device) -> Inputs:
    stream = torch.empty(rows, COPIES, D, dtype=torch.bfloat16, device=device).normal_()
    update = (
        torch.empty(rows, D, dtype=torch.bfloat16, device=device).normal_(),
        2 * torch.rand(rows, COPIES, device=device),
        reference_hyper.sinkhorn(torch.randn(rows, COPIES, COPIES, device=device), 20, EPS),
    )
    return stream, update, torch.rand(rows, COPIES, device=device)


def hyper_step(rows: int, *, updated: bool, quantized: bool) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        from deepinfer.kernels.triton import hyper
        from deepinfer.kernels.triton.quantize import quantize_rows

        copies = copies_beyond_cache(rows * COPIES * ROW)
        inputs = [stream_inputs(rows, device) for _ in range(copies)]
        weights = [hyper_weights(device) for _ in range(copies)]  # each launch finds its fn in memory, as in a model
        for w in weights:
            hyper.fn_parts(w)

        def run(copy: int) -> object:
            stream, update, pre = inputs[copy]
            w = weights[copy]
            op = hyper.hyper_step_quantized if quantized else hyper.hyper_step
            return op(stream, update if updated else None, pre, w)

        def check() -> float:
            (old, update, pre), w = inputs[0], weights[0]
            rest = slice(0, min(rows, 2048))  # float64 of all rows would take 10 GB
            taken = update if updated else None
            if quantized:
                (stream, x, *found), codes = hyper.hyper_step_quantized(old, taken, pre, w)
                same = all(
                    torch.equal(mine.float(), its.float()) for mine, its in zip(codes, quantize_rows(x), strict=True)
                )
            else:
                (stream, x, *found), same = hyper.hyper_step(old, taken, pre, w), True
            some = stream[rest]
            expected = (
                reference_hyper.hyper_expand(old[rest], *(part[rest] for part in update)) if updated else old[rest]
            )
            mixes = some.double().flatten(1) @ w.fn.double()
            mixes = mixes * torch.rsqrt(some.double().flatten(1).square().mean(1, keepdim=True) + NORM_EPS)
            exact = reference_hyper.hyper_coefficients(
                mixes, w.scale.double(), w.base.double(), copies=COPIES, iterations=20, eps=EPS
            )
            normed = rms_norm(reference_hyper.hyper_collapse(some, pre[rest]), w.norm, NORM_EPS)
            # held to their own tolerance of 1e-5, then counted in units of the stream's
            sums = max(relative(got[rest], right) for got, right in zip(found, exact, strict=True)) * ROUNDED / 1e-5
            return max(relative(some, expected), relative(x[rest], normed), sums, 0.0 if same else 1.0)

        return Prepared(run, copies, check, ROUNDED)

    return make


def hyper_expand(rows: int) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        from deepinfer.kernels.triton import hyper

        copies = copies_beyond_cache(rows * COPIES * ROW)
        inputs = [stream_inputs(rows, device) for _ in range(copies)]
        stream, update, _ = inputs[0]

        def check() -> float:
            got = hyper.hyper_expand(stream, *update)[:2048]
            return relative(got, reference_hyper.hyper_expand(stream[:2048], *(part[:2048] for part in update)))

        return Prepared(lambda copy: hyper.hyper_expand(inputs[copy][0], *inputs[copy][1]), copies, check, ROUNDED)

    return make


def engram_inject(rows: int) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        from deepinfer.kernels.triton import engram

        copies = copies_beyond_cache(rows * 9 * ROW)
        streams = [torch.empty(rows, COPIES, D, dtype=torch.bfloat16, device=device).normal_() for _ in range(copies)]
        kv = [torch.empty(rows, 5 * D, dtype=torch.bfloat16, device=device).normal_() for _ in range(copies)]
        weight = 1 + 0.1 * torch.randn(COPIES, D, device=device)

        def check() -> float:
            stream, some = streams[0][:2048], kv[0][:2048]
            keys, value = some.unflatten(1, (5, -1)).split((4, 1), dim=1)
            gate = reference_engram.engram_gate(stream, keys, weight, NORM_EPS)
            expected = reference_engram.engram_inject(stream, gate, value.squeeze(1))
            return relative(engram.engram_inject(streams[0], kv[0], weight, None, NORM_EPS)[:2048], expected)

        return Prepared(
            lambda copy: engram.engram_inject(streams[copy], kv[copy], weight, None, NORM_EPS), copies, check, ROUNDED
        )

    return make


def engram_rows(tokens: int) -> Callable[[torch.device], Prepared]:
    """From page-locked host memory: 2 GB stand in for 101, which a bus does not notice. Equal to Q8 of the table's
    values, folded to a scale per token: that fold, not this kernel, costs what lies far below a token's largest values
    its last bits (9e-6 of the norm where scales of a token differ by 2^9, as these do)."""

    def make(device: torch.device) -> Prepared:
        from deepinfer.kernels.triton import engram
        from deepinfer.kernels.triton.quantize import fold_groups

        rows = 8_000_000
        codes = torch.randint(0, 0x7F, (rows, TABLE_WIDTH), dtype=torch.uint8, device=device)
        scales = torch.randint(112, 122, (rows, TABLE_WIDTH // 32), dtype=torch.uint8, device=device)
        pinned = [part.to("cpu").pin_memory() for part in (codes, scales)]
        problems = torch.zeros(1, dtype=torch.int32, device=device)
        ids = [torch.randint(0, rows, (tokens, COLUMNS), device=device) for _ in range(8)]

        def fold(parts: list[Tensor], copy: int) -> tuple[Tensor, Tensor]:
            out = engram.empty_rows(tokens, COLUMNS * TABLE_WIDTH, device)
            return cast(
                tuple[Tensor, Tensor],
                engram.fold_table_rows(parts[0], parts[1], ids[copy], problems, columns=COLUMNS, out=out),
            )

        def check() -> float:
            values = codes[ids[0]].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
            exact = values * e8m0_to_float(scales[ids[0]]).unsqueeze(-1)
            expected = fold_groups(*quantize_fp8(exact.flatten(1)))
            same = [torch.equal(mine.float(), its.float()) for mine, its in zip(fold(pinned, 0), expected, strict=True)]
            return 0.0 if all(same) else 1.0

        return Prepared(lambda copy: fold(pinned, copy), 8, check, 0.0)

    return make


def close_pairs(rows: int) -> Callable[[torch.device], Prepared]:
    def make(device: torch.device) -> Prepared:
        from deepinfer.kernels.triton import compressor

        copies = copies_beyond_cache(rows * 2 * HEAD * 4)
        inputs = [torch.randn(rows, 2, HEAD, device=device) for _ in range(copies)]
        positions = torch.arange(rows, device=device) + 1000
        starts, slots = torch.full_like(positions, 1000), torch.zeros_like(positions)
        store = torch.zeros(2, 4, 2, HEAD, device=device)
        tables = torch.arange(2 * 8192, device=device).view(2, 8192)
        norm = 1 + 0.1 * torch.randn(HEAD, device=device)

        def run(copy: int) -> compressor.ClosedPairs:
            return compressor.close_pairs_rows(
                inputs[copy], positions, slots, starts, store, tables, norm, NORM_EPS, per_block=64
            )

        def check() -> float:
            expected = reference_compressor.compress_pairs(
                inputs[0][0::2], inputs[0][1::2], norm, NORM_EPS, torch.bfloat16
            )
            return relative(run(0).latents[1::2], expected)

        return Prepared(run, copies, check, ROUNDED)

    return make


def cases() -> list[KernelCase]:
    """For `kernels.py`."""
    fn = COPIES * D * MIXES * 4
    found = []
    for rows, target in ((64, 8.0), (384, 14.0), (4096, None), (32768, None)):
        moved = rows * (2 * COPIES + 2) * ROW
        goal = moved / (0.7 * 4285e3) if target is None else target  # 70 % of this chip's 4,285 GB/s, in us
        shape = {"rows": rows, "copies": COPIES, "d": D}
        found += [
            KernelCase(
                f"hyper_step {rows}",
                "hyper",
                shape,
                hyper_step(rows, updated=True, quantized=False),
                bytes=moved + fn,
                target_us=round(goal, 1),
            ),
            KernelCase(
                f"hyper_step {rows}, Q8 of x",
                "hyper",
                shape,
                hyper_step(rows, updated=True, quantized=True),
                bytes=moved + fn + rows * D,
            ),
            KernelCase(
                f"hyper_step {rows}, no update",
                "hyper",
                shape,
                hyper_step(rows, updated=False, quantized=False),
                bytes=rows * (COPIES + 1) * ROW + fn,
            ),
            KernelCase(f"hyper_expand {rows}", "hyper", shape, hyper_expand(rows), bytes=rows * (2 * COPIES + 1) * ROW),
            KernelCase(
                f"engram_inject {rows}", "hyper", shape, engram_inject(rows), bytes=rows * (2 * COPIES + 5) * ROW
            ),
        ]
    for rows in (64, 384, 4096):
        found += [
            KernelCase(
                f"engram rows from the host {rows}",
                "hyper",
                {"tokens": rows, "columns": COLUMNS, "width": TABLE_WIDTH},
                engram_rows(rows),
                bytes=rows * COLUMNS * (TABLE_WIDTH * 2 + TABLE_WIDTH // 32),
                note="over the bus: its rate is the limit, not the memory's",
            ),
            KernelCase(
                f"close_pairs {rows}",
                "hyper",
                {"rows": rows, "d": HEAD},
                close_pairs(rows),
                bytes=rows * (2 * HEAD * 4 + HEAD * 2),
            ),
        ]
    return found
