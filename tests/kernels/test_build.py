"""The compiled kernels: a damaged or unusable cache is never an end, and never silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.kernels.cpu.build import library

pytestmark = pytest.mark.skipif(library().handle is None, reason=library().explanation)
SCRIPT = """
import torch
from deepinfer.kernels import select
from deepinfer.kernels.cpu.build import library
print(library().explanation)
print(float(select.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)[0, 0]))
"""


def run(home: str, **environment: str) -> list[str]:
    given = {name: value for name, value in os.environ.items() if name not in ("HOME", "TMPDIR")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=given | {"HOME": home} | environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_a_truncated_library_is_built_again_and_not_loaded(tmp_path: Path):
    first = run(str(tmp_path))
    (built,) = (tmp_path / ".cache" / "deepinfer" / "kernels").glob("*.so")
    whole = built.read_bytes()
    built.write_bytes(whole[: len(whole) // 2])
    assert run(str(tmp_path)) == first
    assert built.stat().st_size == len(whole)


def test_an_unusable_home_costs_one_build_and_leaves_one_folder(tmp_path: Path):
    for _ in range(2):
        assert "CPU kernels built by" in run("/proc/nowhere", TMPDIR=str(tmp_path))[0]
    assert [path.name for path in tmp_path.iterdir()] == [f"deepinfer-kernels-{os.getuid()}"]
    assert len(list(next(tmp_path.iterdir()).glob("*.so"))) == 1


def test_without_a_compiler_the_reference_runs_and_says_so(tmp_path: Path):
    explanation, value = run(str(tmp_path), PATH=str(tmp_path))
    assert "no C++ compiler found" in explanation
    assert abs(float(value) - 1) < 1e-5
