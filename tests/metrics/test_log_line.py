"""A person reads these lines while the engine runs: the rates must be those of the steps since the line before."""

from __future__ import annotations

import numpy as np

from deepinfer.metrics.drafts import DraftStats
from deepinfer.metrics.log_line import LogLine
from deepinfer.metrics.stats import StepStats


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_line_comes_each_n_steps_and_says_what_happened_since_the_last() -> None:
    clock = Clock()
    log = LogLine(2, clock)
    lines = []
    for tokens in (1000, 1000, 0, 0):
        clock.now += 0.5
        step = StepStats(
            seconds=0.5, prefill_tokens=tokens, decode_tokens=8, running=8, waiting=3, prefix_queries=tokens,
            prefix_hits=tokens // 4, preemptions_recompute=1, device_seconds=0.4, idle_seconds=0.1, blocks_used=25,
            blocks_cached=50, blocks_free=25,
        )  # fmt: skip
        lines.append(log.observe(step))
    assert lines == [
        None,
        "step 2 | running 8, waiting 3 | prefill 2,000, decode 16 tokens/s | cache 25.0 % used, 25.0 % hits | "
        "preempted 2 | device idle 20.0 %",
        None,
        "step 4 | running 8, waiting 3 | prefill 0, decode 16 tokens/s | cache 25.0 % used, - hits | "
        "preempted 2 | device idle 20.0 %",
    ]


def test_with_drafts_the_line_counts_tokens_and_says_how_many_were_verified_and_kept() -> None:
    clock = Clock()
    log = LogLine(2, clock)
    for accepted in (3, 0):
        clock.now += 0.5
        drafts = DraftStats()
        drafts.observe(np.array([5, 1]), np.array([accepted, 1]), np.full((2, 5), np.float32("nan")))
        line = log.observe(StepStats(seconds=0.5, decode_tokens=2, draft_tokens=6, drafts=drafts))
    assert line is not None and "decode 9 tokens/s" in line  # 4 of the model and 5 drafts
    assert line.endswith(" | drafts: 3.00 verified, 2.25 tokens per round, 41.7 % accepted")
    clock.now += 1
    log.observe(StepStats(seconds=0.5, decode_tokens=2))
    later = log.observe(StepStats(seconds=0.5, decode_tokens=2))
    assert later is not None and "drafts" not in later  # nothing was drafted since


def test_an_hour_without_requests_does_not_lower_the_rates() -> None:
    clock = Clock()
    log = LogLine(1, clock)
    clock.now += 3600
    line = log.observe(StepStats(seconds=0.5, decode_tokens=8))
    assert line is not None and "decode 16 tokens/s" in line


def test_zero_turns_the_line_off_and_empty_steps_are_not_counted() -> None:
    off = LogLine(0)
    assert off.observe(StepStats(decode_tokens=1)) is None
    log = LogLine(1)
    assert log.observe(StepStats()) is None
    line = log.observe(StepStats(decode_tokens=1, seconds=0.1))
    assert line is not None and line.startswith("step 1 ")
