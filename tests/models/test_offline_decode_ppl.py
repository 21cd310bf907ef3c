"""Decode perplexity of nano is what it was, to the bit, on a platform that has baselines, and near on any other.

Tokens of another platform are not compared, not even greedy ones: where kernels fuse other operations, logits differ
by 1e-5, a near tie between two experts or two tokens goes the other way, and everything after it is another text. The
perplexity of the prompts has no such memory: the same tokens are scored everywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM
from deepinfer.kernels import select

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import refresh_offline_decode_ppl as refresh  # noqa: E402

by_workload = pytest.mark.parametrize(
    "name", ["short", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chat", "long_context"))]
)
needs_kernels = pytest.mark.skipif(
    not select.cpu_twins(torch.device("cpu"), torch.float32), reason="without a C++ compiler nothing is batch invariant"
)
RESULTS = {"prompt_ppl", "decode_ppl", "token_hash"}
NEAR = 1e-3  # of the perplexity of a prompt; another compiler's fusing moved log-probabilities by 4e-5 at most


@pytest.fixture(scope="module")
def llm() -> LLM:
    return refresh.open_llm()


@pytest.fixture(scope="module")
def measured(llm: LLM) -> dict[str, dict[str, Any]]:
    """Of each workload, filled by the first test that asks."""
    return {}


@pytest.fixture
def now(name: str, llm: LLM, measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in measured:
        measured[name] = refresh.measure(llm, name)
    return measured[name]


def shape(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in RESULTS}


def test_there_are_baselines_and_every_platform_has_all_workloads() -> None:
    stored = refresh.read(refresh.BASELINES)
    assert stored, "no platform has baselines, so nothing is ever compared: run examples/refresh_offline_decode_ppl.py"
    assert {name: set(entries) for name, entries in stored.items()} == {name: set(refresh.WORKLOADS) for name in stored}


@needs_kernels
@by_workload
def test_the_bits_are_those_of_the_baseline(name: str, request: pytest.FixtureRequest) -> None:
    own = refresh.read(refresh.BASELINES).get(platform := refresh.platform_name())
    if own is None:
        flag = " --long_context" if name == "long_context" else ""
        pytest.skip(f'no baseline for "{platform}"; add it: python examples/refresh_offline_decode_ppl.py{flag}')
    assert request.getfixturevalue("now") == own[name]


@needs_kernels
@by_workload
def test_prompts_are_as_likely_as_on_every_other_platform(name: str, now: dict[str, Any]) -> None:
    for platform, entries in refresh.read(refresh.BASELINES).items():
        assert shape(now) == shape(entries[name]), f"{platform}: measured with another workload; refresh it there"
        assert now["prompt_ppl"] == pytest.approx(entries[name]["prompt_ppl"], rel=NEAR), platform


def test_refreshing_leaves_other_platforms_and_other_workloads_alone() -> None:
    stored = {"here": {"short": {"decode_ppl": 1.0}, "chat": {"decode_ppl": 2.0}}, "there": {"short": {}}}
    after = refresh.updated(stored, "here", {"short": {"decode_ppl": 3.0}})
    assert after == {**stored, "here": {"short": {"decode_ppl": 3.0}, "chat": {"decode_ppl": 2.0}}}
    assert refresh.updated(after, "new", {"chat": {}}) == {**after, "new": {"chat": {}}}


@needs_kernels
@pytest.mark.slow
def test_another_process_writes_the_same_baselines(tmp_path: Path) -> None:
    """Two more models, two more processes; and what the file held is still there."""
    file = tmp_path / "baselines.json"
    file.write_text(json.dumps({"elsewhere": {"short": {}}}))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in conftest.py
    for flags in ([], ["--long_context"]):
        command = [sys.executable, str(EXAMPLES / "refresh_offline_decode_ppl.py"), *flags, "--output", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
        assert done.returncode == 0, done.stderr
    written = refresh.read(file)
    platform = refresh.platform_name()
    assert set(written) == {"elsewhere", platform}
    own = refresh.read(refresh.BASELINES).get(platform)
    if own is None:
        pytest.skip(f'no baseline for "{platform}"; add it: python examples/refresh_offline_decode_ppl.py')
    assert written[platform] == own
