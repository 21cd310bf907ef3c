"""Sequences in a storage as the engine drives it, for tests of truncation and replay; the slow reference beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.cache.blocks import blocks_for
from deepinfer.cache.edits import OpenSlot, SetLength, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.kernels import select
from deepinfer.model import Chunk
from deepinfer.model.backbone import DeepseekV41

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "yoco"))
from masked_full import Masks, masked_full

__all__ = ["Masks", "cold_slot", "draw_tokens", "feed", "hit_slot", "masked_full", "same_logits"]


def draw_tokens(seed: int, count: int) -> list[int]:
    return torch.randint(3, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cold_slot(storage: CacheStorage, slot: int, num_tokens: int, first_block: int = 1) -> range:
    """An empty sequence with blocks for so many tokens -> the block ids."""
    blocks = range(first_block, first_block + blocks_for(num_tokens))
    storage.apply([OpenSlot(slot), SetTable(slot, 0, tuple(blocks))])
    return blocks


def hit_slot(
    storage: CacheStorage, slot: int, ids: Sequence[int], hit: int, start: int, own: range, shared: Sequence[int]
) -> None:
    """A sequence whose first `hit` tokens lie in `shared` blocks and that is computed from `start` on; `own` blocks
    follow."""
    adopted = tuple(shared[: hit // 128])
    last = tuple(ids[max(0, start - storage.last_tokens.shape[1]) : start])
    storage.apply(
        [
            OpenSlot(slot),
            SetTable(slot, 0, adopted),
            SetTable(slot, len(adopted), tuple(own)),
            SetLength(slot, start, last),
        ]
    )


def feed(
    model: DeepseekV41,
    storage: CacheStorage,
    slot: int,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    *,
    num_logits: int = 1,
    mates: Sequence[Chunk] = (),
    **bounds: int,
) -> Tensor:
    """The tokens that the slot lacks, in chunks that end at `cuts` -> the logits of the last ones.

    mates: chunks of other sequences, one beside each of ours while they last. Logits are asked for where the last rows
    are, though not where only earlier chunks have them.
    """
    start, logits, mates = storage.length(slot), torch.empty(0), list(mates)
    for end in sorted({cut for cut in cuts if start < cut < len(ids)} | {len(ids)}):
        wanted = max(0, min(end - start, num_logits - (len(ids) - end)))
        chunks = [Chunk(slot, start, ids[start:end], wanted, **bounds)]
        if mates:
            chunks.insert(0, mates.pop(0))
        got = model.forward(chunks, storage)
        logits = torch.cat((logits, got[len(got) - wanted :]))
        start = end
    return logits


def same_logits(model: DeepseekV41, got: Tensor, expected: Tensor) -> None:
    """Bit for bit where the CPU kernels run; 1e-5 of the largest logit on the reference path (other orders of sums)."""
    assert got.shape == expected.shape and got.shape[0] > 0
    assert not got.isnan().any()
    if select.cpu_twins(model.device, model.numerics.dtype):
        assert torch.equal(got, expected)
    else:
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
