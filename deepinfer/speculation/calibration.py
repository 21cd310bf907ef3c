"""From the confidence head's logits to probabilities that can be counted on (spec/dspark.md section 7.3).

The planner weighs tokens expected against seconds, so a survival of 0.6 has to come true six times in ten. The head
learns that nearly; a line per draft index and rule of acceptance closes the gap: logit / temperature + bias. (By
temperatures alone a head that is too modest about every draft cannot be put right.) They lie beside the weights as
`dspark_calibration.json`:

    {"greedy": {"temperatures": [1.1, 1.0, 0.9, 0.9, 0.8], "biases": [0.2, 0.1, 0.1, 0.0, 0.0]},
     "coupled": {...}, "residual": {...}}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FILE_NAME = "dspark_calibration.json"
CLASSES = ("greedy", "coupled", "residual")  # by the number of the rule (propose.py)
BINS = 20
LARGEST = 1e6  # of a file's numbers: beyond any that a fit gives, and far from where float32 ends
# Both have "no change" in the middle.
TEMPERATURES = np.geomspace(0.25, 4.0, 33)
BIASES = np.linspace(-2.0, 2.0, 41)

Floats = npt.NDArray[np.floating]


class Lines(NamedTuple):
    """Of one class, one entry per draft index."""

    temperatures: list[float]
    biases: list[float]


class Calibration:
    """lines: by class; without them the head is believed as it is."""

    def __init__(self, lines: dict[str, Lines] | None = None) -> None:
        self.lines = lines
        self._rows: Tensor | None = None  # float32 [2, classes, drafts], where the confidences are

    @classmethod
    def load(cls, directory: Path, drafts: int) -> Calibration:
        """That of a checkpoint which drafts up to so many tokens. ValueError naming file and field: a broken file."""
        path = Path(directory) / FILE_NAME
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
        _check_fields(str(path), content, CLASSES)
        lines = {name: _lines(f"{path}: {name}", content[name], drafts) for name in CLASSES}
        lengths = {len(values) for line in lines.values() for values in line}
        if len(lengths) > 1:
            raise ValueError(f"{path}: its lists have {' and '.join(map(str, sorted(lengths)))} entries; one length")
        return cls(lines)

    def save(self, directory: Path) -> None:
        assert self.lines is not None
        text = json.dumps({name: line._asdict() for name, line in self.lines.items()}, indent=1)
        (Path(directory) / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    @property
    def is_fitted(self) -> bool:
        return self.lines is not None

    def survivals(self, confidence: Tensor, rules: Tensor) -> Tensor:
        """Probability that a draft and all before it are accepted, float32 [R, k]. confidence: logits [R, k]; rules
        int64 [R]: how the requests are judged."""
        if self.lines is not None:
            if self._rows is None:
                both = [[self.lines[name][part] for name in CLASSES] for part in (0, 1)]
                self._rows = torch.tensor(both, device=confidence.device)
            temperatures, biases = self._rows[:, rules, : confidence.shape[1]]
            confidence = confidence / temperatures + biases
        return torch.sigmoid(confidence).cumprod(1)


def _check_fields(where: str, content: Any, fields: tuple[str, ...]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: an object with {' and '.join(fields)}, not {type(content).__name__}")
    if unknown := set(content) - set(fields):
        raise ValueError(f"{where}: unknown field {sorted(unknown)[0]!r}; it has {' and '.join(fields)}")
    if missing := [field for field in fields if field not in content]:
        raise ValueError(f"{where}: {missing[0]} is missing")


def _lines(where: str, content: Any, drafts: int) -> Lines:
    _check_fields(where, content, Lines._fields)
    for name, values in content.items():
        if not isinstance(values, list) or len(values) < drafts:
            raise ValueError(f"{where}: {name} must be a list of {drafts} numbers, one per draft")
        for value in values:
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
            if not number or (name == "temperatures" and value <= 0):
                kind = "numbers above 0" if name == "temperatures" else "numbers"
                shown = repr(value)
                shown = shown if len(shown) <= 40 else f"{shown[:40]} ..."
                raise ValueError(f"{where}: {name} holds {shown}; they are {kind}, and at most {LARGEST:g}")
    return Lines(*([float(value) for value in content[name]] for name in Lines._fields))


def fit_lines(confidence: Floats, accepted: npt.NDArray[np.integer]) -> Lines:
    """Of one class, one after the other: index by index, with those before it fixed, the line whose survivals have the
    least calibration error. What counts for the planner is the product, so the product is what is fitted.

    confidence [rounds, k]: logits; accepted [rounds]: drafts accepted where all k were verified.
    """
    before = np.ones(len(confidence))
    found = Lines([], [])
    for i, logits in enumerate(confidence.T.astype(np.float64)):
        labels = accepted > i
        _, _, temperature, bias = min(
            # Of equal errors the one that changes least.
            (expected_calibration_error(before * _sigmoid(logits / t + b), labels), abs(math.log(t)) + abs(b), t, b)
            for t in TEMPERATURES
            for b in BIASES
        )
        found.temperatures.append(round(float(temperature), 4))
        found.biases.append(round(float(bias), 4))
        before = before * _sigmoid(logits / temperature + bias)
    return found


def _sigmoid(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-logits))


def expected_calibration_error(predicted: Floats, came_true: npt.NDArray[np.bool_], bins: int = BINS) -> float:
    """Mean distance between probability and frequency, over equally wide bins of probability weighted by what falls in
    them. Both [n], n >= 1."""
    place = np.minimum((np.asarray(predicted, np.float64) * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, predicted, bins) - np.bincount(place, came_true, bins)
    return float(np.abs(gap).sum() / len(predicted))
