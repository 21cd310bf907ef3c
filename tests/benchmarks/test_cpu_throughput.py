"""The benchmark runs on a small model, and what it writes can be published."""

from __future__ import annotations

import json
from pathlib import Path

import cpu_throughput
import pytest


@pytest.fixture(scope="module")
def result(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bench") / "new" / "result.json"
    shapes = ["--prefill", "70", "--context", "40", "--batches", "1", "3"]
    cpu_throughput.main(["--model", str(tiny_checkpoint), "--quick", "--output", str(output), *shapes])
    return output


def test_every_figure_names_its_shape_its_machine_and_its_limit(result: Path) -> None:
    told = json.loads(result.read_text())
    assert told["machine"]["threads"] >= 1 and told["machine"]["cpu"] and told["quick"]
    assert [(f["figure"], f["batch"], f["path"]) for f in told["figures"]] == [
        (figure, batch, path)
        for figure, batch in (("prefill", 1), ("decode", 1), ("decode", 3))
        for path in ("model.forward", "LLM.generate")
    ]
    for figure in told["figures"]:
        bound = figure["limit"]
        assert figure["steps"] >= cpu_throughput.QUICK_STEPS
        assert figure["tokens_per_s"] > 0
        assert figure["percent_of_limit"] == pytest.approx(100 * bound["limit_s"] / figure["median_s"])
        assert bound["limit_s"] == max(bound["matmul_s"], bound["read_s"])
        assert bound["peak_limit_s"] <= bound["limit_s"] * 1.0001


def test_no_path_of_the_machine_is_published(result: Path) -> None:
    assert str(result.parents[1]) not in result.read_text()


def test_the_table_replaces_only_what_stands_between_the_marks(result: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{cpu_throughput.BEGIN}\nold\n{cpu_throughput.END}\nafter\n")
    for _ in range(2):
        cpu_throughput.main(["--input", str(result), "--markdown", str(page)])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| decode, `LLM.generate` |") == 2
    assert "QUICK" in text  # nobody publishes such a run by mistake


def test_a_page_without_marks_is_refused(result: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match=r"page\.md has no"):
        cpu_throughput.main(["--input", str(result), "--markdown", str(page)])
    assert page.read_text() == "no marks\n"
