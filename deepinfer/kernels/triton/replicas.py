"""Copies of whole windows below multiples of 128, in a step whose lengths only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import launch

BLOCK_TOKENS = tl.constexpr(128)
PARTS = 8  # programs that share the layers of a chunk: most of them find nothing to do
STRIP = 4096  # words that a program moves at once


@triton.jit(do_not_specialize=["null_slot", "layers"])
def _replica_kernel(
    pool, replicas, positions, chunk_slots, chunk_rows, null_slot, layers, pool_layer, replica_layer, ring,
    WINDOW: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    slot = tl.load(chunk_slots + chunk)
    first, after = tl.load(chunk_rows + chunk), tl.load(chunk_rows + chunk + 1)
    if (slot != null_slot) & (after > first):
        start = tl.load(positions + first)
        boundary = (start + after - first) // BLOCK_TOKENS * BLOCK_TOKENS
        if boundary > start:
            target = (2 * slot + boundary // BLOCK_TOKENS % 2) * WINDOW
            for turn in range(tl.cdiv(layers, PARTS)):
                layer = tl.program_id(1).to(tl.int64) + turn * PARTS
                own, kept = pool + layer * pool_layer, replicas + layer * replica_layer
                for begin in range(0, WINDOW * WORDS, STRIP):
                    word = begin + tl.arange(0, STRIP)
                    row, column = word // WORDS, word % WORDS
                    position = boundary - WINDOW + row
                    # A window may be longer than the sequence.
                    real = (word < WINDOW * WORDS) & (position >= 0) & (layer < layers)
                    source = slot * ring + position % ring
                    value = tl.load(own + source * WORDS + column, mask=real)
                    tl.store(kept + (target + row) * WORDS + column, value, mask=real)


def copy_replicas(
    pool: Tensor,
    replicas: Tensor,
    positions: Tensor,
    chunk_slots: Tensor,
    chunk_rows: Tensor,
    null_slot: int,
    *,
    window: int,
    ring: int,
) -> None:
    """The windows below the last multiples of 128 that the chunks of a step have passed, drafts counted: from the
    rings, which hold the step already, to the slots' replicas. A boundary may be at most ring - window rows below its
    chunk's end.

    pool [layers or more, rows, width] and replicas [layers, 2 * slots * window, width], of one dtype, each layer in one
    piece; positions int64 [N] of rows; chunk_slots int64 [C]; chunk_rows int64 [C + 1]: first rows of the chunks.
    """
    layers, width = replicas.shape[0], replicas.shape[2] * replicas.element_size()
    words = torch.int32 if width % 4 == 0 else torch.uint8
    pool, replicas = pool.view(words), replicas.view(words)
    launch(
        _replica_kernel, (len(chunk_slots), min(layers, PARTS)), pool, replicas, positions, chunk_slots, chunk_rows,
        null_slot, layers, pool.stride(0), replicas.stride(0), ring, WINDOW=window, WORDS=replicas.shape[2],
        PARTS=PARTS, STRIP=min(STRIP, triton.next_power_of_2(window * replicas.shape[2])), num_warps=8,
    )  # fmt: skip
