"""The draft model's pass as CUDA graphs by sequences: for steps that are no rounds, and to measure what drafts cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.device_round import DraftsOfRound
from deepinfer.engine.graphs import COUNTS
from deepinfer.engine.rounds import RoundDraftModel
from deepinfer.kernels.streams import Event, Graph, OutOfMemory, record
from deepinfer.kernels.triton.sampling_rows import RowLaws
from deepinfer.speculation.propose import Drafter, DraftLaw, Proposal, Rule

Whole = npt.NDArray[np.int64]


class PaddedDraft:
    """The pass behind up to `count` sequences, and its graph once it is captured. Rows of nobody have the null slot."""

    def __init__(self, drafter: RoundDraftModel, storage: CacheStorage, count: int) -> None:
        device = storage.device
        self.count = count
        self._drafter, self._null_slot = drafter, storage.null_slot
        pinned = device.type == "cuda"
        self._host = torch.zeros(3, count, dtype=torch.int64, pin_memory=pinned)
        self._copied = Event() if pinned else None
        self._host[0] = self._null_slot
        self._numbers = self._host.to(device, copy=True)
        self._slots, lengths, self._drawn = self._numbers
        self._anchors = torch.zeros(count, dtype=torch.int64, device=device)
        self._heat = torch.zeros(count, device=device)
        share, floor = torch.ones(count, device=device), torch.full((count,), -torch.inf, device=device)  # not read
        self._seeds = torch.zeros(3, count, dtype=torch.int64, device=device)  # top-k, and the seeds' two words
        rows = torch.arange(count, device=device)
        self._laws = RowLaws(rows, lengths, self._heat, self._seeds[0], share, floor, self._seeds[1], self._seeds[2])
        self._graph: Graph | None = None
        self._drafts: DraftsOfRound | None = None

    def capture(self, memory_pool: Any) -> None:
        self._pass()
        self._graph, self._drafts = record(self._pass, memory_pool)

    def run(self, slots: Whole, lengths: Whole, anchors: Tensor, law: DraftLaw) -> Proposal:
        """As `Drafter.propose`; lengths int64 [R]: where the anchors stand. Good until the next pass."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before has left the host's buffer
        host, used = self._host.numpy(), len(slots)
        host[0, :used], host[0, used:] = slots, self._null_slot
        host[1, :used], host[1, used:] = lengths, 0
        host[2, :used], host[2, used:] = law.rules != Rule.GREEDY, 0
        self._numbers.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._anchors[:used].copy_(anchors)
        self._heat[:used].copy_(law.temperature)
        self._heat.mul_(self._drawn)
        for words, own in zip(self._seeds[1:], law.key, strict=True):
            words[:used].copy_(own)
        if self._graph is None:
            drafts = self._pass()
        else:
            self._graph.replay()
            assert self._drafts is not None
            drafts = self._drafts
        return Proposal(drafts.token_ids[:used], drafts.confidence[:used], None)

    def _pass(self) -> DraftsOfRound:
        return self._drafter.propose(self._slots, self._anchors, self._laws)


class GraphedDrafter:
    """A `Drafter` that runs padded what the greedy and the coupled rule draw, and the rest as `plain` does."""

    def __init__(self, plain: Drafter, drafter: RoundDraftModel, storage: CacheStorage) -> None:
        self._plain, self._storage = plain, storage
        sequences = storage.max_num_seqs
        counts = [sequences, *(count for count in reversed(COUNTS) if count < sequences)]
        self._passes = [PaddedDraft(drafter, storage, count) for count in counts]

    def capture(self, memory_pool: Any, *, progress: bool = False) -> None:
        """Record all graphs, the largest first. RuntimeError naming what to lower where memory does not suffice."""
        with torch.inference_mode(), tqdm(self._passes, desc="Capturing drafts", disable=not progress) as bar:
            for padded in bar:
                try:
                    padded.capture(memory_pool)
                except OutOfMemory as error:
                    raise RuntimeError(
                        f"out of memory while the graph of drafts for {padded.count} sequences was captured: lower "
                        f"gpu_memory_utilization, num_blocks or max_num_seqs, or use nextn=0"
                    ) from error

    def propose(self, slots: Whole, anchors: Tensor, law: DraftLaw) -> Proposal:
        if (law.rules == Rule.RESIDUAL).any():
            return self._plain.propose(slots, anchors, law)
        padded = [one for one in self._passes if len(slots) <= one.count][-1]
        return padded.run(slots, self._storage.lengths(slots), anchors, law)
