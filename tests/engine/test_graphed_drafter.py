"""Passes of drafts on a GPU that is behind the host, and graphs of them that find no memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.device_round import DraftsOfRound
from deepinfer.engine.graphed_drafter import GraphedDrafter, PaddedDraft
from deepinfer.engine.rounds import RoundDraftModel
from deepinfer.model import load_model
from deepinfer.model.presets import preset
from deepinfer.speculation.propose import DraftLaw, DraftModelDrafter, Rule


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


class Late:
    """A device that does nothing before somebody waits: its stream, an event of it, and a buffer that is copied to."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self.orders: list[Callable[[], object]] = []
        self._marked = 0

    def copy_(self, host: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.orders.append(lambda: self._buffer.copy_(host))

    def record(self) -> None:
        self._marked = len(self.orders)

    def synchronize(self) -> None:
        for order in self.orders[: self._marked]:
            order()
        del self.orders[: self._marked]
        self._marked = 0


def test_a_pass_that_the_device_has_not_begun_drafts_for_its_own_sequences_and_not_the_next_ones() -> None:
    storage = CacheStorage(preset("tiny"), max_num_seqs=4, num_blocks=4, drafts=2, device=torch.device("cpu"))
    seen: list[tuple[list[int], list[int]]] = []

    class Drafter:
        def propose(self, slots: Tensor, anchors: Tensor, laws) -> DraftsOfRound:
            device.orders.append(lambda: seen.append((slots.tolist(), laws.positions.tolist())))
            return DraftsOfRound(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))

    padded = PaddedDraft(Drafter(), storage, 3)  # type: ignore[arg-type]
    device = Late(padded._numbers)
    padded._numbers = padded._copied = device  # type: ignore[assignment]
    none = torch.zeros(2, dtype=torch.int64)
    law = DraftLaw(np.full(2, Rule.GREEDY, np.uint8), torch.ones(2), (none, none))
    padded.run(np.array([0, 1]), np.array([10, 11]), none, law)
    padded.run(np.array([2, 3]), np.array([22, 23]), none, law)
    device.record()
    device.synchronize()
    nobody = storage.null_slot
    assert seen == [([0, 1, nobody], [10, 11, 0]), ([2, 3, nobody], [22, 23, 0])]
