"""Drafts come from the law that is returned with them, and one kind of request does not pay for another."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import random_key

from deepinfer.kernels.random_streams import Stream, gumbel
from deepinfer.kernels.reference.markov import markov_chain
from deepinfer.speculation import propose
from deepinfer.speculation.propose import DraftLaw, DraftModelDrafter, Rule, draft_logprobs

V, D, BLOCK, RANK = 11, 4, 5, 3


class SmallDraftModel:
    """The contract of the draft model with one matrix for each part."""

    block = BLOCK

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embed, self.noise, self.head, self.markov_embed, self.markov_head, self.w = (
            torch.randn(*shape, generator=generator)
            for shape in ((V, D), (BLOCK, D), (D, V), (V, RANK), (RANK, V), (D + RANK,))
        )

    def drafting(self) -> nullcontext[None]:
        return nullcontext()

    def hidden(self, anchors: Tensor, window: SimpleNamespace) -> Tensor:
        assert window.positions.numel() == len(anchors) * BLOCK
        return self.embed[anchors][:, None] + self.noise

    def base_logits(self, hidden: Tensor, k: int) -> Tensor:
        return hidden[:, :k] @ self.head

    def markov(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.markov_embed[previous]
        return embedding @ self.markov_head, embedding

    def greedy_chain(self, anchors: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return markov_chain(anchors, self.markov_embed, self.markov_head.t(), logits)

    def confidence(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        return torch.cat((hidden, embedding), -1) @ self.w


class Lengths:
    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def begin_drafts(self, slots: np.ndarray, block: int) -> SimpleNamespace:
        ends = torch.from_numpy(self.lengths[slots])
        return SimpleNamespace(positions=(ends[:, None] + torch.arange(block)).flatten())


def drafted(rules: list[Rule], k: int = 4) -> tuple[propose.Proposal, DraftLaw, Tensor, np.ndarray]:
    rows = len(rules)
    lengths = np.arange(rows) * 3 + 7
    law = DraftLaw(np.array(rules, np.uint8), torch.linspace(0.5, 1.5, rows), random_key(rows, 2))
    anchors = torch.arange(rows) % V
    drafter = DraftModelDrafter(SmallDraftModel(), Lengths(lengths), k)
    return drafter.propose(np.arange(rows), anchors, law), law, anchors, lengths


def test_each_draft_follows_from_the_one_before_by_the_rule_of_its_request() -> None:
    rules = [Rule.GREEDY, Rule.COUPLED, Rule.RESIDUAL] * 4
    proposal, law, anchors, lengths = drafted(rules)
    model = SmallDraftModel()
    for row, rule in enumerate(rules):
        hidden = model.hidden(anchors[row : row + 1], SimpleNamespace(positions=torch.zeros(BLOCK)))
        before = anchors[row : row + 1]
        key = (law.key[0][row : row + 1], law.key[1][row : row + 1])
        for i in range(4):
            bias, embedding = model.markov(before)
            z = (model.base_logits(hidden, BLOCK)[:, i] + bias) / (law.temperature[row] if rule else 1.0)
            at = torch.tensor([lengths[row] + i])
            if rule == Rule.COUPLED:
                z = z + gumbel(key, at, None, V, stream=Stream.TARGET)
            if rule == Rule.RESIDUAL:
                z = z + gumbel(key, at, None, V, stream=Stream.DRAFT, slot=i + 1)
            confidence = model.confidence(hidden[:, i], embedding)
            assert torch.allclose(proposal.confidence[row, i], confidence[0], atol=1e-5)
            before = z.argmax(-1)
            assert int(before) == int(proposal.token_ids[row, i])


def test_logits_come_back_of_the_requests_that_are_judged_by_chance_alone() -> None:
    rules = [Rule.GREEDY, Rule.RESIDUAL, Rule.COUPLED, Rule.RESIDUAL]
    proposal, law, anchors, _ = drafted(rules)
    assert proposal.logits is not None and proposal.logits.shape == (2, 4, V)
    own = torch.tensor([1, 3])
    log_q = draft_logprobs(proposal.logits, law.temperature[own])
    assert torch.allclose(log_q.exp().sum(-1), torch.ones(2, 4))
    model = SmallDraftModel()
    first = model.base_logits(model.hidden(anchors, SimpleNamespace(positions=torch.zeros(4 * BLOCK))), 1)[:, 0]
    first = (first + model.markov(anchors)[0])[own] / law.temperature[own][:, None]
    assert torch.allclose(log_q[:, 0], torch.log_softmax(first, -1), atol=1e-5)
    assert drafted([Rule.GREEDY, Rule.COUPLED])[0].logits is None
    everyone = drafted([Rule.RESIDUAL, Rule.RESIDUAL])[0].logits
    assert everyone is not None and len(everyone) == 2


def test_a_request_drafts_the_same_alone_and_beside_others() -> None:
    rules = [Rule.GREEDY, Rule.COUPLED, Rule.RESIDUAL, Rule.COUPLED]
    together, law, anchors, lengths = drafted(rules)
    for row in range(len(rules)):
        own = DraftLaw(law.rules[row : row + 1], law.temperature[row : row + 1],
                       (law.key[0][row : row + 1], law.key[1][row : row + 1]))  # fmt: skip
        drafter = DraftModelDrafter(SmallDraftModel(), Lengths(lengths), 4)
        alone = drafter.propose(np.array([row]), anchors[row : row + 1], own)
        assert torch.equal(alone.token_ids[0], together.token_ids[row])


def test_greedy_requests_make_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("noise for a greedy batch")

    monkeypatch.setattr(propose, "gumbel", refuse)
    assert drafted([Rule.GREEDY] * 3)[0].token_ids.shape == (3, 4)
    with pytest.raises(AssertionError):
        drafted([Rule.GREEDY, Rule.COUPLED])


def test_a_tiny_temperature_draws_the_likeliest() -> None:
    z = torch.tensor([[1.0, 3.0, 2.0]])
    law = DraftLaw(np.array([Rule.RESIDUAL], np.uint8), torch.tensor([1e-30]), random_key(1, 0))
    assert propose.draw_drafts(z, law, torch.tensor([5]), 1).tolist() == [1]
    assert draft_logprobs(z[:, None], law.temperature).exp().tolist() == [[[0.0, 1.0, 0.0]]]


@pytest.mark.parametrize("k", [0, 6])
def test_more_drafts_than_the_layers_were_trained_for_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match="drafts"):
        DraftModelDrafter(SmallDraftModel(), Lengths(np.zeros(1, np.int64)), k)
