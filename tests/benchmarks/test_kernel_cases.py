"""The benchmark of the GPU kernels: its sums, its table, and that every case is sound. Times need a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import kernels
import peers
import pytest
import torch
from kernel_cases import (
    AREAS,
    L2_BYTES,
    MOST_COPIES,
    KernelCase,
    Prepared,
    bound,
    copies_beyond_cache,
    limit_us,
)

from deepinfer.kernels.timing import Rates

RATES = Rates(copy=4e12, bf16=800e12, fp8=1200e12)


def case(**fields: Any) -> KernelCase:
    given = {"name": "c", "area": "dense", "shape": {"m": 1}, "make": lambda device: Prepared(print), "bytes": 1000}
    return KernelCase(**(given | fields))


@pytest.mark.parametrize(
    ("fields", "limit", "by"),
    [
        ({"bytes": 8_000_000}, 2.0, "bytes"),
        ({"bytes": 8_000_000, "flops": 1_200_000_000, "rate": "fp8"}, 2.0, "bytes"),
        ({"bytes": 8_000_000, "flops": 4_800_000_000, "rate": "fp8"}, 4.0, "fp8"),
        ({"bytes": 8_000_000, "flops": 4_800_000_000, "rate": "bf16"}, 6.0, "bf16"),
    ],
)
def test_limit_is_the_longer_of_bytes_and_operations(fields: dict[str, Any], limit: float, by: str) -> None:
    assert limit_us(case(**fields), RATES) == pytest.approx(limit)
    assert bound(case(**fields), RATES) == by


@pytest.mark.parametrize("fields", [{"area": "none"}, {"bytes": 0}, {"flops": 5}, {"rate": "fp8"}])
def test_unsound_case_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="c: "):
        case(**fields)


@pytest.mark.parametrize("nbytes", [1, 9_000_000, L2_BYTES, 2 * L2_BYTES, 4 * L2_BYTES])
def test_rotation_goes_beyond_the_cache(nbytes: int) -> None:
    copies = copies_beyond_cache(nbytes)
    assert copies * nbytes >= 3 * L2_BYTES or copies == MOST_COPIES
    assert copies == 1 or (copies - 2) * nbytes < 3 * L2_BYTES  # and not far beyond it


def test_cases_of_all_areas_are_sound() -> None:
    """Made without a device; names are unique; what is run beside them exists and is told its shape."""
    cases, missing = kernels.found_cases()
    names = [c.name for c in cases]
    assert len(set(names)) == len(names)
    assert {c.area for c in cases} | set(missing) == set(AREAS)
    assert all(c.peer_key is None or c.peer_key in peers.PEERS for c in cases)
    assert all(c.peer_us is None or c.peer for c in cases), "a known figure needs its source"


def test_wrong_case_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "time_us", lambda prepared, device: {"us": 4.0, "least_us": 3.0, "most_us": 5.0})
    monkeypatch.setattr(kernels, "_release", lambda: None)
    wrong = [float("nan"), 0.5]
    device, none = torch.device("cpu"), peers.Peers(None)
    for error in wrong:
        made = case(make=lambda device, error=error: Prepared(print, check=lambda: error, tolerance=0.1))
        line = kernels.measured(made, RATES, none, device)
        assert "us" not in line
        assert "relative error" in line["failed"]
        json.dumps(line, allow_nan=False)
    fine = Prepared(print, check=lambda: 0.05, tolerance=0.1)
    right = case(name="right", bytes=8_000_000, make=lambda device: fine, peer_us=9.0, peer="someone")
    line = kernels.measured(right, RATES, none, device)
    assert (line["us"], line["limit_us"], line["of_limit"], line["gb_per_s"]) == (4.0, 2.0, 2.0, 2000)
    text = kernels.table([line, kernels.measured(made, RATES, none, device)])
    assert "9.0 (known)" in text
    assert "FAILED" in text
    assert "5.00e-01" in text


def test_absent_peer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_release", lambda: None)
    beside = case(peer_key="flashmla_decode", peer_us=48.6, peer="FlashMLA, issue 6")
    line = kernels.peer_line(beside, peers.Peers(None), torch.device("cpu"))
    assert line is not None
    assert (line["us"], line["measured"]) == (48.6, False)
    assert "--peers" in line["failed"]


def test_list_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--list", "--only", "dense"])
    captured = capsys.readouterr()
    assert "kernels_dense" in captured.err or "dense" in captured.out


@pytest.mark.parametrize(
    ("error", "words"), [(0.05, "fine"), (0.5, "WRONG"), (float("nan"), "WRONG"), (None, "nothing")]
)
def test_check_alone(monkeypatch: pytest.MonkeyPatch, error: float | None, words: str) -> None:
    monkeypatch.setattr(kernels, "_release", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runs: list[int] = []
    made = case(make=lambda device: Prepared(runs.append, check=lambda: error, tolerance=0.1))
    assert kernels.checked(made, torch.device("cpu")).startswith(words)
    assert runs == [0]


def test_file_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "found_cases", lambda areas: pytest.fail("too late"))
    closed = tmp_path / "closed.json"
    closed.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # root may write everything
    refused = {"there is no directory": tmp_path / "none" / "a.json", "is a directory": tmp_path, "may not": closed}
    for words, file in refused.items():
        with pytest.raises(SystemExit) as stopped:
            kernels.main(["--json", str(file)])
        assert stopped.value.code == 2
        assert f"--json: {'' if 'no' in words else file}" in (told := capsys.readouterr().err)
        assert words in told
    assert kernels.unwritable(tmp_path / "new.json") is None


def test_match_that_meets_no_case_names_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--only", "attention", "--match", "256 x 2"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "'256 x 2'" in told
    assert "\n  sparse attention in CUDA, 256 x 1 rows, own lists\n" in told


def test_attention_is_timed_in_both_families_at_the_shapes_that_issue_7_names() -> None:
    cases = {c.name: c for c in kernels.found_cases(["attention"])[0]}
    wanted = {
        "1 x 1 rows, own lists": 10, "16 x 1 rows, own lists": 14, "128 x 1 rows, own lists": 29,
        "256 x 1 rows, own lists": 56, "64 x 6 rows, own lists": 82, "64 x 6 rows, shared lists": 70,
        "256 x 1 rows, windows alone": 15, "128 x 1 rows, windows alone": None, "1 x 1 rows, windows alone": None,
        "64 x 5 rows, block of drafts": None,
    }  # fmt: skip
    for shape, target in wanted.items():
        assert cases[f"sparse attention in CUDA, {shape}"].target_us == target
        assert f"sparse attention in Triton, {shape}" in cases
    prefill = cases["sparse attention in CUDA, prefill of 4096 rows, records"]
    assert prefill.target_us is not None
    assert prefill.flops / prefill.target_us / 1e6 == pytest.approx(520, rel=1e-3)
