"""Drafts as an engine would make them, greedily: a step writes the windows, a block pass reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from golden import golden_dir
from torch import Tensor

from deepinfer.cache.storage import CacheStorage
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41

CASE = "08-dspark"


@dataclass(frozen=True)
class Drafts:
    """Of one block, or of several behind each other."""

    ids: Tensor  # int64 [B + 1], the anchor first; [n, B + 1]
    logits: Tensor  # [B, vocab], with what the token before adds
    confidence: Tensor  # [B]

    @classmethod
    def stack(cls, blocks: Sequence[Drafts]) -> Drafts:
        return cls(*(torch.stack([getattr(b, name) for b in blocks]) for name in ("ids", "logits", "confidence")))

    def equal(self, other: Drafts) -> bool:
        """Bit for bit."""
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in ("ids", "logits", "confidence"))


@cache
def golden_model(dtype: str = "float32", kernels: str = "picked") -> DeepseekV41:
    weights = "wide" if kernels == "reference" else "auto"
    return load_model(golden_dir() / CASE, dtype=dtype, weights=weights, drafts=True)


def draft_block(
    network: DeepseekV41, storage: CacheStorage, slots: Sequence[int], anchors: Sequence[int]
) -> list[Drafts]:
    """One block for each slot: its newest token, the anchor, stands at the slot's length."""
    draft = network.draft
    assert draft is not None
    ids = [torch.tensor(anchors)]
    window = storage.begin_drafts(np.array(slots), draft.block)
    hidden = draft.hidden(ids[0], window)
    base = draft.base_logits(hidden, draft.block)
    logits, confidence = [], []
    for i in range(draft.block):
        bias, embedding = draft.markov(ids[-1])
        logits.append(base[:, i] + bias)
        confidence.append(draft.confidence(hidden[:, i], embedding))
        ids.append(logits[-1].argmax(1))
    columns = (torch.stack(ids, 1), torch.stack(logits, 1), torch.stack(confidence, 1))
    return [Drafts(*parts) for parts in zip(*columns, strict=True)]
