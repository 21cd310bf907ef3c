"""Helpers of the engine's and the model's tests, and the scripts of benchmarks/, serve the tests on a GPU, too."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent

for folder in (TESTS / "engine", TESTS / "model", TESTS.parent / "benchmarks"):
    sys.path.append(str(folder))
