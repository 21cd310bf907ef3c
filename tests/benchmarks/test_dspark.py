"""The drafting benchmark runs on a small model, says what the table needs, and its prompts are fit for a repository."""

from __future__ import annotations

import json
from pathlib import Path

import dspark
import pytest


@pytest.fixture(scope="module")
def result(draft_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    prompts = place / "prompts.jsonl"
    lines = [{"kind": kind, "source": "here", "text": text} for kind, text in (("code", "def f"), ("prose", "It was"))]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines * 2))
    output = place / "new" / "result.json"
    dspark.main(["--model", str(draft_checkpoint), "--quick", "--prompts", str(prompts), "--output", str(output)])
    return output


def test_acceptance_is_told_by_kind_and_law(result: Path) -> None:
    told = json.loads(result.read_text())["acceptance"]
    assert [(f["law"], f["kind"]) for f in told] == [
        (law, kind) for law in ("greedy", "coupled", "residual") for kind in ("code", "prose", "all")
    ]
    for figure in told:
        assert figure["rounds"] > 0
        assert figure["accept_length"] == pytest.approx(1 + sum(figure["accepted_at"]), abs=2e-3)
        assert 0 <= figure["calibration_error"] <= 1
        assert figure["temperature"] == (0 if figure["law"] == "greedy" else 1)


def test_every_row_has_lengths_and_speeds_of_the_three_modes(result: Path) -> None:
    told = json.loads(result.read_text())
    assert told["quick"] and told["machine"]["load_before"] >= 0
    assert [row["concurrency"] for row in told["speed"]] == list(dspark.QUICK_CONCURRENCY)
    for row in told["speed"]:
        rates = {mode: row[mode]["tokens_per_s"] for mode in dspark.MODES}
        assert min(rates.values()) > 0
        assert row["off"]["verify_length"] == 0 and row["off"]["accept_length"] == 1
        assert 3 < row["fixed"]["verify_length"] <= 5  # less only where a sequence is about to end
        assert row["varlen_over_best"] == pytest.approx(rates["varlen"] / max(rates["off"], rates["fixed"]), abs=1e-3)


def test_scheduling_costs_are_told(result: Path) -> None:
    told = json.loads(result.read_text())["scheduling"]
    assert told["sequences"] == 256
    assert told["plan"] > 0 and told["select"] > 0


def test_no_path_of_the_machine_is_published(result: Path) -> None:
    assert str(result.parents[1]) not in result.read_text()


def test_json_is_one_line_and_the_page_gets_both_tables(
    result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{dspark.BEGIN}\nold\n{dspark.END}\nafter\n")
    dspark.main(["--input", str(result), "--json", "--markdown", str(page)])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == json.loads(result.read_text())
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| residual |") == 3 and "| 2 | " in text
    assert "QUICK" in text


def test_prompts_name_their_sources_and_are_of_every_trained_kind() -> None:
    kinds: dict[str, int] = {}
    for line in dspark.PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        assert entry["source"] and entry["text"].startswith("<｜begin▁of▁sentence｜>")
        assert not entry["text"].endswith("\n")  # the tokenizer would join it to the indentation that follows
        kinds[entry["kind"]] = kinds.get(entry["kind"], 0) + 1
    assert kinds == {"code": 24, "tools": 24, "prose": 24, "doc": 24}
    assert dspark.PROMPTS.stat().st_size < 100_000
