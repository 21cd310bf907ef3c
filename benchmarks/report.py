"""What results of benchmarks have in common: where they were measured, and their place on a page."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine_limits import cpu_model

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str | None:
    """The commit, with + when tracked files differ from it; None outside a repository."""
    git = ("git", "-C", str(ROOT))
    try:
        done = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True)
    except OSError:
        return None
    return done.stdout.strip() + "+" * (changed.returncode == 1) if done.returncode == 0 else None


def machine(load_before: float) -> dict[str, Any]:
    """load_before: the load average before anything was measured."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_before": round(load_before, 2),
    }


def heading(result: dict[str, Any]) -> str:
    m = result["machine"]
    return (
        f"{result['model']}, {result['dtype']}, commit {result['commit']}, {result['date'][:10]}: {m['cpu']}, "
        f"{m['threads']} of {m['cores']} cores, torch {m['torch']}, load before {m['load_before']}"
        f"{', QUICK: too few steps to publish' if result['quick'] else ''}"
    )


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Puts a text between two marks of a page; ValueError if it has none."""
    content = page.read_text(encoding="utf-8")
    head, opening, rest = content.partition(begin)
    _, closing, tail = rest.partition(end)
    if not opening or not closing:
        raise ValueError(f"{page} has no {begin} ... {end}")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def obtain(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    marks: tuple[str, str],
) -> dict[str, Any]:
    """The result of --input, or a new one; in the file of --output and between the marks of the page of --markdown."""
    result = json.loads(options.input.read_text(encoding="utf-8")) if options.input else measure(options)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        replace_between(options.markdown, *marks, markdown(result))
    return result
