"""Graphs of drafts that find no memory say which settings leave some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.graphed_drafter import GraphedDrafter, PaddedDraft
from deepinfer.engine.rounds import RoundDraftModel
from deepinfer.model import load_model
from deepinfer.speculation.propose import DraftModelDrafter


def test_no_memory_for_a_graph_names_the_size_and_what_to_lower(draft_checkpoint: Path, monkeypatch) -> None:
    model = load_model(draft_checkpoint, drafts=True)
    assert model.draft is not None
    storage = CacheStorage.for_model(model, max_num_seqs=3, num_blocks=4, drafts=2)
    drafter = GraphedDrafter(
        DraftModelDrafter(model.draft, storage, 2), RoundDraftModel(model.draft, storage, 2), storage
    )
    captured = []

    def capture(padded: PaddedDraft, memory_pool: object) -> None:
        if len(captured) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        captured.append(padded.count)

    monkeypatch.setattr(PaddedDraft, "capture", capture)
    with pytest.raises(RuntimeError, match=r"for 2 sequences .*lower gpu_memory_utilization, .*nextn=0") as found:
        drafter.capture(None)
    assert captured == [3]  # the largest first
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
