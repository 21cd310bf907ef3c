"""What the engine counts is what happened: sums, levels, histograms, and the way to another process and back."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from deepinfer.metrics.drafts import DraftStats
from deepinfer.metrics.histogram import TOKENS, Histogram
from deepinfer.metrics.stats import FLOWS, LEVELS, EngineStats, StepStats


def test_flows_are_summed_and_levels_are_the_last_ones() -> None:
    stats = EngineStats()
    stats.add(StepStats(seconds=0.5, prefill_tokens=100, decode_tokens=3, running=4, waiting=9))
    stats.add(StepStats(seconds=0.25, decode_tokens=4, running=3, waiting=0, waiting_by_reason={"room": 0}))
    assert stats.steps == 2
    totals = stats.totals
    assert (totals.seconds, totals.prefill_tokens, totals.decode_tokens) == (0.75, 100, 7)
    assert (totals.running, totals.waiting, totals.waiting_by_reason) == (3, 0, {"room": 0})


def test_every_field_of_a_step_reaches_the_sum() -> None:
    step = StepStats()
    for at, name in enumerate(FLOWS):
        setattr(step, name, at + 1)
    for at, name in enumerate(name for name in LEVELS if name != "waiting_by_reason"):
        setattr(step, name, 100 + at)
    step.waiting_by_reason = {"room": 7}
    stats = EngineStats()
    stats.add(step)
    stats.add(step)
    for name in FLOWS:
        assert getattr(stats.totals, name) == 2 * getattr(step, name)
    for name in LEVELS:
        assert getattr(stats.totals, name) == getattr(step, name)


def test_drafts_of_all_steps_are_added_up() -> None:
    stats = EngineStats()
    for drafted, accepted in ((5, 3), (2, 2)):
        drafts = DraftStats()
        drafts.observe(np.array([drafted]), np.array([accepted]), np.full((1, 5), np.float32("nan")))
        stats.add(StepStats(decode_tokens=1, draft_tokens=drafted, drafts=drafts))
    stats.add(StepStats(decode_tokens=1))
    assert (stats.drafts.rounds, stats.drafts.drafted, stats.drafts.accepted) == (2, 7, 5)
    assert stats.drafts.accepted_at == [2, 2, 1, 0, 0]
    assert (stats.totals.draft_tokens, stats.totals.num_tokens) == (7, 10)


def test_a_step_object_may_be_used_again() -> None:
    step = StepStats(decode_tokens=1, waiting_by_reason={"room": 1})
    stats = EngineStats()
    stats.add(step)
    step.decode_tokens = 99
    step.waiting_by_reason["room"] = 99
    assert stats.totals.decode_tokens == 1
    assert stats.totals.waiting_by_reason == {"room": 1}


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (StepStats(), "empty"),
        (StepStats(decode_tokens=2), "decode"),
        (StepStats(prefill_tokens=2), "prefill"),
        (StepStats(replay_tokens=2), "prefill"),
        (StepStats(prefill_tokens=2, decode_tokens=1), "mixed"),
    ],
)
def test_a_step_is_named_by_what_it_computed(step: StepStats, kind: str) -> None:
    assert step.kind == kind
    stats = EngineStats()
    stats.add(step)
    assert {name: h.count for name, h in stats.step_seconds.items()} == {
        name: int(name == kind) for name in ("decode", "prefill", "mixed")
    }
    assert stats.steps == (kind != "empty")


def test_phases_that_nobody_timed_are_not_counted_as_instant() -> None:
    stats = EngineStats()
    stats.add(StepStats(decode_tokens=1, schedule_seconds=0.25))
    stats.add_output(0.5)
    counts = {phase: histogram.count for phase, histogram in stats.phase_seconds.items()}
    assert counts == {"schedule": 1, "prepare": 0, "settle": 0, "output": 1}
    assert stats.totals.output_seconds == 0.5


def test_a_histogram_counts_a_value_on_a_bound_below_it_and_a_huge_one_above_all() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 2.0, 5.0, 1e9):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 4), ("5.0", 5), ("+Inf", 6)]
    assert histogram.total == 0.5 + 1 + 1.5 + 2 + 5 + 1e9


def test_token_buckets_are_one_two_five_up_to_a_million() -> None:
    assert TOKENS[:4] == (1, 2, 5, 10)
    assert TOKENS[-2:] == (500_000, 1_000_000)
    assert list(TOKENS) == sorted(set(TOKENS))


def test_statistics_survive_the_way_between_processes() -> None:
    stats = EngineStats()
    stats.add(StepStats(seconds=0.01, prefill_tokens=7, schedule_seconds=0.001, waiting_by_reason={"room": 2}))
    stats.reject("prompt_token_ids")
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats)
    assert received == stats
    received.add(StepStats(decode_tokens=1))  # still an object that can count
    assert received.steps == 2
