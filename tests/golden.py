"""Finds the golden data and measures distances to it.

Two sets, made by independent programs (each has its own README with the format and the reason for every tolerance):
`golden`, a plain float32 engine's numbers, judges structure; `golden_official`, in the release's numerics, judges
rounding. They are looked for where the variables below point, else in `shared/` next to the repository.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

SHARED = Path(__file__).resolve().parents[2] / "shared"
CASES = ("01-core-trace", "02-ratio2-odd", "04-engram-repeat", "06-yarn-long", "08-dspark", "10-vision", "12-odd-sizes")


def _directory(variable: str, name: str) -> Path:
    path = Path(os.environ.get(variable) or SHARED / name)
    if not (path / "manifest.json").is_file():
        pytest.skip(f"no golden data at {path}: set {variable} to the folder that holds its manifest.json")
    return path


def golden_dir() -> Path:
    """The float32 set; skips the test that asks when it is not there."""
    return _directory("DEEPINFER_GOLDEN_DIR", "golden")


def official_dir() -> Path:
    """The set in the official numerics; skips the test that asks when it is not there."""
    return _directory("DEEPINFER_GOLDEN_OFFICIAL_DIR", "golden_official")


@cache
def load(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Shared between tests: do not write to them."""
    return load_file(path)


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name starts with `prefix`, under the rest of their name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """max|got - expected| / max|expected|; infinities must agree exactly, NaN counts as infinitely wrong."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    g, e = got.double(), expected.double()
    off = torch.where(g == e, 0.0, (g - e).abs())  # equal infinities are no difference
    largest = e[e.isfinite()].abs().max().item() if e.isfinite().any() else 0.0
    worst = off.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
    return worst / largest if worst and largest else worst


def bf16_ulps(got: Tensor, expected: Tensor) -> float:
    """Largest |got - expected| in spacings of bf16 at the expected value; infinities must agree, NaN is wrong."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    g, e = got.double(), expected.double()
    exponent = torch.frexp(e.abs()).exponent  # |e| in [2^(exponent - 1), 2^exponent)
    exponent = torch.where(e == 0, -125, exponent).clamp_min(-125)  # denormals share the smallest spacing, 2^-133
    spacing = torch.ldexp(torch.ones_like(e), exponent - 8)
    off = torch.where(g == e, 0.0, (g - e).abs() / spacing)
    return off.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
