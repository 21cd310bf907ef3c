"""Temperatures of the confidence head: what they mean, how they are found, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.speculation.calibration import (
    CLASSES,
    FILE_NAME,
    Calibration,
    Lines,
    expected_calibration_error,
    fit_lines,
)
from deepinfer.speculation.propose import Rule

SAME = Lines([1.0, 1.0], [0.0, 0.0])
GOOD = {"temperatures": [1, 1.0], "biases": [0, -0.5]}


def content(**changes: object) -> dict[str, object]:
    """What a file holds, of two drafts."""
    return {**dict.fromkeys(CLASSES, GOOD), **changes}


def rounds(temperatures: list[float], biases: list[float], count: int = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a head that is off by these, and how many drafts were accepted."""
    rng = np.random.default_rng(0)
    truth = rng.normal(1.0, 1.5, (count, len(temperatures)))
    accepted = (rng.random(truth.shape) < 1 / (1 + np.exp(-truth))).cumprod(1).sum(1)
    return (truth - np.array(biases)) * np.array(temperatures), accepted


def test_fitted_lines_undo_a_head_that_is_off() -> None:
    wrong = Lines([2.0, 0.5, 1.5, 3.0, 1.5], [0.0, 0.6, -0.5, 0.4, 0.0])
    logits, accepted = rounds(*wrong)
    found = fit_lines(logits, accepted)
    assert np.allclose(found.temperatures[0], wrong.temperatures[0], rtol=0.2)
    assert np.allclose(found.biases[:2], wrong.biases[:2], atol=0.2)  # later ones count in the product, where they blur
    rules = torch.full((len(logits),), Rule.COUPLED)
    confidence = torch.from_numpy(logits).float()
    survivals = Calibration(dict.fromkeys(CLASSES, found)).survivals(confidence, rules)
    raw = Calibration().survivals(confidence, rules)
    for i in range(5):
        after = expected_calibration_error(survivals[:, i].numpy(), accepted > i)
        assert after < 0.015
        assert after <= expected_calibration_error(raw[:, i].numpy(), accepted > i) + 1e-3


def test_a_head_that_is_right_is_left_alone() -> None:
    found = fit_lines(*rounds([1.0, 1.0], [0.0, 0.0]))
    assert np.allclose(found.temperatures, 1, rtol=0.25)
    assert np.allclose(found.biases, 0, atol=0.15)


def test_calibration_error_is_the_gap_between_promise_and_outcome() -> None:
    assert expected_calibration_error(np.array([0.25, 0.25, 0.25, 0.25]), np.array([1, 0, 0, 0]) > 0) == 0
    assert expected_calibration_error(np.array([1.0, 1.0, 0.0, 0.0]), np.array([1, 0, 0, 0]) > 0) == pytest.approx(0.25)
    # Too high and too low in different bins do not cancel.
    assert expected_calibration_error(np.array([0.9, 0.1]), np.array([0, 1]) > 0) == pytest.approx(0.9)


def test_survivals_use_the_lines_of_the_rule_by_which_the_request_is_judged() -> None:
    assert [name.upper() for name in CLASSES] == [rule.name for rule in Rule]
    lines = {
        "greedy": Lines([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        "coupled": Lines([2.0, 4.0, 1.0], [0.0, 0.0, 0.0]),
        "residual": Lines([1.0, 2.0, 1.0], [0.5, -1.0, 0.0]),
    }
    logits = torch.tensor([[2.0, 4.0]] * 3)
    got = Calibration(lines).survivals(logits, torch.tensor([Rule.GREEDY, Rule.RESIDUAL, Rule.COUPLED]))
    assert torch.equal(got, torch.sigmoid(torch.tensor([[2.0, 4.0], [2.5, 1.0], [1.0, 1.0]])).cumprod(1))
    raw = Calibration().survivals(logits, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(raw, torch.sigmoid(logits).cumprod(1))


def test_a_checkpoint_without_the_file_is_believed_as_it_is(tmp_path: Path) -> None:
    assert not Calibration.load(tmp_path, 5).is_fitted


def test_a_saved_calibration_comes_back(tmp_path: Path) -> None:
    lines = {"greedy": SAME, "coupled": Lines([0.5, 2.0], [0.1, -0.1]), "residual": SAME}
    Calibration(lines).save(tmp_path)
    assert Calibration.load(tmp_path, 2).lines == lines


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ([1], "object"),
        ({"greedy": GOOD}, "coupled"),
        (content(greedy=[1, 1]), "greedy.*object"),
        (content(greedy={"temperatures": [1, 1]}), "greedy.*biases"),
        (content(coupled={**GOOD, "slopes": [1, 1]}), "coupled.*slopes"),
        (content(coupled={**GOOD, "temperatures": [1]}), "coupled.*temperatures"),
        (content(coupled={**GOOD, "temperatures": 1.0}), "coupled.*temperatures"),
        (content(greedy={**GOOD, "temperatures": [1, 0]}), "greedy.*temperatures"),
        (content(residual={**GOOD, "biases": [1, "x"]}), "residual.*biases"),
        (content(residual={**GOOD, "biases": [1, float("nan")]}), "residual.*biases"),
        (content(greedy={**GOOD, "temperatures": [1, True]}), "greedy.*temperatures"),
        (content(coupled={**GOOD, "biases": [0] * 9}), "2 and 9 entries"),
        (content(residual={**GOOD, "biases": [1, 10**400]}), "residual.*biases"),
        (content(warm=GOOD), "warm"),
    ],
)
def test_a_broken_file_is_refused_by_name_and_field(tmp_path: Path, given: object, named: str) -> None:
    (tmp_path / FILE_NAME).write_text(given if isinstance(given, str) else json.dumps(given))
    with pytest.raises(ValueError, match=rf"{FILE_NAME}.*{named}"):
        Calibration.load(tmp_path, 2)


def test_a_folder_in_the_place_of_the_file_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ValueError, match=FILE_NAME):
        Calibration.load(tmp_path, 2)


def test_a_file_for_more_drafts_than_are_asked_for_serves(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(content()))
    survivals = Calibration.load(tmp_path, 1).survivals(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    assert survivals.shape == (1, 1)
