"""Helpers of the engine's and the model's tests are those of the tests on a GPU, too."""

from __future__ import annotations

import sys
from pathlib import Path

for name in ("engine", "model"):
    sys.path.append(str(Path(__file__).parent.parent / name))
