"""Every kernel compiles for sm_90 at the shapes of the released model, without a GPU: no register is spilled, and the
tensor cores' asynchronous product stands where it is meant.

The modules compile_cases_<area>.py beside this file list what is compiled: CASES, WGMMA (names of the cases that must
have wgmma in each of their kernels that multiplies, so in at least one), and STACK where a kernel is known to spill:
case -> the most stack bytes a thread. A fresh process compiles, because this one may interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
MODULES = sorted(file.stem for file in FOLDER.glob("compile_cases_*.py"))


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, Any]]:
    from compile_report import cuobjdump

    if cuobjdump() is None:
        pytest.skip("this Triton brings no cuobjdump along, so spills cannot be counted")
    ptxas = cuobjdump().with_name("ptxas")
    if not ptxas.exists():
        pytest.skip("this Triton brings no ptxas along: nothing can be compiled without CUDA")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(FOLDER.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, str(FOLDER), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(FOLDER / "compile_report.py"), *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("module", MODULES)
def test_compiles_for_hopper_without_spills(report: dict[str, dict[str, Any]], module: str) -> None:
    found, allowed = report[module]["cases"], report[module]["stack"]
    failed = [f"{case}: {kernels}" for case, kernels in found.items() if isinstance(kernels, str)]
    assert not failed, "\n".join(failed)
    nothing = [case for case, kernels in found.items() if not kernels]
    assert found and not nothing, f"nothing was compiled: {nothing}"
    most = {case: max(kernels, key=lambda kernel: kernel["stack"]) for case, kernels in found.items()}
    spilled = [(c, k["name"], k["stack"]) for c, k in most.items() if k["stack"] > allowed.get(c, 0)]
    assert not spilled, f"stack bytes a thread: {spilled}"
    stale = [case for case in allowed if not most[case]["stack"]]
    assert not stale, f"no longer spills, take it out of STACK: {stale}"


@pytest.mark.parametrize("module", MODULES)
def test_multiplies_on_the_tensor_cores(report: dict[str, dict[str, Any]], module: str) -> None:
    found = report[module]["cases"]
    without = [case for case in report[module]["wgmma"] if not any(kernel["wgmma"] for kernel in found[case])]
    assert not without, f"no wgmma in {without}"
