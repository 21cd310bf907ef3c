"""Engram tables that stay in their files: steps are the same bit for bit as with page-locked ones, planned and padded,
and on a GPU as graphs, whose rows the host reads before each replay."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor
from twins import DEVICE

pytest.importorskip("triton")

from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.graphs import PaddedStep
from deepinfer.kernels import select
from deepinfer.kernels.streams import new_memory_pool
from deepinfer.model import Batch, Chunk, load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.engram import PrefetchedTables
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint

IDS = [5, 77, 300, 12, 9, 145]


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch, placement: str) -> DeepseekV41:
    monkeypatch.setattr("deepinfer.model.engram_prefetch.choose_placement", lambda tables: placement)
    model = load_model(path, device=str(DEVICE), dtype="bfloat16", weights="gpu")
    assert isinstance(model.tables, PrefetchedTables) and model.tables.prefetch.placement == placement
    return model


def steps(model: DeepseekV41) -> Tensor:
    """A prompt, then tokens one at a time in a padded step, which is a graph where there are some."""
    storage = CacheStorage.for_model(model, max_num_seqs=2, num_blocks=4, kv_format="hopper", padded_rows=2)
    storage.apply([OpenSlot(0), SetTable(0, 0, (1, 2))])
    found = [model.forward(Batch.from_chunks([Chunk(0, 0, IDS[:3], 3)], DEVICE), storage)]
    step = PaddedStep(model, storage, 2, 128)
    if DEVICE.type == "cuda":
        step.capture(new_memory_pool())
    found += [step.run(Batch.from_chunks([Chunk(0, at, IDS[at : at + 1])], DEVICE)).clone() for at in (3, 4)]
    return torch.cat(found)


def test_steps_over_mapped_tables_are_those_over_pinned_ones(tmp_path: Path, monkeypatch, caplog) -> None:
    write_random_checkpoint(tmp_path / "two", preset("tiny", layers=2, experts=3))
    with torch.inference_mode(), select.interpreted_gpu():
        pinned = steps(loaded(tmp_path / "two", monkeypatch, "pinned"))
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert torch.equal(steps(loaded(tmp_path / "two", monkeypatch, "mapped")), pinned)
    assert "stay in their files" in caplog.text and "every decode step waits for the host" in caplog.text.lower()
