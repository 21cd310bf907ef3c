"""Which rows each routed expert works on: slots sorted by expert, cut into blocks of rows. All on the device.

A slot is one (token, choice) pair, number token * k + choice. Slots are sorted by expert, then by number, by counting:
nothing depends on the order in which programs run, and shapes depend on the number of slots alone, so that the plan may
be made inside a CUDA graph. Experts outside [first, first + experts) are left out (they live on other devices).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.overlap import OVERLAP, start_next, wait_for_previous
from deepinfer.kernels.triton.runtime import launch

SMALL_CHUNK = 128  # slots of a program; up to SMALL_SLOTS each one counts all slots for itself, without a launch before
SMALL_SLOTS = 4096  # 16 a thread
LARGE_CHUNK = 256
WARPS = 8


@dataclass(frozen=True)
class ExpertPlan:
    """order int32 [S]: the slot at each sorted place (what is left out has none: only the first places are written).
    places int32 [S]: the place of each slot, -1 = left out. blocks int32 [B, 4]: expert (counted from the first one
    here, -1 = unused), first place, rows, 0. block_rows: the most rows that a block has."""

    order: Tensor
    places: Tensor
    blocks: Tensor
    block_rows: int


@dataclass(frozen=True)
class PlanBuffers:
    """A plan not yet made, and what making it takes."""

    plan: ExpertPlan
    scratch: Tensor  # int32 [chunks, 5, experts + 1 rounded up]
    chunk: int
    first: int
    experts: int

    @property
    def chunks(self) -> int:
        return self.scratch.shape[0]

    @property
    def small(self) -> bool:
        return self.chunk == SMALL_CHUNK


def plan_buffers(ids: Tensor, experts: int, block_rows: int, first: int = 0) -> PlanBuffers:
    """Room for the plan of ids int [T, k]."""
    slots = ids.numel()
    if slots >= 1 << 24:
        raise ValueError(f"{slots} slots in one plan: at most {(1 << 24) - 1}")
    chunk = SMALL_CHUNK if slots <= SMALL_SLOTS else LARGE_CHUNK
    blocks = slots // block_rows + min(experts, slots)  # every expert may have one block that is not full

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    plan = ExpertPlan(new(slots), new(slots), new(blocks, 4), block_rows)
    width = triton.next_power_of_2(experts + 1)
    return PlanBuffers(plan, new(triton.cdiv(slots, chunk), 5, width), chunk, first, experts)


def plan_experts(ids: Tensor, experts: int, block_rows: int, first: int = 0) -> ExpertPlan:
    """ids int [T, k], contiguous: numbers of all experts of the layer; `experts` of them from `first` on are here."""
    buffers = plan_buffers(ids, experts, block_rows, first)
    if not buffers.small:
        count_experts(ids, buffers)
    grid = (buffers.chunks,)
    launch(_place_kernel, grid, *place_arguments(ids, buffers), **place_options(buffers), num_warps=WARPS, **OVERLAP)
    return buffers.plan


def place_arguments(ids: Tensor, buffers: PlanBuffers) -> tuple[object, ...]:
    """The first arguments of a kernel that calls `place_slots`."""
    plan = buffers.plan
    slots = ids.numel()
    tensors = ids, plan.order, plan.places, plan.blocks, buffers.scratch
    return *tensors, slots, len(plan.blocks), buffers.first, buffers.chunks


def place_options(buffers: PlanBuffers) -> dict[str, int]:
    """And its constants."""
    return {
        "EXPERTS": buffers.experts,
        "WIDTH": buffers.scratch.shape[2],
        "CHUNK": buffers.chunk,
        "ROWS": buffers.plan.block_rows,
        "SPAN": triton.next_power_of_2(max(buffers.plan.order.numel(), 256)) if buffers.small else 0,
    }


def count_experts(ids: Tensor, buffers: PlanBuffers) -> None:
    """The launch before, where there are many slots: how often each chunk names each expert."""
    launch(
        _count_kernel,
        (buffers.chunks,),
        *(ids, buffers.scratch, ids.numel(), buffers.first),
        EXPERTS=buffers.experts,
        WIDTH=buffers.scratch.shape[2],
        CHUNK=buffers.chunk,
        num_warps=WARPS,
        **OVERLAP,
    )


@triton.jit
def _local(ids, slots, count, first, EXPERTS: tl.constexpr):
    """Numbers of the experts of some slots, counted from the first one here; EXPERTS = left out."""
    expert = tl.load(ids + slots, mask=slots < count, other=-1).to(tl.int32) - first
    return tl.where((slots < count) & (expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


@triton.jit(do_not_specialize=["count", "first"])
def _count_kernel(ids, scratch, count, first, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    start_next()
    wait_for_previous()
    mine = scratch + tl.program_id(0) * (5 * WIDTH)
    tl.store(mine + tl.arange(0, WIDTH), 0)
    tl.debug_barrier()
    expert = _local(ids, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), count, first, EXPERTS)
    tl.atomic_add(mine + expert, 1, sem="relaxed")  # whole numbers: the order of additions does not matter


@triton.jit
def _before(values, WIDTH: tl.constexpr):
    """Sum of the values before each one, [WIDTH]."""
    return tl.cumsum(values, 0) - values


@triton.jit
def place_slots(
    chunk, ids, order, places, blocks, scratch, count, num_blocks, first, chunks, EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Program `chunk` of `chunks`. SPAN: at least `count`, where each one counts all slots; 0 = `_count_kernel` did.
    scratch: a row of five lists for each, the first its counts."""
    mine = scratch + chunk * (5 * WIDTH)
    expert = tl.arange(0, WIDTH)
    if SPAN > 0:
        slots = tl.arange(0, SPAN)
        everybody = _local(ids, slots, count, first, EXPERTS)
        total = tl.histogram(everybody, WIDTH)
        earlier = tl.histogram(tl.where(slots < chunk * CHUNK, everybody, EXPERTS), WIDTH)
    else:
        total = tl.zeros((WIDTH,), tl.int32)
        earlier = tl.zeros((WIDTH,), tl.int32)
        STEP: tl.constexpr = max(4096 // WIDTH, 8)
        for start in range(0, chunks, STEP):
            rows = start + tl.arange(0, STEP)
            where = scratch + rows[:, None] * (5 * WIDTH) + expert[None, :]
            counts = tl.load(where, mask=(rows < chunks)[:, None], other=0)
            total += tl.sum(counts, axis=0)
            earlier += tl.sum(tl.where((rows < chunk)[:, None], counts, 0), axis=0)
    total = tl.where(expert < EXPERTS, total, 0)
    offset = _before(total, WIDTH)
    parts = (total + ROWS - 1) // ROWS
    first_block = _before(parts, WIDTH)
    tl.store(mine + WIDTH + expert, offset + earlier)
    tl.store(mine + 2 * WIDTH + expert, offset)
    tl.store(mine + 3 * WIDTH + expert, first_block)
    tl.store(mine + 4 * WIDTH + expert, total)
    tl.debug_barrier()

    inside = tl.arange(0, CHUNK)
    slot = chunk * CHUNK + inside
    named = _local(ids, slot, count, first, EXPERTS)
    rank = tl.zeros((CHUNK,), tl.int32)
    for start in tl.static_range(0, CHUNK, 32):  # unrolled: the loads are on their way together
        other = start + tl.arange(0, 32)
        others = _local(ids, chunk * CHUNK + other, count, first, EXPERTS)
        rank += tl.sum(((named[:, None] == others[None, :]) & (other[None, :] < inside[:, None])).to(tl.int32), axis=1)
    place = tl.load(mine + WIDTH + named, volatile=True) + rank
    here = named < EXPERTS
    tl.store(places + slot, tl.where(here, place, -1), mask=slot < count)
    tl.store(order + place, slot, mask=here)

    for start in range(chunk * 32, num_blocks, chunks * 32):
        block = start + tl.arange(0, 32)
        # Experts whose blocks all come before this one; those without rows have their end where they begin.
        owner = tl.sum((first_block + parts <= block[:, None]).to(tl.int32), axis=1)
        used = owner < EXPERTS
        owner = tl.minimum(owner, EXPERTS)
        part = block - tl.load(mine + 3 * WIDTH + owner, volatile=True)
        begin = tl.load(mine + 2 * WIDTH + owner, volatile=True) + part * ROWS
        left = tl.load(mine + 4 * WIDTH + owner, volatile=True) - part * ROWS
        row = blocks + block * 4
        writes = block < num_blocks
        tl.store(row, tl.where(used, owner, -1), mask=writes)
        tl.store(row + 1, tl.where(used, begin, 0), mask=writes)
        tl.store(row + 2, tl.where(used, tl.minimum(left, ROWS), 0), mask=writes)
        tl.store(row + 3, 0, mask=writes)


@triton.jit(do_not_specialize=["count", "num_blocks", "first", "chunks"])
def _place_kernel(
    ids, order, places, blocks, scratch, count, num_blocks, first, chunks, EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_previous()
    place_slots(
        tl.program_id(0), ids, order, places, blocks, scratch, count, num_blocks, first, chunks, EXPERTS, WIDTH, CHUNK,
        ROWS, SPAN,
    )  # fmt: skip
