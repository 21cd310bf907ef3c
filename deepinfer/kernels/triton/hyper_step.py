"""An mHC step (model specification 2.2) in one launch: the update of the sub-layer before is taken in, the new stream
written, collapsed and multiplied with fn; programs that share rows wait for each other's sums, then x and the
coefficients follow.

A program waits for its neighbours in the order of starting, fewer than 40, so those of up to three steps at once find
processors on any device with 120 of them.

Two kernels. `_columns_kernel`, for few rows: a program keeps its part of fn in shared memory and takes several tiles of
rows through it. `_rows_kernel`, for many: a program takes one tile of rows through a group of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.triton import hyper_parts
from deepinfer.kernels.triton.hyper_finish import (
    factors_of_rows,
    load_affine,
    load_collapsed,
    put_normed,
    put_row_coefficients,
)
from deepinfer.kernels.triton.hyper_parts import CHUNK, COPIES, fn_parts, load_parts
from deepinfer.kernels.triton.hyper_pass import chunk_sums, load_chunk, of_rows, products
from deepinfer.kernels.triton.hyper_sums import GROUPS, SQUARES, WIDTH, meet, put_sums
from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.quantize import Fp8Rows
from deepinfer.kernels.triton.runtime import INTERPRET, launch

Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
UNIT = 2 * CHUNK
MOST_BLOCKS = 4096  # groups of programs that share rows: 131,072 rows
ALL, PASS, LAST = 0, 1, 2  # what a launch does: the interpreter takes two
_PASS, _LAST = tl.constexpr(PASS), tl.constexpr(LAST)


@triton.jit(do_not_specialize=["rows"])
def _columns_kernel(
    stream, y, post, comb, pre, fn, norm, scale, base, out, x, codes, code_scale, next_pre, next_post, next_comb,
    mixes, squares, counters, rows, eps, norm_eps,
    D: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, M: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr,
    R: tl.constexpr, ITERATIONS: tl.constexpr, UPDATE: tl.constexpr, PARTS: tl.constexpr, QUANTIZE: tl.constexpr,
    STAGES: tl.constexpr, ROLE: tl.constexpr,
):  # fmt: skip
    """Program: one unit of columns, TILES tiles of M rows."""
    place = tl.program_id(0) % UNITS
    block = tl.program_id(0) // UNITS
    first = block * (TILES * M)
    zero = tl.zeros((M,), tl.float32)
    wait_for_previous()
    if ROLE != _LAST:
        if TILES > 1:
            parts0 = load_parts(fn, place * 2, 4 * C, PARTS)
            parts1 = load_parts(fn, place * 2 + 1, 4 * C, PARTS)
        for tile in tl.range(block * TILES, tl.minimum(block * TILES + TILES, tl.cdiv(rows, M)), num_stages=STAGES):
            row = tile * M + tl.arange(0, M)
            live = row < rows
            wide = row.to(tl.int64)[:, None]
            p = of_rows(pre + row * 4, 4, live)
            q = p
            c = p
            if UPDATE:
                q = of_rows(post + row * 4, 4, live)
                c = of_rows(comb + row * 16, 16, live)
            tiles0 = load_chunk(stream, y, place * 2, wide, live, D, C, UPDATE)
            tiles1 = load_chunk(stream, y, place * 2 + 1, wide, live, D, C, UPDATE)
            if TILES == 1:  # behind the rest, so that all loads are under way when the first one is waited for
                parts0 = load_parts(fn, place * 2, 4 * C, PARTS)
                parts1 = load_parts(fn, place * 2 + 1, 4 * C, PARTS)
            acc, a, b, largest = chunk_sums(
                tiles0, parts0, place * 2, tl.zeros((64, M), tl.float32), zero, zero, zero,
                norm, out, x, wide, live, p, q, c, D, M, C, UPDATE, PARTS, QUANTIZE,
            )  # fmt: skip
            acc, a, b, largest = chunk_sums(
                tiles1, parts1, place * 2 + 1, acc, a, b, largest,
                norm, out, x, wide, live, p, q, c, D, M, C, UPDATE, PARTS, QUANTIZE,
            )  # fmt: skip
            put_sums(place, rows, row, live, products(acc, M), a, b, largest, mixes, squares, M, QUANTIZE)
    start_next()
    if ROLE != _PASS:
        tl.debug_barrier()  # what other threads of the program wrote
        row = first + tl.arange(0, TILES * M)
        live = row < rows
        wide = row.to(tl.int64)[:, None]
        factors, offsets = load_affine(scale, base)
        u, w = load_collapsed(x, norm, place, wide, live, D, 2 * C)
        if ROLE != _LAST:
            meet(counters + block, place, UNITS)
        factor, top = factors_of_rows(
            squares, row, live, rows, code_scale, place, norm_eps, x.dtype.element_ty, D, UNITS, PER, TILES * M,
            QUANTIZE,
        )  # fmt: skip
        put_normed(u, w, place, wide, live, factor, top, x, codes, D, TILES * M, 2 * C, QUANTIZE)
        for some in range(place * R, TILES * M, UNITS * R):
            put_row_coefficients(
                first + some, mixes, squares, rows, factors, offsets, next_pre, next_post, next_comb, eps, norm_eps,
                D, UNITS, PER, R, ITERATIONS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    stream, y, post, comb, pre, fn, norm, scale, base, out, x, codes, code_scale, next_pre, next_post, next_comb,
    mixes, squares, counters, rows, eps, norm_eps,
    D: tl.constexpr, UNITS: tl.constexpr, SPAN: tl.constexpr, PLACES: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, ITERATIONS: tl.constexpr, UPDATE: tl.constexpr, PARTS: tl.constexpr, QUANTIZE: tl.constexpr,
    STAGES: tl.constexpr, ROLE: tl.constexpr,
):  # fmt: skip
    """Program: a tile of M rows, a group of SPAN units of columns."""
    place = tl.program_id(0) % PLACES
    tile = tl.program_id(0) // PLACES
    row = tile * M + tl.arange(0, M)
    live = row < rows
    wide = row.to(tl.int64)[:, None]
    zero = tl.zeros((M,), tl.float32)
    wait_for_previous()
    if ROLE != _LAST:
        p = of_rows(pre + row * 4, 4, live)
        q = p
        c = p
        if UPDATE:
            q = of_rows(post + row * 4, 4, live)
            c = of_rows(comb + row * 16, 16, live)
        acc = tl.zeros((64, M), tl.float32)
        a = zero
        b = zero
        group = tl.zeros((4, 8, M), tl.float32)
        whole = zero
        collapsed = zero
        largest = zero
        start = place * SPAN * 2
        for chunk in tl.range(start, tl.minimum(start + 2 * SPAN, 2 * UNITS), num_stages=STAGES):
            even = chunk % 2 == 0  # a unit begins
            tiles = load_chunk(stream, y, chunk, wide, live, D, C, UPDATE)
            parts = load_parts(fn, chunk, 4 * C, PARTS)
            acc, a, b, largest = chunk_sums(
                tiles, parts, chunk, tl.where(even, 0.0, acc), tl.where(even, zero, a), tl.where(even, zero, b),
                largest, norm, out, x, wide, live, p, q, c, D, M, C, UPDATE, PARTS, QUANTIZE,
            )  # fmt: skip
            group += tl.where(even, 0.0, products(acc, M))
            whole += tl.where(even, zero, a)
            collapsed += tl.where(even, zero, b)
        put_sums(place, rows, row, live, group, whole, collapsed, largest, mixes, squares, M, QUANTIZE)
    start_next()
    if ROLE != _PASS:
        tl.debug_barrier()  # what other threads of the program wrote
        factors, offsets = load_affine(scale, base)
        if ROLE != _LAST:
            meet(counters + tile, place, PLACES)
        factor, top = factors_of_rows(
            squares, row, live, rows, code_scale, place, norm_eps, x.dtype.element_ty, D, PLACES, 1, M, QUANTIZE
        )  # fmt: skip
        for unit in tl.range(place * SPAN, tl.minimum(place * SPAN + SPAN, UNITS), num_stages=3):
            u, w = load_collapsed(x, norm, unit, wide, live, D, 2 * C)
            put_normed(u, w, unit, wide, live, factor, top, x, codes, D, M, 2 * C, QUANTIZE)
        for some in range(place * R, M, PLACES * R):
            put_row_coefficients(
                tile * M + some, mixes, squares, rows, factors, offsets, next_pre, next_post, next_comb, eps,
                norm_eps, D, PLACES, 1, R, ITERATIONS,
            )  # fmt: skip


class Plan(NamedTuple):
    """How rows are laid out on programs: TILES > 0 tiles a program of `_columns_kernel`, 0 for `_rows_kernel`."""

    tile: int  # rows
    tiles: int
    warps: int
    stages: int


def plan(rows: int) -> Plan:
    """A row has the same bits in all of them. Three times 40 programs of `_columns_kernel` are one for (almost) every
    processor. Not timed yet as they are. A version that read fn anew for every tile took 11.0 us for 64 rows on an H200
    (16 rows and 4 warps; 32 and 8 took 12.4) and 23.7 for 384; two launches took 13.0 and 36.0."""
    if rows <= 96:
        return Plan(16, 1, 4, 1)
    stages = 3 if hyper_parts.SPLIT == 2 else 2  # three parts of fn leave no room for a third tile of the stream
    if rows <= 192:
        return Plan(32, 2, 8, stages)
    if rows <= 384:
        return Plan(32, 4, 8, stages)
    return Plan(32, 0, 8, 2)


def _counters(w: HyperWeights, device: torch.device) -> Tensor:
    """Zeros that `meet` keeps from launch to launch, with the weights: steps of one sub-layer follow each other. Made
    at the first call, as `fn_parts`, and never again: graphs know where they are."""
    kept = vars(w)
    if "_counters" not in kept:
        kept["_counters"] = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)
    return kept["_counters"]


def checked(stream: Tensor) -> Tensor:
    """The stream, contiguous; ValueError where the kernels do not take its shape."""
    if stream.shape[1] != COPIES or stream.shape[2] % CHUNK:
        raise ValueError(
            f"a stream {list(stream.shape)}: these kernels take {COPIES} copies and widths in steps of {CHUNK}"
        )
    return stream.contiguous()


def step(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights, quantize: bool
) -> tuple[Step, Fp8Rows | None]:
    """As `hyper.hyper_step`, with Q8 of x, folded per row, if asked for."""
    stream = checked(stream)
    (rows, _, width), new = stream.shape, stream.new_empty
    units = triton.cdiv(width, UNIT)
    span = triton.cdiv(units, GROUPS)  # units of a group
    tile, tiles, warps, stages = plan(rows)
    places = units if tiles else triton.cdiv(units, span)
    blocks = triton.cdiv(rows, tile * max(tiles, 1))
    if blocks > MOST_BLOCKS:
        raise ValueError(f"{rows} rows of a stream in one step: at most {MOST_BLOCKS * tile}")
    out = torch.empty_like(stream) if update is not None else stream
    x = new(rows, width)
    folded = Fp8Rows(new(rows, width, dtype=torch.float8_e4m3fn), new(rows, dtype=torch.float32)) if quantize else None
    pres, posts, combs = (new(rows, *shape, dtype=torch.float32) for shape in ((4,), (4,), (4, 4)))
    mixes, squares = new(places, rows, WIDTH, dtype=torch.float32), new(places, SQUARES, rows, dtype=torch.float32)
    y, post, comb = update if update is not None else (stream, pre, pre)
    share = triton.next_power_of_2(triton.cdiv(tile * max(tiles, 1), places))  # rows whose coefficients a program makes
    of_kernel = {"PER": span, "TILES": tiles} if tiles else {"SPAN": span, "PLACES": places}
    for role in (PASS, LAST) if INTERPRET.value else (ALL,):
        launch(
            _columns_kernel if tiles else _rows_kernel,
            (blocks * places,),
            *(stream, y.contiguous(), post.contiguous(), comb.contiguous(), pre.contiguous(), fn_parts(w), w.norm),
            *(w.scale, w.base, out, x, *(folded if folded is not None else (x, w.scale)), pres, posts, combs),
            *(mixes, squares, _counters(w, stream.device), rows, w.eps, w.norm_eps),
            D=width,
            UNITS=units,
            M=tile,
            C=CHUNK,
            R=min(share, 4),
            ITERATIONS=w.iterations,
            UPDATE=update is not None,
            PARTS=hyper_parts.SPLIT,
            QUANTIZE=quantize,
            STAGES=stages,
            ROLE=role,
            num_warps=warps,
            enable_fp_fusion=False,  # the same bits from every compilation
            **of_kernel,
            **OVERLAP,
        )
    return (out, x, pres, posts, combs), folded
