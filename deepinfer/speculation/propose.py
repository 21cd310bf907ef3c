"""Drafts for the next round: one pass of the draft model over a block, then a chain that draws them one by one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.kernels.argmax import argmax
from deepinfer.kernels.random_streams import Stream, gumbel

Whole = npt.NDArray[np.int64]


class Rule(IntEnum):
    """How a request's drafts are drawn and judged (verify.py)."""

    GREEDY = 0  # the likeliest; coupled
    COUPLED = 1  # with the noise of the target's own draw at that position, so that the two agree as often as they can
    RESIDUAL = 2  # with noise of their own


@dataclass(frozen=True)
class DraftLaw:
    """How R requests draw their drafts. Nothing but the temperature shapes q: top-k, penalties and masks are p's."""

    rules: npt.NDArray[np.uint8]  # host [R] of Rule
    temperature: Tensor  # float32 [R]; not read of GREEDY rows
    key: tuple[Tensor, Tensor]  # low and high words of the seeds, int64 [R]


class Proposal(NamedTuple):
    token_ids: Tensor  # int64 [R, k]
    confidence: Tensor  # float32 [R, k]: logit that a draft is accepted if those before it are
    logits: Tensor | None  # float32 [n, k, vocab] of the n RESIDUAL rows, in their order; None if there are none


class Drafter(Protocol):
    def propose(self, slots: Whole, anchors: Tensor, law: DraftLaw) -> Proposal:
        """k drafts behind the newest token (int64 [R]) of each of these slots, whose state ends before it."""


class DraftStorage(Protocol):
    """The cache, for what a draft pass sees of it (cache/draft_window.py)."""

    def begin_drafts(self, slots: Whole, block: int) -> Any: ...


class DraftLayers(Protocol):
    """The draft model (model/draft_model.py)."""

    @property
    def block(self) -> int: ...

    def drafting(self) -> AbstractContextManager[None]: ...
    def hidden(self, anchors: Tensor, window: Any) -> Tensor: ...
    def base_logits(self, hidden: Tensor, k: int) -> Tensor: ...
    def greedy_chain(self, anchors: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]: ...
    def markov(self, previous: Tensor) -> tuple[Tensor, Tensor]: ...
    def confidence(self, hidden: Tensor, embedding: Tensor) -> Tensor: ...


class DraftModelDrafter:
    """Drafts with trained draft layers: always their whole block, of which the first k are drawn."""

    def __init__(self, model: DraftLayers, storage: DraftStorage, k: int) -> None:
        if not 1 <= k <= model.block:
            raise ValueError(f"drafts = {k}: the draft layers were trained for 1 .. {model.block}")
        self.k = k
        self._model = model
        self._storage = storage

    def propose(self, slots: Whole, anchors: Tensor, law: DraftLaw) -> Proposal:
        model, k = self._model, self.k
        window = self._storage.begin_drafts(slots, model.block)
        with model.drafting():
            hidden = model.hidden(anchors, window)  # [R, block, D]
            logits = model.base_logits(hidden, k)  # [R, k, vocab]
            if law.rules.any():
                positions = window.positions.view(len(slots), model.block)  # of the token before each draft
                drafts, embeddings = self._chain(anchors, logits, positions, law)
            else:
                drafts, embeddings = model.greedy_chain(anchors, logits)
            # It knows the drafts before the one it judges, not that one.
            confidence = model.confidence(hidden[:, :k].flatten(0, 1), embeddings.flatten(0, 1)).view(drafts.shape)
        residual = np.flatnonzero(law.rules == Rule.RESIDUAL)
        if residual.size and residual.size < len(slots):
            logits = logits.index_select(0, torch.from_numpy(residual).to(logits.device))
        return Proposal(drafts, confidence, logits if residual.size else None)

    def _chain(self, anchors: Tensor, logits: Tensor, positions: Tensor, law: DraftLaw) -> tuple[Tensor, Tensor]:
        """Drafts int64 [R, k] and the embeddings of the tokens before them [R, k, rank]. The logits [R, k, vocab]
        become those that are drawn from."""
        drafts, embeddings = [anchors], []
        for i in range(self.k):
            bias, embedding = self._model.markov(drafts[-1])
            embeddings.append(embedding)
            drafts.append(draw_drafts(logits[:, i].add_(bias), law, positions[:, i], i + 1))
        return torch.stack(drafts[1:], 1), torch.stack(embeddings, 1)


def draw_drafts(logits: Tensor, law: DraftLaw, positions: Tensor, slot: int) -> Tensor:
    """One draft per row, int64 [R]: number `slot`, 1 .. k, of its round. logits float32 [R, vocab]; positions int64
    [R]: of the token before it."""
    drafts = positions.new_empty(len(logits)) if law.rules.all() else argmax(logits)
    for rule, stream, number in ((Rule.COUPLED, Stream.TARGET, 0), (Rule.RESIDUAL, Stream.DRAFT, slot)):
        rows = np.flatnonzero(law.rules == rule)
        if rows.size:
            at = torch.from_numpy(rows).to(logits.device)
            key = (law.key[0][at], law.key[1][at])
            z = _tempered(logits.index_select(0, at), law.temperature[at])
            noise = gumbel(key, positions[at], None, z.shape[-1], stream=stream, slot=number)
            drafts[at] = argmax(z.double() + noise)
    return drafts


def draft_logprobs(logits: Tensor, temperature: Tensor) -> Tensor:
    """log q of raw draft logits: float32 [n, k, vocab] at temperatures float32 [n]. From the very numbers that
    `draw_drafts` drew with: a law that is only nearly the one drawn from would bend the tokens."""
    return torch.log_softmax(_tempered(logits, temperature), dim=-1)


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    # As the sampler does it (so that a draft model equal to the target draws equal tokens): from the row's best on, and
    # no tiny temperature can overflow.
    return (logits - logits.amax(-1, keepdim=True)) / temperature.view(-1, *[1] * (logits.dim() - 1))
