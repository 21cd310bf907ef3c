"""The numbers about drafting are those of a plain count over rounds, however the rounds came in."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.metrics.drafts import BINS, DraftStats

NAN = float("nan")


def observe(stats: DraftStats, rounds: list[tuple[int, int, list[float]]]) -> DraftStats:
    drafted, accepted, predicted = zip(*rounds, strict=True)
    stats.observe(np.array(drafted), np.array(accepted), np.array(predicted, np.float32))
    return stats


def test_lengths_and_rates_count_every_round_and_the_models_own_token() -> None:
    stats = observe(
        DraftStats(),
        [(3, 2, [0.9, 0.8, 0.5]), (3, 0, [0.9, 0.8, 0.5]), (1, 1, [0.9, NAN, NAN]), (0, 0, [NAN, NAN, NAN])],
    )
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 7, 3)
    assert (stats.verified_at, stats.accepted_at) == ([3, 2, 2], [2, 1, 0])
    assert stats.verify_length == 7 / 4 and stats.accept_length == 1 + 3 / 4 and stats.acceptance_rate == 3 / 7
    assert stats.lengths() == [1, 1, 0, 2]


def test_without_a_round_every_number_is_zero() -> None:
    stats = DraftStats()
    stats.observe(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 5), np.float32))
    assert stats == DraftStats()
    assert stats.accept_length == stats.verify_length == stats.acceptance_rate == stats.calibration_error == 0.0


ROUND = st.integers(0, 4).flatmap(
    lambda drafted: st.tuples(
        st.just(drafted),
        st.integers(0, drafted),
        st.lists(st.floats(0, 1, width=32), min_size=drafted, max_size=drafted).map(
            lambda known: [*sorted(known, reverse=True), *[NAN] * (4 - len(known))]
        ),
    )
)


@settings(max_examples=100, deadline=None)
@given(rounds=st.lists(ROUND, min_size=1, max_size=40), cut=st.integers(0, 40))
def test_counts_are_those_of_a_loop_and_parts_add_up_to_the_whole(rounds, cut) -> None:
    whole = observe(DraftStats(), rounds)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for drafted, accepted, predicted in rounds:
        for at in range(drafted):
            bins.setdefault(min(int(predicted[at] * BINS), BINS - 1), []).append((predicted[at], accepted > at))
    count = sum(len(entries) for entries in bins.values())
    error = sum(abs(sum(p for p, _ in entries) - sum(kept for _, kept in entries)) for entries in bins.values())
    assert whole.calibration_error == pytest.approx(error / count if count else 0.0)
    assert whole.verified_at == [sum(drafted > at for drafted, _, _ in rounds) for at in range(4)]
    assert whole.accepted_at == [sum(accepted > at for _, accepted, _ in rounds) for at in range(4)]
    assert sum(whole.lengths()) == whole.rounds and sum(whole.accepted_at) == whole.accepted <= whole.drafted
    parts = DraftStats()
    for part in (rounds[:cut], rounds[cut:]):
        if part:
            parts.merge(observe(DraftStats(), part))
    for name in DraftStats.__dataclass_fields__:
        assert getattr(parts, name) == pytest.approx(getattr(whole, name)), name


def test_right_predictions_have_no_calibration_error_and_wrong_ones_have_their_distance() -> None:
    rounds = [(1, int(at < 3), [0.75]) for at in range(4)]
    assert observe(DraftStats(), rounds).calibration_error == 0.0
    assert observe(DraftStats(), [(1, 0, [0.75])] * 4).calibration_error == 0.75


def test_a_draft_behind_the_end_of_a_sequence_is_not_judged() -> None:
    stats = observe(DraftStats(), [(3, 1, [1.0, NAN, NAN])])
    assert sum(stats.bin_counts) == 1 and stats.calibration_error == 0.0 and stats.drafted == 3


def test_the_numbers_survive_the_way_between_processes() -> None:
    stats = observe(DraftStats(), [(3, 2, [0.9, 0.8, 0.5]), (3, 0, [0.9, 0.8, 0.5])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=DraftStats) == stats
