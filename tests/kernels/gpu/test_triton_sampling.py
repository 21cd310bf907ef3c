"""Tokens drawn by the GPU's kernels are the sampler's own: ties, borders of top_k and top_p, masks, rows of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from twins import DEVICE, poisoned

from deepinfer.engine.plan import Admission
from deepinfer.engine.sampler import Chosen, choose
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sampling_state import DRAWN, SamplingState
from deepinfer.kernels.philox import philox, uniforms_float32
from deepinfer.kernels.random_streams import Stream, gumbel
from deepinfer.kernels.reference.masks import constrain_rows
from deepinfer.kernels.triton.philox import gumbel_ids, gumbel_of, philox_words, unit_interval
from deepinfer.kernels.triton.runtime import INTERPRET, launch
from deepinfer.kernels.triton.sampling import sample
from deepinfer.kernels.triton.sampling_rows import RowLaws
from deepinfer.kernels.triton.truncation_cut import exp_double

VOCAB = 157 if INTERPRET.value else 129280
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.4),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=20, top_p=0.9, temperature=1.7),
    SamplingParams(top_k=100, top_p=0.5, min_p=0.01),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.99999),
]


def both(logits: Tensor, kinds: Sequence[SamplingParams], **promises: Any) -> Chosen:
    """Draws with both; -> the sampler's, where tokens and what is valid were compared."""
    rows, vocab = logits.shape
    admissions = [Admission(i, np.array([1, 2], np.int32), 2, p, 2**40 * i + 77) for i, p in enumerate(kinds)]
    state, positions = SamplingState(rows, vocab, device=DEVICE), np.arange(rows) * 3 + 5
    state.admit(admissions)
    expected = plainly_chosen(logits, positions, admissions)
    out = sample(logits, laws_of(state, positions), **promises)
    assert out.valid.tolist() == expected.valid.tolist()
    fine = expected.valid
    assert out.token_ids[fine].tolist() == expected.token_ids[fine].tolist()
    assert (out.token_ids >= 0).all() and (out.token_ids < vocab).all()
    # The sum of exponentials has another order: 1e-6 of its logarithm.
    assert torch.allclose(out.logprobs[fine], expected.logprobs[fine], atol=2e-5, rtol=1e-6)
    return expected


def plainly_chosen(logits: Tensor, positions: np.ndarray, admissions: Sequence[Admission]) -> Chosen:
    """What the sampler chooses on the CPU: on a GPU it asks the very kernel that is tested."""
    rows, vocab = logits.shape
    state = SamplingState(rows, vocab)
    state.admit(list(admissions))
    return Chosen(*(x.to(DEVICE) for x in choose(logits.cpu(), np.arange(rows), positions, state)))


def laws_of(state: SamplingState, positions: np.ndarray) -> RowLaws:
    heat = torch.where(torch.from_numpy(state.flags & DRAWN != 0).to(DEVICE), state.temperature, 0.0)
    shares = heat, state.top_k, state.top_p, torch.log(state.min_p)
    rows = len(positions)
    return RowLaws(torch.arange(rows, device=DEVICE), state.place(positions), *shares, state.seed_low, state.seed_high)


def random_logits(rows: int, seed: int, scale: float = 2.0, vocab: int = VOCAB) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.manual_seed(seed)) * scale).to(DEVICE)


def test_every_kind_of_row_draws_the_samplers_token() -> None:
    both(random_logits(len(KINDS), 0), KINDS)


def test_equal_logits_are_told_apart_by_their_ids() -> None:
    ties = torch.randint(-2, 3, (len(KINDS), VOCAB), generator=torch.manual_seed(1)).float()
    ties[0] = torch.where(ties[0] == 0, -0.0, ties[0])
    both(ties.to(DEVICE), KINDS)


def test_a_flat_row_keeps_the_lowest_ids() -> None:
    kinds = [KINDS[i] for i in (0, 1, 3, 4, 6)]
    both(torch.zeros(len(kinds), VOCAB, device=DEVICE), kinds)


def test_rows_that_are_no_numbers_are_told_and_disturb_nobody() -> None:
    logits = random_logits(8, 2)
    logits[0, 5] = logits[1, 7] = logits[3] = torch.nan
    logits[2] = -torch.inf
    logits[4, 9] = torch.inf
    logits[5] = -torch.inf
    logits[5, 77] = 2.0
    logits[6, :140] = -torch.inf
    logits[7, 1:] *= 1e30
    assert both(logits, [KINDS[i] for i in (0, 1, 4, 3, 6, 4, 1, 1)]).valid.tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 300])
def test_any_vocabulary(vocab: int) -> None:
    both(random_logits(3, vocab, vocab=vocab), [KINDS[0], KINDS[1], KINDS[4]])


def test_logits_far_above_their_neighbours_and_scores_too_close_to_tell_apart() -> None:
    logits = torch.full((4, VOCAB), -5000.0, device=DEVICE)
    logits[:, 40] = 3.0
    logits[2:] = 300.0
    both(logits, [SamplingParams(temperature=heat) for heat in (1.0, 0.01, 1e-4, 1e-3)])


def test_greedy_rows_alone_and_rows_that_drop_nothing_need_fewer_launches() -> None:
    logits = random_logits(3, 4)
    both(logits, KINDS[:1] * 3, drawn=False)
    both(logits, KINDS[:3], truncated=False)
    assert sample(logits).token_ids.tolist() == logits.argmax(-1).tolist()


def test_a_row_does_not_know_its_batch() -> None:
    kinds, logits = [KINDS[i] for i in (1, 4, 6, 0)], random_logits(4, 5)
    state = SamplingState(4, VOCAB, device=DEVICE)
    state.admit([Admission(i, np.array([1], np.int32), 1, p, 5 + i) for i, p in enumerate(kinds)])
    laws = laws_of(state, np.array([9, 9, 9, 9]))
    together = sample(logits, laws)
    promised: list[tuple[int, dict[str, Any]]] = [(0, {"truncated": False}), (1, {}), (2, {}), (3, {"drawn": False})]
    for row, promises in [*promised, (3, {"truncated": False})]:
        own = slice(row, row + 1)
        alone = sample(logits[own], laws._replace(slots=laws.slots[own], positions=laws.positions[own]), **promises)
        assert alone.token_ids.item() == together.token_ids[row].item()
        assert alone.logprobs.item() == together.logprobs[row].item()


def test_masks_forbid_and_a_row_with_nothing_left_keeps_its_constraint() -> None:
    rows = 8
    logits = random_logits(rows, 6)
    words = (VOCAB + 31) // 32
    masks = torch.randint(-(2**31), 2**31, (6, words), generator=torch.manual_seed(7)).to(torch.int32).to(DEVICE)
    masks[5] = 0  # nothing may follow
    masks[4] = 0
    masks[4, 1] = 0b1010  # and of what may, the model says that it is impossible
    logits[6] = -torch.inf
    logits[6, 3] = 1.0
    logits[1, (masks[1, 0] & 1 == 0).long()] = torch.nan  # id 0 or 1: a NaN that counts, or one that is forbidden
    mask_rows = torch.tensor([0, 1, -1, 2, 3, 5, 4, -1], device=DEVICE)
    kinds = [KINDS[i] for i in (0, 1, 1, 4, 3, 0, 6, 4)]
    admissions = [Admission(i, np.array([1, 2], np.int32), 2, p, 900 + i) for i, p in enumerate(kinds)]
    state, positions = SamplingState(rows, VOCAB, device=DEVICE), np.arange(rows)
    state.admit(admissions)
    changed = logits.clone()
    own = (mask_rows >= 0).nonzero()[:, 0]
    constrain_rows(changed, logits, own, masks[mask_rows[own]])
    expected = plainly_chosen(changed, positions, admissions)
    out = sample(logits, laws_of(state, positions), masks=masks, mask_rows=mask_rows)
    assert out.valid.tolist() == expected.valid.tolist()
    fine = expected.valid
    assert out.token_ids[fine].tolist() == expected.token_ids[fine].tolist()
    raw = torch.log_softmax(logits, -1).gather(-1, out.token_ids[:, None])[:, 0]
    assert torch.allclose(out.logprobs[fine], raw[fine], atol=2e-5, equal_nan=True)
    assert out.token_ids[6].item() in (33, 35)


@triton.jit
def _streams(words, units, noise, noise_of_ids, ids, key, position, stream, slot, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    at, low, high = tl.load(position).to(tl.uint32), tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(i.to(tl.uint32), slot, at, stream, low, high)
    tl.store(words + i, w0.to(tl.int64))
    tl.store(words + WIDTH + i, w1.to(tl.int64))
    tl.store(words + 2 * WIDTH + i, w2.to(tl.int64))
    tl.store(words + 3 * WIDTH + i, w3.to(tl.int64))
    tl.store(units + 2 * i, unit_interval(w0, w1))
    tl.store(units + 2 * i + 1, unit_interval(w2, w3))
    tl.store(noise + 2 * i, gumbel_of(unit_interval(w0, w1)))
    tl.store(noise + 2 * i + 1, gumbel_of(unit_interval(w2, w3)))
    tl.store(noise_of_ids + i, gumbel_ids(tl.load(ids + i), at, stream, slot, low, high))


def test_words_and_uniform_numbers_are_the_streams_own_bit_for_bit() -> None:
    width = 512
    words = poisoned(4, width, dtype=torch.int64)
    units, noise, some = (poisoned(n * width, dtype=torch.float32) for n in (2, 2, 1))
    key = torch.tensor([0xDEADBEEF, 0x87654321], device=DEVICE)
    position = torch.tensor([4_000_000_001], device=DEVICE)
    ids = torch.randperm(2 * width, generator=torch.manual_seed(0))[:width].int().to(DEVICE)
    launch(_streams, (1,), words, units, noise, some, ids, key, position, int(Stream.DRAFT), 3, WIDTH=width)
    counters = (torch.arange(width, device=DEVICE), *torch.tensor([3, 4_000_000_001, 2], device=DEVICE))
    assert torch.equal(words, torch.stack(philox(counters, (key[0], key[1]))))
    pair = (key[:1], key[1:])
    assert torch.equal(units, uniforms_float32(pair, int(Stream.DRAFT), position, None, 2 * width, 3)[0])
    expected = gumbel(pair, position, None, 2 * width, stream=Stream.DRAFT, slot=3)[0]
    assert torch.allclose(noise, expected, rtol=3e-7, atol=3e-7)  # of float32 logarithms
    assert torch.equal(some, noise[ids.long()])


@triton.jit
def _exponentials(t, out, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    tl.store(out + i, exp_double(tl.load(t + i)))


def test_exponentials_of_top_p_are_right_to_eleven_digits() -> None:
    t = -torch.cat((torch.linspace(0, 3, 256), torch.logspace(-7, 2.5, 256))).to(DEVICE)
    t[0] = 0.0
    out = poisoned(512, dtype=torch.float64)
    launch(_exponentials, (1,), t, out, WIDTH=512)
    assert out[0] == 1
    assert ((out / torch.exp(t.double()) - 1).abs() < 1e-11).all()
