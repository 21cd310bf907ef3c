"""The example that calibrates a checkpoint: what it sees is what the confidence head said."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from deepinfer.speculation.calibration import CLASSES, Calibration


@pytest.fixture(scope="module")
def example() -> ModuleType:
    file = Path(__file__).resolve().parents[1] / "examples" / "calibrate_drafts.py"
    spec = importlib.util.spec_from_file_location("calibrate_drafts", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_logits_come_back_from_the_products_of_their_sigmoids(example: ModuleType) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (200, 5)).astype(np.float32)
    products = Calibration().survivals(torch.from_numpy(logits), torch.zeros(200, dtype=torch.int64)).numpy()
    assert np.allclose(example.logits_of(products), logits, atol=0.05)
    assert np.isfinite(example.logits_of(np.array([[1.0, 1.0], [0.0, 0.0]], np.float32))).all()


def test_a_checkpoint_gets_a_calibration_that_the_engine_reads(
    example: ModuleType, draft_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, rounds = tmp_path / "prompts.jsonl", tmp_path / "rounds.npz"
    prompts.write_text("".join(json.dumps({"kind": kind, "text": kind * 3}) + "\n" for kind in ("code", "prose")))
    given = ["--model", str(draft_checkpoint), "--prompts", str(prompts), "--tokens", "16", "--rounds", str(rounds)]
    example.main([*given, "--output", str(tmp_path)])
    fitted = Calibration.load(tmp_path, 5).lines
    assert fitted is not None and set(fitted) == set(CLASSES)
    assert "residual" in capsys.readouterr().out
    assert not list(draft_checkpoint.glob("dspark_calibration.json"))
    seen = np.load(rounds)
    assert seen["greedy/fit/code/logits"].shape[1] == 5 and len(seen["residual/fit/prose/accepted"]) > 0
    example.main([*given, "--output", str(tmp_path)])  # from what was kept
    assert Calibration.load(tmp_path, 5).lines == fitted
