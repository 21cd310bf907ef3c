"""A context of a million tokens of the released shape decodes; and records beyond 2^31 bytes of a pool are found.

Left out of the million: 18 of 40 layers and most experts (22 layers have all four KV sources and both Engram layers),
and the prefill, whose records are random instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_device import CUDA, DEVICE, free_gpu, on_gpu, twins_alone

from deepinfer.bench.rank_share import Rank, RankShare
from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Batch, Chunk, load_model


@pytest.fixture(autouse=True)
def memory_comes_back() -> Iterator[None]:
    yield
    free_gpu()


class TestMillion:
    pytestmark = twins_alone

    def test_a_context_of_a_million_tokens_decodes(self) -> None:
        """Steps of one sequence, whose every logit is finite and whose choice of entries reaches the newer half of the
        context, too: with other keys there, the same step says something else."""
        share = RankShare(ep=32, layers=22, sequences=1, context=1_048_000, nextn=0, prefill_chunk=0, steps=2)
        rank = Rank(share, DEVICE)
        assert rank.kv_bytes_per_token == pytest.approx(890)
        rank.open_sequences()
        for _ in range(2):
            assert [step[:2] for step in rank.decode_steps(1)] == [(1, 1)]
        with torch.inference_mode():
            batch, tokens = rank.verify_batch(), rank.storage.last_tokens.clone()

            def again() -> torch.Tensor:
                """The step from the same state: without drafts nothing may be taken back, the newest tokens neither."""
                logits = rank.forward.forward(batch, rank.storage).clone()
                rank.rewind(batch)
                rank.storage.last_tokens.copy_(tokens)
                return logits

            logits = again()
            assert logits.isfinite().all()
            assert torch.equal(again(), logits)
            for records in rank.storage.records.values():  # the keys of a block lie together: whole blocks move
                _, keys = records.blocks()
                half = len(keys) // 2
                keys[half:] = keys[: len(keys) - half].clone()
            assert not torch.equal(again(), logits)


class TestFarBlocks:
    pytestmark = on_gpu

    def test_blocks_beyond_two_gigabytes_of_a_pool_are_as_good_as_the_first(self, tiny_checkpoint: Path) -> None:
        """Prompt and decode steps in the first blocks, and in the last of pools of more than 2^31 bytes: the same bits.
        The tiny shape: 9,216 bytes of compressed records a block at ratio 1, so 233,017 blocks do; 7 GB in all."""
        dtype = "bfloat16" if CUDA else "float32"
        network = load_model(tiny_checkpoint, device=str(DEVICE), dtype=dtype)
        blocks = 250_000 if CUDA else 100
        storage = CacheStorage.for_model(
            network, max_num_seqs=2, num_blocks=blocks, kv_format="packed" if CUDA else "float32", padded_rows=200
        )
        if CUDA:
            assert max(records.kv.nbytes for records in storage.records.values()) > 1 << 31
        storage.apply([OpenSlot(0), SetTable(0, 0, (1, 2, 3)), OpenSlot(1)])
        storage.apply([SetTable(1, 0, (blocks, blocks - 1, blocks - 2))])
        ids = torch.randint(3, 400, (140,), generator=torch.Generator().manual_seed(1)).tolist()
        said: list[list[torch.Tensor]] = [[], []]
        with torch.inference_mode():
            for slot in range(2):
                for first, end in ((0, 130), (130, 137), *((n, n + 1) for n in range(137, 140))):
                    batch = Batch.from_chunks([Chunk(slot, first, ids[first:end], end - first)], DEVICE)
                    said[slot].append(network.forward(batch, storage).clone())
        assert torch.equal(torch.cat(said[0]), torch.cat(said[1]))
        assert storage.block_checksums([1, 2]).tolist() == storage.block_checksums([blocks, blocks - 1]).tolist()
