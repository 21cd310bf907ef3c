"""Memory on the GPU: flat over many steps, 890 bytes a token, and errors that name what to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gpu_device import DEVICE, cuda_alone, free_gpu, on_gpu
from gpu_soak import Soak, problems
from nano_engine import GREEDY, NanoEngine, model, prompt_ids
from torch import Tensor

from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import BLOCK_SIZE
from deepinfer.engine.errors import EngineStepError
from deepinfer.engine.graphs import GraphedModel
from deepinfer.model import Batch, Chunk
from deepinfer.model.presets import preset


@contextmanager
def full_memory() -> Iterator[None]:
    """Inside, the GPU has nothing left, not even in what torch has reserved: tensors hold all of it."""
    free_gpu()
    held: list[Tensor] = []
    try:
        for size in (1 << 30, 1 << 26, 1 << 21, 1 << 17, 1 << 13, 1 << 9):
            while True:
                try:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.cuda.OutOfMemoryError:
                    break
        yield
    finally:
        held.clear()
        free_gpu()


class TestFlat:
    pytestmark = on_gpu

    @pytest.mark.parametrize("drafts", [0, 5])
    def test_memory_is_flat_over_two_hundred_steps(self, drafts: int) -> None:
        """benchmarks/gpu_soak.py makes ten thousand. Nothing that is page-locked may be left behind, either."""
        soak = Soak(str(DEVICE), drafts, sequences=4)
        samples: list[dict] = []
        soak.run(150, 150, lambda one: None)  # whatever is made at first use
        soak.run(200, 25, samples.append)
        soak.engine.close()
        free_gpu()
        assert len(samples) >= 3
        assert [text for text in problems(samples) if "resident" not in text] == []


class TestSizes:
    pytestmark = cuda_alone

    def test_a_token_takes_890_bytes_that_are_really_allocated(self) -> None:
        """Of the released shape, 8,192 blocks = a context of 1,048,576 tokens: 933 MB. Beside them grow the tables, 8
        bytes a block of each of two slots: an eighth of a byte a token. What torch takes from the device is rounded, by
        less than 2 MiB for each of eight pools: 16 bytes a token of this size."""
        config = preset("flash")

        def allocated(blocks: int) -> tuple[int, int]:
            """Bytes that were asked for and that were taken."""
            free_gpu()
            before = torch.cuda.memory_stats()
            storage = CacheStorage(
                config, max_num_seqs=1, num_blocks=blocks, drafts=5, kv_format="hopper", padded_rows=6, device=DEVICE
            )
            after = torch.cuda.memory_stats()
            pools = sum(part.kv.nbytes + part.keys.nbytes for part in storage.records.values())
            assert pools == (blocks + 1) * BLOCK_SIZE * 890
            names = ("requested_bytes.all.current", "allocated_bytes.all.current")
            asked, taken = (after[name] - before.get(name, 0) for name in names)
            return asked, taken

        few, many = allocated(1), allocated(8192)
        asked, taken = ((large - small) / (8191 * BLOCK_SIZE) for small, large in zip(few, many, strict=True))
        print(f"\n{asked:.3f} bytes a token asked for, {taken:.3f} taken")
        assert asked == pytest.approx(890, abs=0.2)
        assert asked <= taken + 0.2
        assert taken <= 890 + 16


class TestOutOfMemory:
    pytestmark = cuda_alone

    def storage(self) -> CacheStorage:
        storage = CacheStorage.for_model(
            model(), max_num_seqs=4, num_blocks=16, kv_format="packed", drafts=5, padded_rows=600
        )
        for slot in range(4):
            storage.apply([OpenSlot(slot), SetTable(slot, 0, tuple(range(1 + 4 * slot, 5 + 4 * slot)))])
        return storage

    def prompt(self, slot: int) -> Batch:
        ids = torch.randint(3, 400, (300,), generator=torch.Generator().manual_seed(1)).tolist()
        return Batch.from_chunks([Chunk(slot, 0, ids, 1)], DEVICE)

    def test_capture_names_the_settings_to_lower(self) -> None:
        with torch.inference_mode():
            GraphedModel(model(), self.storage(), rows=24, longest=400).capture()  # kernels are compiled and loaded
            graphs = GraphedModel(model(), self.storage(), rows=24, longest=400)
            with full_memory(), pytest.raises(RuntimeError, match="lower gpu_memory_utilization, num_blocks or max_nu"):
                graphs.capture()
            again = GraphedModel(model(), self.storage(), rows=24, longest=400)
            assert again.capture() >= 0  # with memory it works, in the same process

    def test_a_step_names_the_settings_to_lower_and_the_next_one_works(self) -> None:
        with torch.inference_mode():
            storage = self.storage()
            graphs = GraphedModel(model(), storage, rows=0, longest=400)
            first, lost, again = (self.prompt(slot) for slot in range(3))
            expected = graphs.forward(first, storage).clone()
            with full_memory(), pytest.raises(RuntimeError, match="step of 300 tokens: lower max_num_batched_tokens"):
                graphs.forward(lost, storage)
            assert torch.equal(graphs.forward(again, storage), expected)

    def test_an_engines_error_names_the_settings_and_the_engine_goes_on(self) -> None:
        nano = NanoEngine(drafts=5)
        expected = nano.complete(GREEDY, prompt_ids())
        with full_memory():
            nano.engine.add_request("lost", list(prompt_ids()[3]), GREEDY)
            with pytest.raises(EngineStepError, match=r"out of memory in a step .* lower max_num_batched_tokens"):
                while nano.engine.has_unfinished:
                    nano.engine.step()
        assert nano.complete(GREEDY, prompt_ids()) == expected
        nano.close()
        free_gpu()
