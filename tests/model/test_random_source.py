"""A random model without a checkpoint is the model of the random checkpoint with its config and seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.cache import Cache
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.batch import Chunk
from deepinfer.model.presets import preset
from deepinfer.model.random_source import RandomReader, fill_repeated, random_model
from deepinfer.model.random_values import POOL
from deepinfer.model.safetensors_header import CheckpointError
from deepinfer.model.tensors import TensorSpec
from deepinfer.model.weights import CheckpointReader

CPU = torch.device("cpu")


def test_every_tensor_is_the_checkpoints(draft_checkpoint: Path) -> None:
    with CheckpointReader(draft_checkpoint) as reader:
        random = RandomReader(reader.config, 0, CPU)
        for name in reader.names():
            spec = reader.spec(name)
            assert random.spec(name) == spec
            if spec.kind != "engram_table":
                mine, theirs = random.read(name), reader.read(name)
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
        ids = torch.tensor([0, 5, 659])
        table = "layers.1.engram.embed"
        assert torch.equal(random.table(table).rows(ids), reader.table(table).rows(ids))


def test_tensors_longer_than_their_pool() -> None:
    """The released matrices repeat theirs: the bytes are those that are written, wherever the window begins."""
    config = preset("tiny")
    reader = RandomReader(config, 3, CPU)
    for name in ("a.weight", "b.weight", "c.weight"):
        reader._specs[name] = spec = TensorSpec(name, (1100, 2048), "F8_E4M3", "attention")  # 2.15 pools
        written = b"".join(reader._values.chunks(spec))
        assert reader.read(name).view(torch.uint8).numpy().tobytes() == written


@pytest.mark.parametrize(("length", "offset"), [(0, 0), (3, 6), (7, 0), (8, 6), (30, 3)])
def test_repetition(length: int, offset: int) -> None:
    target, pool = torch.full((length,), 99, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)
    fill_repeated(target, pool, offset)
    assert target.tolist() == [(offset + place) % 7 for place in range(length)]
    assert POOL > 7


def logits(model: DeepseekV41) -> torch.Tensor:
    cache = Cache.for_model(model, max_num_seqs=1, num_blocks=1)
    slot = cache.open()
    cache.reserve(slot, 40)
    out = model.forward([Chunk(slot, 0, list(range(10, 50)), 40)], cache)
    cache.close(slot)
    return out


def test_same_logits_as_the_checkpoint(tiny_checkpoint: Path) -> None:
    made = random_model(preset("tiny"), device=CPU)
    assert torch.equal(logits(made), logits(load_model(tiny_checkpoint)))


def test_unknown_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.99"):
        RandomReader(preset("tiny"), 0, CPU).read("layers.99.attn.wq_a.weight")
