"""Which drafts are verified: the likeliest of the whole batch, as prefixes, with ties settled by place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.speculation.selection import select_lengths

LEVELS = [1.0, 0.9, 0.5, 0.25, 0.0]  # few, so that ties are common


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    rows, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    factors = draw(st.lists(st.sampled_from(LEVELS), min_size=rows * k, max_size=rows * k))
    survivals = np.array(factors, np.float32).reshape(rows, k).cumprod(1)
    caps = np.array(draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows)))
    return survivals, caps, draw(st.integers(0, rows * k + 2))


def select(survivals: np.ndarray, caps: np.ndarray, budget: int | None) -> np.ndarray:
    return select_lengths(torch.from_numpy(survivals), torch.from_numpy(caps), budget).numpy()


@settings(max_examples=200, deadline=None)
@given(batches())
def test_no_choice_of_prefixes_within_the_budget_is_likelier(batch: tuple[np.ndarray, np.ndarray, int]) -> None:
    survivals, caps, budget = batch
    lengths = select(survivals, caps, budget)
    assert (lengths <= caps).all() and lengths.sum() == min(budget, caps.sum())
    sums = np.concatenate((np.zeros((len(survivals), 1)), survivals.astype(np.float64).cumsum(1)), 1)
    worth = sums[np.arange(len(caps)), lengths].sum()
    best = max(
        sum(sums[r, length] for r, length in enumerate(choice))
        for choice in itertools.product(*(range(cap + 1) for cap in caps))
        if sum(choice) <= budget
    )
    assert worth == pytest.approx(best)


@settings(max_examples=200, deadline=None)
@given(batches())
def test_ties_go_to_the_lower_draft_then_to_the_lower_row(batch: tuple[np.ndarray, np.ndarray, int]) -> None:
    survivals, caps, budget = batch
    rows, k = survivals.shape
    ranked = sorted((-survivals[r, i], i, r) for r in range(rows) for i in range(k) if i < caps[r])
    expected = np.zeros(rows, np.int64)
    for _, _, row in ranked[:budget]:
        expected[row] += 1
    assert (select(survivals, caps, budget) == expected).all()


@settings(max_examples=100, deadline=None)
@given(batches())
def test_the_version_for_any_device_selects_the_same(batch: tuple[np.ndarray, np.ndarray, int]) -> None:
    from deepinfer.kernels.prefixes import ranked_prefixes

    survivals, caps, budget = batch
    got = ranked_prefixes(torch.from_numpy(survivals), torch.from_numpy(caps), budget).numpy()
    assert (got == select(survivals, caps, budget)).all()


@settings(max_examples=200, deadline=None)
@given(batches(), st.data())
def test_whether_a_draft_is_verified_does_not_depend_on_the_drafts_behind_it(
    batch: tuple[np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    survivals, caps, budget = batch
    row = data.draw(st.integers(0, len(caps) - 1))
    i = data.draw(st.integers(0, survivals.shape[1] - 1))
    other = survivals.copy()
    other[row, i + 1 :] *= np.float32(data.draw(st.sampled_from(LEVELS)))
    assert (select(survivals, caps, budget)[row] > i) == (select(other, caps, budget)[row] > i)


def test_without_a_budget_everything_that_the_caps_allow_is_verified() -> None:
    assert select(np.zeros((3, 5), np.float32), np.array([0, 2, 5]), None).tolist() == [0, 2, 5]


def test_a_draft_of_unknown_survival_comes_last_and_harms_no_one() -> None:
    survivals = np.array([[np.nan, np.nan], [0.5, 0.1]], np.float32)
    assert select(survivals, np.array([2, 2]), 2).tolist() == [0, 2]
    assert select(survivals, np.array([2, 2]), 4).tolist() == [2, 2]


def test_a_large_batch_of_equal_survivals_gives_everybody_the_first_draft() -> None:
    assert select(np.ones((256, 5), np.float32), np.full(256, 5), 300).tolist() == [2] * 44 + [1] * 212
    assert select(np.ones((0, 5), np.float32), np.zeros(0, np.int64), 3).tolist() == []
