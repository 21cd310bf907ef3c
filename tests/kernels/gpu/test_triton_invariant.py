"""Operations whose rows know nothing of each other: BF16 products, plain index scores, and a network with the flag."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from twins import DEVICE, relative_error

pytest.importorskip("triton")

from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.kernels import select
from deepinfer.kernels.gpu_weights import FoldedWeight, GroupedWeight, ShuffledExperts, SplitHeads, StackedWeight
from deepinfer.kernels.reference import indexer
from deepinfer.kernels.triton import bf16_linear as products
from deepinfer.kernels.triton import indexer as indexer_kernels
from deepinfer.kernels.triton.attention import serves
from deepinfer.kernels.triton.bf16_linear import bf16_linear
from deepinfer.kernels.triton.dense import Tile
from deepinfer.kernels.triton.index_scores_plain import plain_scores
from deepinfer.kernels.weights import DenseWeight
from deepinfer.model import Batch, Chunk, load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint

ON_GPU = DEVICE.type == "cuda"


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=draw) * scale).bfloat16().to(DEVICE)


# -- BF16 products ----------------------------------------------------------------------------------------------------

SHAPES = [(24, 128), (130, 72), (40, 1024)]  # outputs, width: ragged in both; in two parts
REAL = [(384, 5120), (512, 5120), (128, 512), (32, 5120), (129280, 5120)]  # router, compressor, index keys .., head


@pytest.mark.parametrize(("outputs", "width"), SHAPES + (REAL if ON_GPU else []))
def test_a_row_of_a_product_does_not_know_how_many_there_are(outputs: int, width: int) -> None:
    """Few rows, whose parts of K are programs of their own, and many, whose parts one program makes."""
    count = 400 if ON_GPU else 150
    x, weight = normal(count, width, seed=1), normal(outputs, width, seed=2, scale=0.02)
    whole = bf16_linear(x, weight)
    # The sum is float32's: 2^-24 a step, of at most 5120 that mostly cancel.
    assert relative_error(whole, x.double() @ weight.double().T) < 1e-5
    assert torch.equal(bf16_linear(x, weight, torch.bfloat16), whole.bfloat16())
    for rows in (slice(0, 1), slice(7, 24), slice(3, 99), slice(0, 129)):
        assert torch.equal(bf16_linear(x[rows], weight), whole[rows]), rows


def test_parts_are_summed_alike_by_programs_of_their_own_and_by_one() -> None:
    outputs, width = 40, 2048
    assert products.part_count(outputs, width) == 4
    x, weight = normal(20, width, seed=3), normal(outputs, width, seed=4)
    apart = bf16_linear(x, weight, tile=Tile(64, 16, products.DEPTH, 4, 2, 4))
    assert torch.equal(bf16_linear(x, weight, tile=Tile(64, 32, products.DEPTH, 1, 2, 4)), apart)
    one_sum = bf16_linear(x, torch.cat((weight, weight.new_zeros(6000, width))))[:, :outputs]
    assert products.part_count(6040, width) == 1
    assert not torch.equal(one_sum, apart)  # the parts do change bits: the order is the matrix's


# -- index scores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_index_scores_are_the_reference_s_and_each_is_alone(dtype: torch.dtype) -> None:
    """float32: sums of 12 in another order. bfloat16: a step apart now and then, where such a sum rounds."""
    queries, weights = normal(2, 3, 5, 12, seed=5).to(dtype), normal(2, 3, 5, seed=6).to(dtype)
    keys = normal(2, 70, 12, seed=7).float()
    scores = plain_scores(queries, keys, weights)
    expected = indexer.index_scores(queries, keys, weights)
    assert relative_error(scores, expected) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(plain_scores(queries[1:, 2:], keys[1:, :33], weights[1:, 2:]), scores[1:, 2:, :33])


def test_shapes_that_attention_serves_are_known_without_triton() -> None:
    for heads in (4, 8, 16, 24, 32, 64, 128):
        for size in (64, 128, 192, 256, 512):
            q = torch.empty(1, heads, size, dtype=torch.bfloat16)
            pool = torch.empty(1, size + size // 32, dtype=torch.uint8)
            assert select.attends(heads, size) == serves(q, pool, None)


# -- a network --------------------------------------------------------------------------------------------------------

IDS = torch.randint(3, 400, (320,), generator=torch.Generator().manual_seed(1)).tolist()


def storage_for(model: DeepseekV41) -> CacheStorage:
    storage = CacheStorage.for_model(model, max_num_seqs=3, num_blocks=12, kv_format="hopper", drafts=2)
    for slot in range(3):
        storage.apply([OpenSlot(slot), SetTable(slot, 0, tuple(range(1 + 4 * slot, 5 + 4 * slot)))])
    return storage


def test_the_flag_reaches_every_weight_of_a_network(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "two", preset("tiny", layers=2, experts=3, drafts=True))

    def flags(invariant: bool) -> list[bool]:
        with select.interpreted_gpu():
            model = load_model(tmp_path / "two", device=str(DEVICE), dtype="bfloat16", drafts=True, invariant=invariant)
        assert model.numerics.invariant is invariant
        found: list[bool] = []

        def collect(value: object, seen: set[int]) -> None:
            if id(value) in seen or isinstance(value, Tensor):
                return
            seen.add(id(value))
            if isinstance(value, (FoldedWeight, DenseWeight, ShuffledExperts)):
                found.append(value.invariant)
            if isinstance(value, (list, tuple)) and not isinstance(value, GroupedWeight):
                for one in value:
                    collect(one, seen)
            elif type(value).__module__.startswith("deepinfer."):
                for one in vars(value).values():
                    collect(one, seen)

        collect(model, set())
        kinds = {type(block.attention.queries.wq_b) for block in model.blocks}
        assert kinds == {SplitHeads} and isinstance(model.blocks[0].attention.queries.stacked, StackedWeight)
        return found

    on, off = flags(True), flags(False)
    assert len(on) == len(off) > 30 and all(on) and not any(off)


def test_two_layers_give_a_row_the_same_bits_however_they_are_run(tmp_path: Path) -> None:
    """One chunk of a prompt, and the same in pieces beside others."""
    write_random_checkpoint(tmp_path / "two", preset("tiny", layers=2, experts=3))
    ids = IDS[:200] if ON_GPU else IDS[:5]
    with torch.inference_mode(), select.interpreted_gpu():
        model = load_model(tmp_path / "two", device=str(DEVICE), dtype="bfloat16", invariant=True)
        alone, among = storage_for(model), storage_for(model)
        whole = model.forward(Batch.from_chunks([Chunk(0, 0, ids, len(ids))], DEVICE), alone)
        half = len(ids) // 2
        first = [Chunk(1, 0, IDS[9:11], 1), Chunk(0, 0, ids[:half], half)]
        second = [Chunk(0, half, ids[half:], len(ids) - half), Chunk(2, 0, IDS[3:4], 1)]
        begun = model.forward(Batch.from_chunks(first, DEVICE), among)[1:].clone()
        rest = model.forward(Batch.from_chunks(second, DEVICE), among)[:-1]
    assert torch.equal(torch.cat((begun, rest)), whole)


def test_a_step_whose_rows_see_no_entry_chooses_none() -> None:
    """The first token of a sequence, alone in its step: nothing is compressed yet, and memory holds what was there."""
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    plans = indexer_kernels.plan_step(first, first, first, chunks=1, ratio=2, topk=16, max_entries=0)
    codes = torch.zeros(1, 32, 128, device=DEVICE).to(torch.float8_e4m3fn)
    queries = indexer_kernels.IndexQueries(codes, torch.ones(1, 32, device=DEVICE))
    pool = torch.zeros(128, 68, dtype=torch.uint8, device=DEVICE)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # memory that is not written holds the largest number
    try:
        entries, blocks = indexer_kernels.choose_entries(queries, pool, first[None], 64, plans, publish=16)
    finally:
        torch.use_deterministic_algorithms(before)
    assert blocks is not None
    assert entries.eq(-1).all() and blocks.eq(-1).all()
