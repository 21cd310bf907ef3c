"""`deepinfer make-checkpoint` and `inspect`, as commands."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deepinfer.cli.make_checkpoint import make_checkpoint
from deepinfer.model.config import ModelConfig

GIB = 1 << 30
LIMIT = 8 * GIB


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`deepinfer ...` in a process of its own that cannot map more than 8 GiB."""
    return subprocess.run(
        [sys.executable, "-c", "from deepinfer.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )


def test_every_flag_explains_itself() -> None:
    app = typer.Typer()
    app.command()(make_checkpoint)
    for parameter in typer.main.get_command(app).params:
        if parameter.name != "help":
            assert len(getattr(parameter, "help", None) or "") > 15, parameter.name


def test_flags_shape_the_model(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(make_checkpoint)
    flags = [
        "--layers",
        "3",
        "--experts",
        "4",
        "--drafts",
        "--engram-vocab-size",
        "211",
        "--quiet",
        "--shard-gib",
        "0.002",
    ]
    result = CliRunner().invoke(app, [str(tmp_path / "out"), *flags], catch_exceptions=False)
    assert result.exit_code == 0
    config = ModelConfig.from_dir(tmp_path / "out")
    assert (config.num_hidden_layers, config.n_routed_experts, config.num_drafts) == (3, 4, 3)
    assert config.engram_vocab_size == 211
    assert config.vision is None
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert not list((tmp_path / "out").glob("*.partial"))


def test_command_refuses_a_used_directory_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = command("make-checkpoint", str(tmp_path))
    assert result.returncode == 2
    assert "not empty" in result.stderr
    assert "Traceback" not in result.stderr


def test_one_flash_layer_with_few_experts_is_written_and_inspected_in_8_gib(tmp_path: Path) -> None:
    flags = ("--preset", "flash", "--layers", "1", "--experts", "6", "--quiet")
    if shutil.disk_usage(tmp_path).free < 5 * GIB:
        pytest.skip("needs 5 GiB of free disk")
    _write_and_inspect(tmp_path / "out", flags)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_flash_layers_are_written_and_inspected_in_8_gib(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 20 * GIB:
        pytest.skip("needs 20 GiB of free disk")
    _write_and_inspect(tmp_path / "out", ("--preset", "flash", "--layers", "2", "--quiet"))


def _write_and_inspect(out: Path, flags: tuple[str, ...]) -> None:
    try:
        written = command("make-checkpoint", str(out), *flags)
        assert written.returncode == 0, written.stderr
        shown = command("inspect", str(out))
        assert shown.returncode == 0, shown.stderr
        payload = re.findall(r"([\d,]+) bytes of weights", written.stdout)[0]
        assert payload in shown.stdout
        assert "all headers agree" in shown.stdout
    finally:
        shutil.rmtree(out, ignore_errors=True)
