"""`deepinfer inspect` tells what a checkpoint holds from its headers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deepinfer.cli.inspect import inspect
from deepinfer.model.presets import flash

app = typer.Typer()
app.command()(inspect)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(flash().to_dict()))
    return tmp_path


def test_released_config_shows_the_released_numbers(config_only: Path) -> None:
    text = run(str(config_only))
    for expected in (
        "config only",
        "96,085",
        "510,286,023,000",
        "432 B",
        "288 B",
        "102 B",
        "68 B",
        "890 B",
        "2,830,080 B",
    ):
        assert expected in text
    assert "does not fit" in text  # one device of 141 GiB


def test_json_carries_the_same_numbers(config_only: Path) -> None:
    report = json.loads(run(str(config_only), "--json", "--devices", "8", "--device-memory-gib", "80"))
    assert report["total_bytes"] == 510_286_023_000
    assert report["kv_bytes_per_token"] == 890
    assert sum(module["tensors"] for module in report["modules"]) == report["total_tensors"] == 96_085
    assert [(fit["devices"], fit["tables"]) for fit in report["fits"]] == [(8, "host"), (8, "device")]


def test_checkpoint_is_checked_by_its_headers(tiny_checkpoint: Path) -> None:
    text = run(str(tiny_checkpoint))
    assert "all headers agree" in text
    assert "tokenizer.json" in text


def test_damaged_checkpoint_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    os.truncate(tmp_path / "model.safetensors", 100_000)
    with pytest.raises(ValueError, match="truncated"):
        run(str(tmp_path))


@pytest.mark.parametrize("devices", ["", "0", "1,x", "-2"])
def test_bad_device_list_is_a_usage_error(config_only: Path, devices: str) -> None:
    result = CliRunner().invoke(app, [str(config_only), f"--devices={devices}"])
    assert result.exit_code == 2
