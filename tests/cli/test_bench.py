"""`deepinfer bench` where there is nothing to measure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepinfer.cli import main


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "Start one with `deepinfer serve --model nano`"),
        (("--server", "127.0.0.1:1"), "nobody listens there"),
        (("--server", "http://a/?b"), "is not an address"),
        (("--server", "127.0.0.1:1", "--rate", "0"), "rate: must be"),
        (("--server", "127.0.0.1:1", "--rate", "nan"), "rate: must be"),
        (("--server", "127.0.0.1:1", "--effort", "some"), "effort: must be"),
        (("--server", "127.0.0.1:1", "--prompts", "/no/such/file"), "/no/such/file"),
    ],
)
def test_without_a_server_it_starts_nothing_and_says_what_to_do(arguments: tuple[str, ...], words: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    error = capsys.readouterr().err
    assert left.value.code == 2 and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "words"),
    [("nowhere/figures.json", "json: there is no directory"), (".", "is a directory"), ("old.json", "may not be")],
)
def test_a_file_that_cannot_be_written_does_not_cost_a_whole_run(
    file: str, words: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """It is refused although nobody listens there: no server was asked."""
    (tmp_path / "old.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or Path(path).name != "old.json")  # root may
    with pytest.raises(SystemExit) as left:
        main(["bench", "--server", "127.0.0.1:1", "--json", str(tmp_path / file)])
    error = capsys.readouterr().err
    assert left.value.code == 2 and words in error and error.count("\n") == 1
