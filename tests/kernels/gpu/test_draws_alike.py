"""Tokens and log-probabilities of the runner's own path on a GPU: the very bits of a round's, in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from twins import DEVICE

pytest.importorskip("triton")

from deepinfer.engine.device_round import RoundColumns
from deepinfer.engine.plan import Admission
from deepinfer.engine.sampler import choose, list_top, logprobs_of
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sampling_state import LISTED, SamplingState
from deepinfer.engine.target import StepTarget
from deepinfer.kernels import select
from deepinfer.kernels.triton.sampling import sample

VOCAB = 120
LAWS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=7, min_p=0.01),
    SamplingParams(temperature=0.9, frequency_penalty=0.4),
]
SLOTS, POSITIONS = np.arange(len(LAWS)), np.array([4, 9, 30, 2, 17])


def state() -> SamplingState:
    made = SamplingState(len(LAWS), VOCAB, device=DEVICE)
    made.admit([Admission(slot, np.arange(3, dtype=np.int32), 2, law, 1000 + slot) for slot, law in enumerate(LAWS)])
    return made


def logits(seed: int) -> torch.Tensor:
    return (torch.randn(len(LAWS), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4).to(DEVICE)


@pytest.mark.parametrize("seed", [0])
def test_tokens_are_those_of_the_plain_path_and_of_each_row_alone(seed: int) -> None:
    own, z = state(), logits(seed)
    with select.reference_only():
        plain = choose(z, SLOTS, POSITIONS, own)
    with select.interpreted_gpu():
        got = choose(z, SLOTS, POSITIONS, own)
        alone = [choose(z[i : i + 1], SLOTS[i : i + 1], POSITIONS[i : i + 1], own) for i in range(len(LAWS))]
        some = StepTarget(z, SLOTS, POSITIONS, own).draw(torch.tensor([3, 1], device=DEVICE))
    assert torch.equal(got.token_ids, plain.token_ids)
    assert torch.equal(got.token_ids, torch.cat([one.token_ids for one in alone]))
    assert torch.equal(got.logprobs, torch.cat([one.logprobs for one in alone]))
    assert torch.equal(some, got.token_ids[[3, 1]])
    torch.testing.assert_close(got.logprobs, plain.logprobs, atol=2e-6, rtol=2e-6)
    assert bool(got.valid.all())


def test_log_probabilities_are_those_of_a_round() -> None:
    """A round's columns and the runner's own path; and lists, whose rows no round serves."""
    z, own = logits(7), state()
    columns = RoundColumns(len(LAWS), 0, DEVICE)
    columns.enter(own, SLOTS[:4], POSITIONS[:4])
    place = torch.arange(4, device=DEVICE)
    drawn = sample(z[:4], columns.laws(place, columns.lengths[place]))
    with select.interpreted_gpu():
        got = choose(z, SLOTS, POSITIONS, own)
        assert torch.equal(got.token_ids[:4], drawn.token_ids)
        assert torch.equal(got.logprobs[:4], drawn.logprobs)
        assert (got.token_ids != z.argmax(1)).any()
        own.flags[:] |= LISTED
        own.num_listed[:] = 2
        numbers = logprobs_of(z, got.token_ids, SLOTS, POSITIONS, own)
        listed = list_top(z, got.token_ids, SLOTS, own)
        assert listed is not None
        assert list_top(z[2:3], got.token_ids[2:3], SLOTS[2:3], own) == listed[2:3]
    for entry, token, value in zip(listed, got.token_ids.tolist(), numbers.tolist(), strict=True):
        assert entry is not None and entry[token] == value and len(entry) in (2, 3)
    exact = torch.log_softmax(z.double(), 1)
    for row, entry in enumerate(listed):
        for token, value in entry.items():
            assert abs(value - float(exact[row, token])) < 1e-5


def test_a_banned_token_has_no_probability_and_a_row_without_numbers_spoils_no_other() -> None:
    z = logits(8)
    z[1, 5], z[3, 0] = -torch.inf, torch.nan
    ids = torch.tensor([[5], [5], [5], [5], [5]], device=DEVICE)
    with select.interpreted_gpu():
        found = select.log_probabilities(z, ids)[:, 0]
        clean = select.log_probabilities(logits(8)[[0, 2, 4]], ids[:3])[:, 0]
    assert found[1] == -torch.inf
    assert torch.equal(found[[0, 2, 4]], clean)
