"""Temperatures of the confidence head: what they mean, how they are found, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.speculation.calibration import FILE_NAME, Calibration, expected_calibration_error, fit_temperatures


def rounds(temperatures: list[float], count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a head that is off by these temperatures, and how many drafts were accepted."""
    rng = np.random.default_rng(0)
    truth = rng.normal(1.0, 1.5, (count, len(temperatures)))
    accepted = (rng.random(truth.shape) < 1 / (1 + np.exp(-truth))).cumprod(1).sum(1)
    return truth * np.array(temperatures), accepted


def test_fitted_temperatures_undo_a_head_that_is_off() -> None:
    wrong = [2.0, 0.5, 1.5, 3.0, 1.5]
    logits, accepted = rounds(wrong)
    found = fit_temperatures(logits, accepted)
    assert np.allclose(found[:2], wrong[:2], rtol=0.1)  # later ones count in the product alone, where they blur
    assert (np.array(found) > 1).tolist() == [True, False, True, True, True]
    survivals = Calibration({"greedy": found, "sampled": found}).survivals(
        torch.from_numpy(logits).float(), torch.zeros(len(logits), dtype=torch.bool)
    )
    raw = Calibration().survivals(torch.from_numpy(logits).float(), torch.zeros(len(logits), dtype=torch.bool))
    for i in range(5):
        after = expected_calibration_error(survivals[:, i].numpy(), accepted > i)
        assert after < 0.015
        assert after <= expected_calibration_error(raw[:, i].numpy(), accepted > i) + 1e-3


def test_calibration_error_is_the_gap_between_promise_and_outcome() -> None:
    assert expected_calibration_error(np.array([0.25, 0.25, 0.25, 0.25]), np.array([1, 0, 0, 0]) > 0) == 0
    assert expected_calibration_error(np.array([1.0, 1.0, 0.0, 0.0]), np.array([1, 0, 0, 0]) > 0) == pytest.approx(0.25)
    # Too high and too low in different bins do not cancel.
    assert expected_calibration_error(np.array([0.9, 0.1]), np.array([0, 1]) > 0) == pytest.approx(0.9)


def test_survivals_use_the_temperatures_of_the_requests_class() -> None:
    calibration = Calibration({"greedy": [1.0, 1.0, 1.0], "sampled": [2.0, 4.0, 1.0]})
    logits = torch.tensor([[2.0, 4.0], [2.0, 4.0]])
    got = calibration.survivals(logits, torch.tensor([False, True]))
    expected = torch.sigmoid(torch.tensor([[2.0, 4.0], [1.0, 1.0]])).cumprod(1)
    assert torch.equal(got, expected)
    assert torch.equal(Calibration().survivals(logits, torch.tensor([False, True])), torch.sigmoid(logits).cumprod(1))


def test_a_checkpoint_without_the_file_is_believed_as_it_is(tmp_path: Path) -> None:
    assert not Calibration.load(tmp_path, 5).is_fitted


def test_a_saved_calibration_comes_back(tmp_path: Path) -> None:
    temperatures = {"greedy": [1.0, 1.5], "sampled": [0.5, 2.0]}
    Calibration(temperatures).save(tmp_path)
    assert Calibration.load(tmp_path, 2).temperatures == temperatures


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "object"),
        ({"greedy": [1, 1]}, "sampled"),
        ({"greedy": [1], "sampled": [1, 1]}, "greedy"),
        ({"greedy": 1.0, "sampled": [1, 1]}, "greedy"),
        ({"greedy": [1, 0], "sampled": [1, 1]}, "greedy"),
        ({"greedy": [1, 1], "sampled": [1, "x"]}, "sampled"),
        ({"greedy": [1, 1], "sampled": [1, float("nan")]}, "sampled"),
        ({"greedy": [1, True], "sampled": [1, 1]}, "greedy"),
        ({"greedy": [1, 1], "sampled": [1, 1], "warm": [1, 1]}, "warm"),
    ],
)
def test_a_broken_file_is_refused_by_name_and_field(tmp_path: Path, content: object, named: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match=rf"{FILE_NAME}.*{named}"):
        Calibration.load(tmp_path, 2)
