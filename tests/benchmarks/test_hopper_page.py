"""Tables of GPU runs: a newer figure replaces an older one, and every line names its limit and its peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hopper_page

from deepinfer.bench.rank_share import RankShare
from deepinfer.bench.rank_share_run import measure
from deepinfer.kernels.device import resolve_device


def line(name: str, us: float, area: str = "dense") -> dict[str, Any]:
    return {
        "name": name, "area": area, "us": us, "limit_us": 2.0, "of_limit": us / 2, "bound": "bytes", "gb_per_s": 1234,
        "tflop_per_s": 5.0, "flops": 7, "error": 1.66e-3, "target_us": 6.6,
        "peer": {"us": 9.8, "measured": True, "source": "DeepGEMM, this run"},
    }  # fmt: skip


def run(date: str, *cases: dict[str, Any]) -> dict[str, Any]:
    gpu = {"name": "NVIDIA H200", "torch": "2.11", "cuda": "13.0", "triton": "3.6.0"}
    rates = {"copy": 4.2e12, "bf16": 7e14, "fp8": 1.4e15}
    return {"date": date, "commit": f"commit-{date}", "gpu": gpu, "rates": rates, "cases": list(cases)}


def page(folder: Path) -> Path:
    file = folder / "page.md"
    marks = [mark for pair in hopper_page.MARKS.values() for mark in pair]
    file.write_text("\n".join(["# Page", *marks, "end"]) + "\n")
    return file


def test_the_newest_figure_counts(tmp_path: Path) -> None:
    (tmp_path / "kernels_b.json").write_text(json.dumps(run("2026-12-01", line("a", 9.0), line("b", 8.0))))
    (tmp_path / "kernels_a.json").write_text(json.dumps(run("2026-12-02", line("a", 6.5), line("c", 4.0, "hyper"))))
    file = page(tmp_path)
    hopper_page.main(["--results", str(tmp_path), "--page", str(file)])
    text = file.read_text()
    assert "| a | 6.5 | 2.0 | 3.25 | bytes | 1,234 | 5 | 1.7e-03 | 6.6 | 9.8 |" in text
    assert "| b | 8.0 |" in text and "| a | 9.0 |" not in text
    assert "**Hyper.** NVIDIA H200, torch 2.11, Triton 3.6.0, commit commit-2026-12-02" in text
    assert "4,200 GB/s" in text and text.endswith("end\n")
    assert "No run yet." in text  # of rank-share


def test_rank_share_is_told_with_its_floor_and_what_it_leaves_out(tmp_path: Path) -> None:
    share = RankShare(
        preset="tiny", ep=2, layers=5, sequences=2, context=60, prefill_chunk=70, steps=1, dtype="float32"
    )
    result = measure(share, resolve_device("cpu"), tell=lambda text: None)
    (tmp_path / "rank_share_tiny.json").write_text(json.dumps(result))
    file = page(tmp_path)
    hopper_page.main(["--results", str(tmp_path), "--page", str(file)])
    text = file.read_text()
    assert "One rank of 2, tiny with 5 layers and 8 experts" in text
    assert f"| {result['decode']['step_ms']:.2f} ms | {result['decode']['floor_ms']:.2f} ms |" in text
    assert "at all accepted" in text and "prefill, 70 tokens, all layers" in text
    assert "- network:" in text
