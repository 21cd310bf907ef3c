"""The vendor's benchmark and its sweep: their definitions on made-up steps, and short runs of the real thing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHORT = ["--quick", "--context_length", "300", "--non_cached_tokens", "150", "--decode_num_requests", "2"]
SHORT += ["--prefill_batch_size", "128", "--device", "cpu", "--dtype", "float32"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name.replace('/', '_')}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark_example() -> ModuleType:
    return load("benchmark")


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    return load("sweep/plot_pareto")


# -- definitions ------------------------------------------------------------------------------------------------------


def samples(example: ModuleType, count: int, slow_until: int) -> list[Any]:
    """Steps of 1 s up to a number, then of 0.02 s; 100 + i tokens in, 3 out each."""
    at, found = 0.0, []
    for number in range(count):
        at += 1.0 if number < slow_until else 0.02
        found.append(example.Sample(at, 100 + number, 3))
    return found


def test_decode_skips_warm_up_and_logged_steps_and_takes_60_intervals(benchmark_example: ModuleType) -> None:
    counts = benchmark_example.DECODE
    assert (counts.warm_up, counts.logged, counts.intervals, counts.samples) == (50, 60, 60, 171)
    figures = benchmark_example.decode_figures(samples(benchmark_example, 171, 111), counts, requests=64, nextn=5, cp=2)
    assert figures["avg_sps"] == pytest.approx(50)
    assert figures["tok_s_gpu"] == pytest.approx(50 * 64 * 6 / 2)  # every draft accepted
    assert figures["tok_s_user"] == pytest.approx(50 * 6)
    assert figures["emitted_tok_s_gpu"] == pytest.approx(50 * 3 / 2)
    assert figures["accept_length"] == pytest.approx(3 / 64)


def test_prefill_skips_5_chunks_and_takes_10_intervals(benchmark_example: ModuleType) -> None:
    counts = benchmark_example.PREFILL
    assert (counts.warm_up, counts.intervals, counts.samples) == (5, 10, 16)
    figures = benchmark_example.prefill_figures(samples(benchmark_example, 16, 6), counts, cp=1)
    assert figures["step_ms"] == pytest.approx(20)
    assert figures["tok_s_gpu"] == pytest.approx(sum(100 + n for n in range(6, 16)) / 0.2)


def test_too_few_steps_give_no_rate(benchmark_example: ModuleType) -> None:
    with pytest.raises(ValueError, match="170 steps of the full batch, 171 are needed"):
        benchmark_example.decode_figures(samples(benchmark_example, 170, 0), benchmark_example.DECODE, 1, 0, 1)


def test_scaling_of_the_published_curves(benchmark_example: ModuleType) -> None:
    """spec/serving.md 7.2: 75 % of 3 drafts."""
    found = benchmark_example.scaled(1000.0, 0.75, 3)
    assert found == {
        "linear": pytest.approx(812.5),
        "geometric": pytest.approx(683.6, abs=0.1),
        "flat": pytest.approx(750.0),
    }
    assert benchmark_example.scaled(1000.0, 1.0, 5)["geometric"] == pytest.approx(1000.0)


# -- short runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(
    benchmark_example: ModuleType, draft_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    file = tmp_path_factory.mktemp("sweep") / "new" / "points.jsonl"
    benchmark_example.main([*SHORT, "--model_name", str(draft_checkpoint), "--tag", "T", "--result_jsonl", str(file)])
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_per_mode(lines: list[dict[str, Any]]) -> None:
    prefill, decode = lines
    assert (prefill["mode"], decode["mode"]) == ("prefill", "decode")
    assert all(line["tag"] == "T" and line["ep_size"] == 1 and line["quick"] for line in lines)
    assert prefill["non_cached_tokens"] == 300 - 128, "the common prefix is of whole blocks"
    assert decode["nextn"] == 5
    assert decode["tok_s_gpu"] == pytest.approx(decode["avg_sps"] * 2 * 6, rel=1e-3)
    assert decode["tok_s_gpu"] >= decode["emitted_tok_s_gpu"] > 0
    assert prefill["tok_s_gpu"] == pytest.approx(128e3 / prefill["step_ms"], rel=0.3)


def test_profile_gives_traces_and_no_rates(
    benchmark_example: ModuleType,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PROFILE", "1")
    points = tmp_path / "points.jsonl"
    benchmark_example.main([*SHORT, "--model_name", str(tiny_checkpoint), "--result_jsonl", str(points)])
    out = capsys.readouterr().out
    assert "prefill: 2 steps" in out and "decode: 3 steps" in out
    assert not points.exists()
    for mode in ("prefill", "decode"):
        assert json.loads((tmp_path / f"profile-{mode}.json").read_text())["traceEvents"]


@pytest.mark.parametrize("wrong", [["--context_length", "0"], ["--acceptance", "1.5"], ["--mode", "none"]])
def test_bad_arguments_are_refused(benchmark_example: ModuleType, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        benchmark_example.main(wrong)
    assert left.value.code == 2


def test_the_documented_command_fits_nano_and_says_the_length_it_took(
    benchmark_example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = benchmark_example.arguments([])
    config = benchmark_example.ModelConfig.from_dir(benchmark_example.resolve_model("nano"))
    benchmark_example.fit(options, config, 1000)
    assert options.context_length == config.max_position_embeddings - 1000
    assert f"--context_length {options.context_length}, not the vendor's 32768" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--context_length", "32768"], r"--context_length: 32768 does not fit; at most \d+"),
        (["--nextn", "9"], r"--nextn: must be from 0 to \d+ with this model, got 9"),
    ],
)
def test_what_the_model_has_no_room_for_is_refused_before_weights_are_loaded(
    benchmark_example: ModuleType, monkeypatch: pytest.MonkeyPatch, given: list[str], words: str
) -> None:
    monkeypatch.setattr(benchmark_example, "LLM", None)
    with pytest.raises(ValueError, match=words):
        benchmark_example.main(["--model_name", "nano", *given])


def test_rounded_non_cached_tokens_are_said(benchmark_example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    config = benchmark_example.ModelConfig.from_dir(benchmark_example.resolve_model("nano"))
    for context, rounded in ((300, 172), (50, 50)):
        options = benchmark_example.arguments(["--context_length", str(context), "--non_cached_tokens", "100"])
        benchmark_example.fit(options, config, 1000)
        assert f"--non_cached_tokens {rounded}, not 100" in capsys.readouterr().err


def test_a_result_file_that_cannot_be_made_is_refused_at_the_door(
    benchmark_example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with pytest.raises(SystemExit):
        benchmark_example.arguments(["--result_jsonl", str(blocked / "x")])
    assert "--result_jsonl" in capsys.readouterr().err


# -- the chart --------------------------------------------------------------------------------------------------------


def decode_point(requests: int, rate: float, **fields: Any) -> dict[str, Any]:
    line = {
        "mode": "decode", "tag": "EP4DP4", "model": "m", "ep_size": 4, "cp": 1, "context_length": 32768,
        "non_cached_tokens": 4096, "nextn": 3, "redundant_experts": 32, "yoco_clip": False, "prompt_mode": "random",
        "decode_num_requests": requests, "tok_s_gpu": rate, "tok_s_user": rate / requests, "step_ms": 1.0,
        "acceptance": 0.75,
    }  # fmt: skip
    factors = {"linear": 0.8125, "geometric": 0.684, "flat": 0.75}
    return line | {"scaled_tok_s_gpu": {name: factor * rate for name, factor in factors.items()}} | fields


def write(file: Path, points: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(point) + "\n" for point in points))
    return file


def test_front_drops_what_is_beaten_in_both_respects(plot: ModuleType) -> None:
    found = [plot.Point(8, 200, 1600), plot.Point(16, 190, 3000), plot.Point(32, 100, 2900), plot.Point(64, 80, 5000)]
    assert [point.size for point in plot.pareto(found, "decode")] == [64, 16, 8]
    found = [plot.Point(1, 10.0, 50), plot.Point(2, 20.0, 40), plot.Point(3, 30.0, 60)]
    assert [point.size for point in plot.pareto(found, "prefill")] == [1, 3]


def test_scaled_line_slows_the_user_as_it_slows_the_gpu(plot: ModuleType) -> None:
    group = [decode_point(64, 6400.0)]
    assert plot.points(group) == [(64, 100.0, 6400.0)]
    assert plot.points(group, "geometric")[0] == (64, pytest.approx(68.4), pytest.approx(4377.6))


def test_a_chart_is_drawn(plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [decode_point(n, 100.0 * n**0.9) for n in (8, 16, 32)]
    points += [decode_point(n, 90.0 * n**0.9, tag="EP8DP8", ep_size=8) for n in (8, 16)]
    file = write(tmp_path / "decode.jsonl", points)
    plot.main([str(file)])
    chart = ElementTree.parse(tmp_path / "decode.svg")
    tags = [element.tag.split("}")[1] for element in chart.iter()]
    assert tags.count("polyline") == 4, "two lines per tag"
    assert tags.count("circle") == 2 * 5
    texts = [element.text for element in chart.iter() if element.tag.endswith("text")]
    assert "EP8DP8, at 75% (geometric)" in texts
    assert "5 points of 2 tags" in capsys.readouterr().out


def test_ticks_are_round(plot: ModuleType) -> None:
    assert plot.ticks(1234.0) == [0, 500, 1000]
    assert plot.ticks(0.6) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"model": "n"}, 'model: "m", "n"'),
        ({"context_length": 4096}, "context_length"),
        ({"nextn": 5}, "nextn"),
        ({"yoco_clip": True}, "yoco_clip"),
        ({"ep_size": 8}, "EP4DP4 were not measured alike: ep_size: 4, 8"),
        ({"cp": 2}, "cp: 1, 2"),
        ({"redundant_experts": 0}, "redundant_experts: 0, 32"),
        ({"decode_num_requests": 8}, "more than one point"),
        ({"quick": True}, "too few steps"),
        ({"mode": "prefill", "prefill_batch_size": 4096}, "mode"),
    ],
)
def test_points_that_are_not_alike_are_refused(
    plot: ModuleType, tmp_path: Path, second: dict[str, Any], words: str
) -> None:
    file = write(tmp_path / "p.jsonl", [decode_point(8, 800.0), decode_point(16, 1500.0, **second)])
    with pytest.raises(ValueError, match=words):
        plot.main([str(file)])
    assert not (tmp_path / "p.svg").exists()


def test_a_line_that_is_no_point_is_named(plot: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(decode_point(8, 1.0)) + '\n{"mode": "decode"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:2: no point"):
        plot.main([str(file)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "it is not a JSON object"),
        ("{", "it is not JSON"),
        ('{"mode": "decode"}', "tok_s_gpu is missing|tag is"),
    ],
)
def test_a_bad_line_is_told_in_words_and_not_as_an_exception(
    plot: ModuleType, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match=rf"p\.jsonl:1: no point of a sweep: ({words})"):
        plot.main([str(file)])
    with pytest.raises(ValueError, match=r"none\.jsonl: cannot be read: No such file"):
        plot.main([str(tmp_path / "none.jsonl")])


def test_sweep_calls_the_benchmark_for_every_point_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    """With a stand-in for Python that writes down how it was called and fails at one point."""
    fake = tmp_path / "python"
    log = tmp_path / "calls"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *"requests 16"*) exit 1;; esac\n')
    fake.chmod(0o755)
    settings = {"PYTHON": str(fake), "OUT": str(tmp_path / "out"), "TAG": "T", "MODES": "decode", "NEXTN": "2"}
    environment = os.environ | settings | {"DECODE_REQUESTS": "8 16 32"}
    done = subprocess.run(
        [EXAMPLES / "sweep" / "run_sweep.sh", "a model", "--dtype", "float32"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "failed: decode, decode_num_requests 16" in done.stderr
    calls = log.read_text().splitlines()
    assert [call.split("--decode_num_requests ")[1].split()[0] for call in calls] == ["8", "16", "32"]
    assert all("--tag T --model_name a model" in call and call.endswith("--dtype float32") for call in calls)
    assert all("--context_length 32768 --non_cached_tokens 4096 --nextn 2" in call for call in calls)
