"""The figures of a run as a table for people and as JSON for programs."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from deepinfer import __version__
from deepinfer.bench.figures import Figures, Spread
from deepinfer.bench.load import Record


def table(figures: Figures, title: str) -> RenderableType:
    """For a rich console."""
    times = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    times.add_column("")
    for name in ("P50", "P95", "P99", "mean", "max"):
        times.add_column(name, justify="right", min_width=9)
    for name, spread in (
        ("first token (TTFT)", figures.ttft),
        ("between tokens (TBT)", figures.tbt),
        ("between arrivals", figures.gap),
        ("whole answer", figures.latency),
    ):
        times.add_row(name, *(_time(value) for value in _values(spread)))
    times.add_row("tokens/s of one user", *(_number(value) for value in _values(figures.user_speed)))

    totals = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _totals(figures):
        totals.add_row(name, value)
    return Group(times, "", totals)


def _totals(figures: Figures) -> list[tuple[str, str]]:
    answered = f"{figures.answered} of {figures.requests}"
    if figures.errors:
        answered += "; " + ", ".join(f"{count} x {name}" for name, count in figures.errors.items())
    thinking = f", {figures.reasoning_tokens:,} of them thinking" if figures.reasoning_tokens else ""
    rows = [
        ("answered", answered),
        ("time", f"{figures.seconds:.2f} s, {figures.request_rate:.2f} answers/s"),
        ("output", f"{figures.output_tokens:,} tokens{thinking}; {figures.output_rate:,.1f} tokens/s"),
        ("prompts", f"{figures.prompt_tokens:,} tokens; {figures.cached_share:.1%} of them from the prefix cache"),
    ]
    if figures.drafts is not None:
        drafts = figures.drafts
        text = f"{drafts.accepted_per_round:.2f} accepted a round, {drafts.accepted_share:.1%} of those verified"
        rows.append(("drafts", text + " (whole server)"))
    return rows


def as_json(figures: Figures, records: list[Record], setting: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    """setting: how it was asked. server: what answered. Times in seconds."""
    return {
        "kind": "deepinfer bench",
        "setting": setting,
        "server": server,
        "client": {
            "deepinfer": __version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "figures": figures.as_json(),
        "requests": [asdict(record) for record in records],
    }


def _values(spread: Spread) -> tuple[float, ...]:
    return spread.p50, spread.p95, spread.p99, spread.mean, spread.max


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.1f}"
