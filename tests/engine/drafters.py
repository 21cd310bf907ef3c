"""Drafters that know the answer, guess it, or never have it: what tests put in the draft model's place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.storage import CacheStorage
from deepinfer.speculation.propose import DraftLaw, Proposal, Rule, draw_drafts

CONFIDENT = 4.0  # logit of 0.98


def lucky(right: float, *key: int) -> bool:
    """True with probability `right`, the same for the same key."""
    return right >= 1 or random.Random(str(key)).random() < right


def _rows_of(law: DraftLaw, rows: np.ndarray) -> DraftLaw:
    at = torch.from_numpy(rows)
    return replace(law, rules=law.rules[rows], temperature=law.temperature[at], key=(law.key[0][at], law.key[1][at]))


class RowDrafter:
    """Knows the law of a model whose logits are a function of the last token and its position, and drafts from it with
    probability `right`, else from its opposite. With right = 1 all its drafts are the target's own tokens; right = 0 is
    never right where the rule is not the residual one."""

    def __init__(self, storage: CacheStorage, k: int, row: Callable[[int, int], Tensor], right: float = 1.0) -> None:
        self.k, self.right = k, right
        self._storage, self._row = storage, row

    def propose(self, slots: np.ndarray, anchors: Tensor, law: DraftLaw) -> Proposal:
        positions = self._storage.lengths(slots)
        drafts, logits = torch.empty(len(slots), self.k, dtype=torch.int64), []
        confidence = torch.empty(len(slots), self.k)
        previous = anchors
        for i in range(self.k):
            at = (positions + i).tolist()
            guesses = [lucky(self.right, slot, position) for slot, position in zip(slots.tolist(), at, strict=True)]
            rows = [self._row(token, position) for token, position in zip(previous.tolist(), at, strict=True)]
            true = torch.stack(rows)
            z = torch.where(torch.tensor(guesses)[:, None], true, (-true).nan_to_num(neginf=-30.0, posinf=-30.0))
            place = torch.from_numpy(positions + i)
            drawn = draw_drafts(z, law, place, i + 1)
            truth = draw_drafts(true, law, place, i + 1)
            same = (drawn == truth) & ~torch.tensor(guesses) & torch.from_numpy(law.rules != Rule.RESIDUAL)
            previous = drafts[:, i] = torch.where(same, (truth + 1) % z.shape[-1], drawn)
            confidence[:, i] = torch.where(torch.tensor(guesses), CONFIDENT, -CONFIDENT)
            logits.append(z)
        residual = np.flatnonzero(law.rules == Rule.RESIDUAL)
        kept = torch.stack(logits, 1)[torch.from_numpy(residual)] if residual.size else None
        return Proposal(drafts, confidence, kept)


class TableDrafter:
    """Looks its sequence up, by the tokens so far, among sequences that were decoded before, and drafts what followed
    there: each token with probability `right`, else another one. Of no use to the residual rule."""

    tokens: Tensor  # the runner's table

    def __init__(
        self, storage: CacheStorage, k: int, sequences: Sequence[np.ndarray], vocab: int, right: float = 1.0
    ) -> None:
        self.k, self.right, self.vocab = k, right, vocab
        self._storage = storage
        self._sequences = sequences  # may grow

    def propose(self, slots: np.ndarray, anchors: Tensor, law: DraftLaw) -> Proposal:
        drafts = torch.zeros(len(slots), self.k, dtype=torch.int64)
        confidence = torch.full((len(slots), self.k), -CONFIDENT)
        for r, (slot, position) in enumerate(zip(slots.tolist(), self._storage.lengths(slots).tolist(), strict=True)):
            for i, token in enumerate(self._following(slot, position + 1)):
                if lucky(self.right, slot, position + i):
                    drafts[r, i], confidence[r, i] = token, CONFIDENT
                else:
                    drafts[r, i] = (token + 1 + position % 7) % self.vocab
        return Proposal(drafts, confidence, None)

    def _following(self, slot: int, known: int) -> list[int]:
        so_far = self.tokens[slot, :known].numpy()
        for sequence in self._sequences:
            if len(sequence) > known and (sequence[:known] == so_far).all():
                return sequence[known : known + self.k].tolist()
        return []
