"""Tables of docs/performance.md from the JSON of runs on a GPU (benchmarks/results).

    python benchmarks/hopper_page.py [--results benchmarks/results] [--page docs/performance.md]

kernels_*.json: by `kernels.py --json`; a case that stands in several files is taken from the newest. rank_share_*.json:
by `deepinfer bench --rank-share ep=N --json`, one table each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_cases import AREAS
from kernels import row
from report import ROOT, replace_between

MARKS = {name: (f"<!-- {name}: begin -->", f"<!-- {name}: end -->") for name in ("kernels", "rank-share")}
HEADER = ("kernel", "us", "limit", "times limit", "bound by", "GB/s", "TFLOP/s", "error", "target", "peer")


def read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The oldest first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(pattern))]
    return sorted(found, key=lambda result: result["date"])


def newest_cases(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lines by area, each with the run that it is from."""
    found: dict[str, dict[str, dict[str, Any]]] = {area: {} for area in AREAS}
    for result in results:
        for line in result["cases"]:
            found[line["area"]][line["name"]] = line | {"run": result}
    return {area: list(lines.values()) for area, lines in found.items() if lines}


def kernels_markdown(results: Sequence[dict[str, Any]]) -> str:
    out = []
    for area, lines in newest_cases(results).items():
        out += [f"**{area.capitalize()}.** {'; '.join(dict.fromkeys(source(line['run']) for line in lines))}", ""]
        out += ["| " + " | ".join(HEADER) + " |", "|---" + "|---:" * (len(HEADER) - 1) + "|"]
        out += ["| " + " | ".join(row(line)) + " |" for line in lines]
        out.append("")
    return "\n".join(out).rstrip() or "No run yet."


def source(result: dict[str, Any]) -> str:
    """Where, when and beside which limits."""
    gpu, rates = result["gpu"], result["rates"]
    return (
        f"{gpu['name']}, torch {gpu['torch']}, Triton {gpu['triton']}, commit {result['commit']}, "
        f"{result['date'][:10]}; "
        f"limits from {rates['copy'] / 1e9:,.0f} GB/s, {rates['bf16'] / 1e12:,.0f} TFLOP/s (bf16) and "
        f"{rates['fp8'] / 1e12:,.0f} (FP8) of the same run"
    )


def rank_markdown(results: Sequence[dict[str, Any]]) -> str:
    """A table per run, and where a decode step's time goes."""
    out: list[str] = []
    for result in results:
        share, decode, kv = result["share"], result["decode"], result["kv"]
        out += [
            f"One rank of {share['ep']}, {share['preset']} with {result['layers']} layers and {result['experts']} "
            f"experts a layer, {share['sequences']} sequences of {share['context']:,} tokens, {share['nextn']} drafts, "
            f"{share['dtype']}, records {kv['format']} at {kv['bytes_per_token']:,.1f} bytes a token; "
            f"{result['device']}, {built(result)}, {result['date'][:10]}.",
            "",
            "| | time | floor | times floor | rate |",
            "|---|---:|---:|---:|---|",
            f"| decode step of {decode['rows']:g} rows | {decode['step_ms']:.2f} ms | {decode['floor_ms']:.2f} ms | "
            f"{decode['of_floor']:.2f} | {accept_rates(decode['tokens_per_s'])} |",
        ]
        forward = decode["forward"]
        out.append(
            f"| its forward pass alone | {forward['ms']:.2f} ms | {forward['floor_ms']:.2f} ms | "
            f"{forward['of_floor']:.2f} | |"
        )
        for line in result.get("prefill", ()):
            which = f"decoder on the last {share['keep_tokens']}" if line["narrowed"] else "all layers"
            out.append(
                f"| prefill, {line['tokens']:,} tokens, {which} | {line['ms']:.1f} ms | {line['floor_ms']:.1f} ms | "
                f"{line['of_floor']:.2f} | {line['tokens_per_s']:,.0f} tokens/s, "
                f"{line['share_of_fp8_rate']:.0%} of the FP8 matrix rate |"
            )
        if decode["device"] is not None:
            busy = decode["device"]
            out += ["", f"The device: {busy['busy_ms']:.2f} ms busy a step, idle {busy['idle_share']:.1%}."]
        floors = ", ".join(f"{name} {part['ms']:.2f}" for name, part in decode["floor_parts"].items())
        out += ["", f"Floor of the decode step in ms: {floors}.", ""]
    if not out:
        return "No run yet."
    return "\n".join([*out, "Left out:", "", *(f"- {what}" for what in results[-1]["left_out"])])


def built(result: dict[str, Any]) -> str:
    """The state of the program: a commit where whoever ran it has written one into the file."""
    return f"commit {result['commit']}" if "commit" in result else f"version {result['version']}"


def accept_rates(rates: dict[str, float]) -> str:
    named = [f"{value:,.0f} at {'all accepted' if name == 'all' else name}" for name, value in rates.items()]
    return f"tokens/s by accept length: {', '.join(named)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args(argv)
    replace_between(options.page, *MARKS["kernels"], kernels_markdown(read(options.results, "kernels_*.json")))
    replace_between(options.page, *MARKS["rank-share"], rank_markdown(read(options.results, "rank_share*.json")))


if __name__ == "__main__":
    main()
