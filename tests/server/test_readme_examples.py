"""What the README prints for a running server, command by command, against a running server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def curls() -> list[tuple[str, str]]:
    """(command, what the README says that it prints)."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    sessions = [block for block in blocks if "$ curl" in block]
    return re.findall(r"^\$ (curl .*?\| cut -c \d+-\d+)\n(.*?)\n(?=\n|\Z)", "\n".join(sessions) + "\n", re.M | re.S)


def scripts() -> list[str]:
    return [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if ADDRESS in block]


def test_the_readme_has_examples_of_both() -> None:
    assert len(curls()) == 2 and len(scripts()) == 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize(("command", "printed"), curls())
def test_a_command_prints_what_stands_below_it(command: str, printed: str, nano_server: str) -> None:
    assert run(["bash", "-c", command.replace(ADDRESS, nano_server)]) == printed + "\n"


@pytest.mark.parametrize("script", scripts())
def test_a_script_prints_what_its_comments_say(script: str, nano_server: str) -> None:
    said = [line.split("  # ")[1] for line in script.splitlines() if "  # " in line]
    assert run([sys.executable, "-c", script.replace(ADDRESS, nano_server)]).splitlines() == said


def run(command: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
