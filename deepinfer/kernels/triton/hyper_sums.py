"""Sums over the columns of mHC's stream, which several programs share: left in memory, waited for, added in order.

A sum goes up in the same order whatever a program has of it: chunks of 64 columns to a unit of 128, units to a group,
eight groups in pairs of halves. Only whether units or groups lie in memory depends on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.runtime import INTERPRET

WIDTH = 32  # columns of a partial product: the 24 mixes of four copies, padded
SQUARES = (
    3  # further numbers of a row: squares of all copies; squares of the collapsed row; its largest value with norm
)
GROUPS = 8
_WIDTH, _SQUARES, _GROUPS = tl.constexpr(WIDTH), tl.constexpr(SQUARES), tl.constexpr(GROUPS)
_ARRIVALS = tl.constexpr(1 << 16)  # more than programs meet


@triton.jit
def put_sums(
    slot, rows, row, live, products, whole, collapsed, largest, mixes, squares, M: tl.constexpr, QUANTIZE: tl.constexpr
):  # fmt: skip
    """products [4, 8, M], squares [M], largest [M] of some columns -> their slot of mixes [slots, rows, 32] and squares
    [slots, 3, rows]."""
    at = (slot * rows + row).to(tl.int64)[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    tl.store(mixes + at, tl.trans(tl.reshape(products, (_WIDTH, M))), mask=live[:, None])
    at = squares + slot.to(tl.int64) * _SQUARES * rows + row
    tl.store(at, whole, mask=live)
    tl.store(at + rows, collapsed, mask=live)
    if QUANTIZE:
        tl.store(at + 2 * rows, largest, mask=live)


@triton.jit
def _seen(counter):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def meet(counter, place, PLACES: tl.constexpr):
    """Waits until all programs 0 .. PLACES - 1 that share a counter are here, and their results can be read.

    Together they add 2^16, so that a counter is ready for the next launch, and may run over: what counts is that its
    upper half changes. Programs wait for neighbours in the order of their start alone, so those in front never wait for
    ones that have no processor. In the interpreter programs run one after the other: launch twice instead."""
    if not INTERPRET:
        tl.debug_barrier()
        step = tl.where(place == 0, _ARRIVALS - (PLACES - 1), 1)
        before = tl.atomic_add(counter, step, sem="acq_rel", scope="gpu")
        now = before + step
        while ((now ^ before) >> 16) == 0:
            now = _seen(counter)
        tl.debug_barrier()


@triton.jit
def _half(t, X: tl.constexpr):
    """[2 n, X] -> [n, X]: two terms have one sum in any layout of threads, unlike eight."""
    return tl.sum(tl.reshape(t, (2, t.shape[0] // 2, X)), axis=0)


@triton.jit
def total(pointers, mask, stride, SLOTS: tl.constexpr, PER: tl.constexpr, X: tl.constexpr):
    """[X] over all slots, PER of them a group. pointers, mask [X]: of the first slot; the next one is `stride` further.
    Past the first-level cache, which knows nothing of other processors' writes."""
    group = tl.arange(0, _GROUPS)[:, None] * PER
    at = pointers[None, :] + group.to(tl.int64) * stride
    part = tl.load(at, mask=mask[None, :] & (group < SLOTS), other=0.0, cache_modifier=".cg")  # [8, X]
    for k in tl.static_range(1, PER):
        part += tl.load(at + k * stride, mask=mask[None, :] & (group + k < SLOTS), other=0.0, cache_modifier=".cg")
    return tl.reshape(_half(_half(_half(part, X), X), X), (X,))


@triton.jit
def most(pointers, mask, stride, SLOTS: tl.constexpr, PER: tl.constexpr):
    """As `total`, the largest instead of the sum."""
    group = tl.arange(0, _GROUPS)[:, None] * PER
    at = pointers[None, :] + group.to(tl.int64) * stride
    part = tl.load(at, mask=mask[None, :] & (group < SLOTS), other=0.0, cache_modifier=".cg")  # [8, X]
    for k in tl.static_range(1, PER):
        more = tl.load(at + k * stride, mask=mask[None, :] & (group + k < SLOTS), other=0.0, cache_modifier=".cg")
        part = tl.maximum(part, more)
    return tl.max(part, axis=0)
