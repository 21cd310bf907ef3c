"""examples/yoco: the proof says "equal" where it is and does not where it is not; the losses are of the right runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import yoco  # noqa: F401  # puts examples/yoco on the path

from deepinfer.cache.step import StepView
from deepinfer.model.presets import tiny

import equivalence  # isort: skip
import perplexity  # isort: skip

PICKED = 6  # cases of every kind, of those that the tiny model has


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> list[equivalence.Case]:
    """The command line names the tiny model, and only some of its cases run: shorter prompts first."""
    every = sorted(equivalence.cases_of(tiny(), 700, False), key=lambda case: case.length)
    kinds = dict.fromkeys(case.kind for case in every)
    picked = [case for kind in kinds for case in [c for c in every if c.kind == kind][-PICKED:]]
    monkeypatch.setattr(equivalence, "cases_of", lambda config, longest, all_of_them: iter(picked))
    monkeypatch.setattr(sys, "argv", ["equivalence.py", "--model", str(tiny_checkpoint)])
    return picked


def test_the_proof_says_equal_and_counts_its_cases(few_cases, capsys):
    assert equivalence.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("equal bit for bit" if _exact() else "equal within")
    assert f"{len(set(few_cases))} cases" in printed
    for kind in ("truncated", "replayed", "replayed and truncated", "window from the store"):
        assert f" {kind}" in printed


def test_a_floor_that_is_one_too_low_is_found(few_cases, capsys, monkeypatch):
    plan = StepView.window_indices.func

    def lower(view: StepView):
        bounds = view.batch.window_floors
        moved = dataclasses.replace(view.batch, window_floors=bounds - (bounds > 0))
        return plan(StepView(view._store, moved))

    monkeypatch.setattr(StepView, "window_indices", property(lower))
    assert equivalence.main() == 1
    printed = capsys.readouterr().out
    assert "equal" not in printed and "cases differ" in printed


def test_a_masked_entry_that_is_off_by_one_is_found(few_cases, capsys, monkeypatch):
    wrong = [
        dataclasses.replace(case, expected=dataclasses.replace(case.expected, keep_from=case.keep_from + 1))
        for case in few_cases
        if case.kind == "truncated" and case.length > 40
    ]
    monkeypatch.setattr(equivalence, "cases_of", lambda *_: iter(wrong))
    assert equivalence.main() == 1
    assert f"{len(set(wrong))} of {len(set(wrong))} cases differ" in capsys.readouterr().out


def test_losses_are_reported_for_both_approximations_and_are_the_same_again(tiny_checkpoint, capsys, monkeypatch):
    options = ["--prompt", "300", "--after", "6", "--pieces", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["perplexity.py", "--model", str(tiny_checkpoint), *options])
    printed = []
    for _ in range(2):
        assert perplexity.main() == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    report = json.loads(printed[0])
    assert report["keep_tokens"] == 28 and report["replay_tokens"] == 16
    assert report["kinds"]["all"]["tokens"] == 12
    for kind in ("documents", "sources", "all"):
        figures = report["kinds"][kind]
        assert figures["full"]["relative_change"] == figures["full"]["first_token_kl"] == 0
        assert figures["full"]["same_best_token"] == 1
        losses = {figures[mode]["nats_per_token"] for mode in ("full", "truncated", "replayed", "both")}
        assert len(losses) == 4  # every mode hides something else from a random model
        assert figures["truncated"]["first_token_kl"] > 0


def test_a_prompt_too_short_to_be_replayed_is_refused_with_the_shortest_that_is(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["perplexity.py", "--model", str(tiny_checkpoint), "--prompt", "277"])
    with pytest.raises(SystemExit):
        perplexity.main()
    assert "must be from 278" in capsys.readouterr().err


def _exact() -> bool:
    import torch

    from deepinfer.kernels import select

    return select.cpu_twins(torch.device("cpu"), torch.float32)
