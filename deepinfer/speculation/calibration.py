"""From the confidence head's logits to probabilities that can be counted on (spec/dspark.md section 7.3).

The planner weighs tokens expected against seconds, so a survival of 0.6 has to come true six times in ten. The head
learns that nearly; one temperature per draft index, for greedy and for sampled requests, closes the gap. They lie
beside the weights as `dspark_calibration.json`:

    {"greedy": [1.1, 1.0, 0.9, 0.9, 0.8], "sampled": [1.2, ...]}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FILE_NAME = "dspark_calibration.json"
CLASSES = ("greedy", "sampled")
BINS = 20
GRID = np.geomspace(0.2, 5.0, 129)  # its middle is 1

Floats = npt.NDArray[np.floating]


class Calibration:
    """temperatures: one per draft index, by class; without them the head is believed as it is."""

    def __init__(self, temperatures: dict[str, list[float]] | None = None) -> None:
        self.temperatures = temperatures
        self._rows: Tensor | None = None  # float32 [2, drafts], where the confidences are

    @classmethod
    def load(cls, directory: Path, drafts: int) -> Calibration:
        """That of a checkpoint which drafts up to so many tokens. ValueError naming file and field: a broken file."""
        path = Path(directory) / FILE_NAME
        if not path.is_file():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}: an object with {' and '.join(CLASSES)}, not {type(content).__name__}")
        if unknown := set(content) - set(CLASSES):
            raise ValueError(f"{path}: unknown field {sorted(unknown)[0]!r}; it has {' and '.join(CLASSES)}")
        return cls({name: _temperatures(path, content, name, drafts) for name in CLASSES})

    def save(self, directory: Path) -> None:
        assert self.temperatures is not None
        text = json.dumps(self.temperatures, indent=1)
        (Path(directory) / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    @property
    def is_fitted(self) -> bool:
        return self.temperatures is not None

    def survivals(self, confidence: Tensor, sampled: Tensor) -> Tensor:
        """Probability that a draft and all before it are accepted, float32 [R, k]. confidence: logits [R, k];
        sampled bool [R]: the request draws its tokens, it is not greedy."""
        if self.temperatures is not None:
            if self._rows is None:
                self._rows = torch.tensor([self.temperatures[name] for name in CLASSES], device=confidence.device)
            confidence = confidence / self._rows[sampled.long(), : confidence.shape[1]]
        return torch.sigmoid(confidence).cumprod(1)


def _temperatures(path: Path, content: dict[str, Any], name: str, drafts: int) -> list[float]:
    values = content.get(name)
    if not isinstance(values, list) or len(values) < drafts:
        raise ValueError(f"{path}: {name} must be a list of {drafts} temperatures, one per draft")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{path}: {name} holds {value!r}; temperatures are numbers above 0")
    return [float(value) for value in values]


def fit_temperatures(confidence: Floats, accepted: npt.NDArray[np.integer]) -> list[float]:
    """Temperatures of one class by sequential scaling: index by index, each with those before it fixed, the one whose
    survivals have the least calibration error.

    confidence [rounds, k]: logits; accepted [rounds]: drafts accepted where all k were verified.
    """
    before = np.ones(len(confidence))
    temperatures = []
    for i, logits in enumerate(confidence.T.astype(np.float64)):
        labels = accepted > i
        errors = [expected_calibration_error(before / (1 + np.exp(-logits / t)), labels) for t in GRID]
        # Of equal errors the one that changes least.
        _, _, best = min((error, abs(math.log(t)), t) for error, t in zip(errors, GRID, strict=True))
        temperatures.append(float(best))
        before = before / (1 + np.exp(-logits / best))
    return temperatures


def expected_calibration_error(predicted: Floats, came_true: npt.NDArray[np.bool_], bins: int = BINS) -> float:
    """Mean distance between probability and frequency, over equally wide bins of probability weighted by what falls in
    them. Both [n], n >= 1."""
    place = np.minimum((np.asarray(predicted, np.float64) * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, predicted, bins) - np.bincount(place, came_true, bins)
    return float(np.abs(gap).sum() / len(predicted))
