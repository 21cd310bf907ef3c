"""The benchmark of structured output compares like with like, and runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import structured_output as bench

from deepinfer import LLM, SamplingParams


def test_steps_with_grammars_and_without_compute_the_same_tokens(draft_checkpoint: Path) -> None:
    llm = LLM(draft_checkpoint, max_num_seqs=4, max_model_len=256, nextn=0, verbose=False)
    asked = [SamplingParams(max_tokens=6, seq_seed=i, **bench.ASKED[i]) for i in range(4)]
    free = [SamplingParams(max_tokens=6, seq_seed=i, ignore_eos=True) for i in range(4)]
    first: dict[str, list[int]] = {}
    again: dict[str, list[int]] = {}
    bench.play(llm, asked, first)
    with bench.forced_draws(llm, first):
        steps = bench.play(llm, free, again)
    assert again == first and len(steps) == 5 and all(step.wall > 0 for step in steps)
    bench.play(llm, free, again)
    assert again != first


def test_figures_are_there_with_drafts_and_without(draft_checkpoint: Path) -> None:
    options = argparse.Namespace(model=str(draft_checkpoint), sequences=4, tokens=12, rounds=1)
    for settings in ({"nextn": 0}, {"nextn": 5, "mtp_varlen": False}):
        figures = bench.measure(options, **settings)
        assert figures["steps"] >= 1
        for kind in ("wall", "cpu"):
            assert figures[kind]["free_ms"] > 0 and figures[kind]["structured_ms"] > 0
