"""Files that processes write and may be killed over: another process's half-written file stays, a dead one's goes."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.model import temporary_file
from deepinfer.model.temporary_file import remove_abandoned, replacing

# Without the package, which takes a second to import.
WRITER = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("temporary_file", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with module.replacing(pathlib.Path(sys.argv[2])) as stream:
    stream.write(b"half")
    stream.flush()
    print("half", flush=True)
    sys.stdin.readline()
    stream.write(b" and half")
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has written half of layer.experts, and goes on when it gets a line."""
    command = [sys.executable, "-c", WRITER, str(temporary_file.__file__), str(tmp_path / "layer.experts")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        yield process
        process.kill()


def test_what_a_killed_process_left_is_removed(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.wait()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".layer.experts.") and left.read_bytes() == b"half"
    others = [tmp_path / "layer.experts", tmp_path / ".notes", tmp_path / "0.experts.txt"]
    for other in others:
        other.write_bytes(b"whole")
    assert remove_abandoned(tmp_path, ".experts") == 4
    assert set(tmp_path.iterdir()) == set(others)


def test_what_another_process_is_writing_stays(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    assert remove_abandoned(tmp_path, ".experts") == 0
    writer.communicate("go on\n")
    (written,) = tmp_path.iterdir()
    assert written == tmp_path / "layer.experts" and written.read_bytes() == b"half and half"
    assert written.stat().st_mode & 0o777 == 0o644


def test_a_file_that_was_taken_for_abandoned_before_it_was_locked_is_begun_anew(tmp_path: Path, monkeypatch) -> None:
    lock, taken = fcntl.flock, []

    def late(stream, operation: int) -> None:
        if not taken:
            taken.append(Path(stream.name))
            taken[0].unlink()
        lock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with replacing(tmp_path / "layer.experts") as stream:
        assert Path(stream.name) != taken[0]
        stream.write(b"whole")
    assert (tmp_path / "layer.experts").read_bytes() == b"whole"


def test_who_is_interrupted_leaves_nothing_and_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "layer.experts"
    file.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(file) as stream:
        stream.write(b"new")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == b"old"


def test_a_file_system_without_locks_is_written_to_and_never_cleaned(tmp_path: Path, monkeypatch) -> None:
    def refuse(stream, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".layer.experts.abc").write_bytes(b"of whom?")
    assert remove_abandoned(tmp_path, ".experts") == 0
    with replacing(tmp_path / "layer.experts") as stream:
        stream.write(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"layer.experts", ".layer.experts.abc"}
