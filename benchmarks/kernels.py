"""Times the GPU kernels one by one, beside what this GPU allows and beside other people's kernels.

    python benchmarks/kernels.py [--only dense ...] [--match 64x] [--peers DIR] [--json FILE] [--list]

First this GPU's own rates, in the same process. Then each case: checked (poisoned outputs against the reference), and
timed: a CUDA graph of some launches over rotated inputs, the median of at least 20 replays. A case that is wrong or
does not run has no time. Cases come from the modules `kernels_<area>.py` beside this file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from kernel_cases import AREAS, KernelCase, Prepared, bound, limit_us
from peers import Peers
from report import commit

from deepinfer.bench.output import unwritable
from deepinfer.kernels.timing import Rates, measured_rates, time_launches


def found_cases(areas: Sequence[str] = AREAS) -> tuple[list[KernelCase], dict[str, str]]:
    """All cases of these areas, and why an area has none."""
    cases: list[KernelCase] = []
    missing = {}
    for area in areas:
        try:
            cases += importlib.import_module(f"kernels_{area}").cases()
        except ImportError as error:
            missing[area] = str(error)
    return cases, missing


def time_us(prepared: Prepared, device: torch.device) -> dict[str, float]:
    """Median, least and greatest microseconds of one launch."""
    time = time_launches(prepared.run, prepared.copies, device)
    return {"us": round(time.us, 2), "least_us": round(time.least_us, 2), "most_us": round(time.most_us, 2)}


def checked(case: KernelCase, device: torch.device) -> str:
    """Builds and checks a case and times nothing; what came of it. Compiles everything that timing it would."""
    try:
        prepared = case.make(device)
        error = prepared.check()
        prepared.run(0)
        torch.cuda.synchronize()
    except Exception as failure:
        return f"FAILED {type(failure).__name__}: {failure}"[:400]
    finally:
        _release()
    if error is None:
        return "nothing to compare"
    return f"{'fine' if error <= prepared.tolerance else 'WRONG'}: {error:.2e}, at most {prepared.tolerance:.2e}"


def measured(case: KernelCase, rates: Rates, peers: Peers, device: torch.device) -> dict[str, Any]:
    """The line of one case, JSON-ready. "failed" in place of figures where it is wrong or does not run."""
    limit = limit_us(case, rates)
    line: dict[str, Any] = {
        "name": case.name,
        "area": case.area,
        "shape": case.shape,
        "bytes": case.bytes,
        "flops": case.flops,
        "limit_us": round(limit, 2),
        "bound": bound(case, rates),
        "target_us": case.target_us,
        "note": case.note,
    }
    try:
        prepared = case.make(device)
        error = prepared.check()
        line["error"] = error if error is not None and math.isfinite(error) else None  # JSON has no other numbers
        line["tolerance"] = prepared.tolerance if math.isfinite(prepared.tolerance) else None
        if error is not None and not error <= prepared.tolerance:
            raise ArithmeticError(f"relative error {error:.2e}, at most {prepared.tolerance:.2e} passes")
        line |= time_us(prepared, device)
        line["of_limit"] = round(line["us"] / limit, 3)
        line["gb_per_s"] = round(case.bytes / line["us"] / 1e3)
        line["tflop_per_s"] = round(case.flops / line["us"] / 1e6, 1)
        del prepared
    except Exception as failure:
        line["failed"] = f"{type(failure).__name__}: {failure}"[:400]
    line["peer"] = peer_line(case, peers, device)
    _release()
    return line


def peer_line(case: KernelCase, peers: Peers, device: torch.device) -> dict[str, Any] | None:
    """The peer's figure: measured in this run, or known from before, or None."""
    known = {"us": case.peer_us, "source": case.peer, "measured": False} if case.peer_us is not None else None
    if case.peer_key is None:
        return known
    try:
        _release()
        figures = time_us(peers.prepare(case.peer_key, case.shape, device), device)
    except Exception as failure:
        return {**(known or {"us": None, "source": case.peer}), "measured": False, "failed": str(failure)[:200]}
    return {**figures, "source": f"{case.peer_key}, this run", "measured": True, "known_us": case.peer_us}


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


HEADER = ("case", "us", "limit", "x", "bound", "GB/s", "TFLOP/s", "error", "target", "peer")


def row(line: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a case."""
    peer = line.get("peer") or {}
    beside = "-" if peer.get("us") is None else f"{peer['us']:.1f}{'' if peer['measured'] else ' (known)'}"
    target = "-" if line["target_us"] is None else f"{line['target_us']:g}"
    if "failed" in line:
        return (line["name"], "FAILED", f"{line['limit_us']:.1f}", "-", line["bound"], "-", "-", "-", target, beside)
    error = "-" if line["error"] is None else f"{line['error']:.1e}"
    figures = (f"{line['us']:.1f}", f"{line['limit_us']:.1f}", f"{line['of_limit']:.2f}", line["bound"])
    speeds = (f"{line['gb_per_s']:,}", f"{line['tflop_per_s']:.0f}" if line["flops"] else "-")
    return (line["name"], *figures, *speeds, error, target, beside)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """For a terminal; the failures' reasons under it."""
    cells = [HEADER, *map(row, lines)]
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(HEADER))]
    out = [
        "  ".join(
            text.rjust(width) if n else text.ljust(width)
            for n, (text, width) in enumerate(zip(cell, widths, strict=True))
        )
        for cell in cells
    ]
    out += [f"{line['name']}: {line['failed']}" for line in lines if "failed" in line]
    out += [f"{line['name']}, peer: {line['peer']['failed']}" for line in lines if "failed" in (line.get("peer") or {})]
    return "\n".join(out)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--only", nargs="+", choices=AREAS, default=list(AREAS), metavar="AREA", help=", ".join(AREAS)
    )
    arguments.add_argument("--match", help="only cases whose name has this in it")
    arguments.add_argument("--peers", type=Path, help="folder (or .tar.xz) of peers' kernels, see peers.py")
    arguments.add_argument(
        "--few-peers", action="store_true", help="peers only where a target or a known figure stands; some compile long"
    )
    arguments.add_argument("--check", action="store_true", help="check every case and time nothing")
    arguments.add_argument("--json", type=Path, help="also write the figures to this file, after every case")
    arguments.add_argument("--commit", help="name of the state measured, where there is no repository")
    arguments.add_argument("--list", action="store_true", help="print the cases and run nothing")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    if options.json is not None and (reason := unwritable(options.json)):
        parser().error(f"--json: {reason}")
    found, missing = found_cases(options.only)
    for area, reason in missing.items():
        print(f"no cases of {area}: {reason}", file=sys.stderr)
    cases = [case for case in found if options.match is None or options.match in case.name]
    if options.match is not None and not cases:
        names = "".join(f"\n  {case.name}" for case in found)
        parser().error(
            f"--match: no case of {', '.join(options.only)} has {options.match!r} in its name; there is{names}"
        )
    if options.list:
        for case in cases:
            size = f"{case.bytes / 1e6:10.1f} MB {case.flops / 1e9:10.1f} GFLOP"
            print(f"{case.area:10} {case.name:40} {size}  {case.shape}")
        return
    if not torch.cuda.is_available():
        sys.exit("kernels.py: no CUDA device here (--list shows the cases)")
    device = torch.device("cuda")
    if options.check:
        for case in cases:
            print(f"{case.name}: {checked(case, device)}", flush=True)
        return
    rates = measured_rates(device)
    print(
        f"copy {rates.copy / 1e9:,.0f} GB/s, bf16 {rates.bf16 / 1e12:,.0f}, FP8 {rates.fp8 / 1e12:,.0f} TFLOP/s",
        flush=True,
    )
    peers = Peers(options.peers)
    result: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "commit": options.commit or commit(),
        "gpu": {
            "name": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": importlib.import_module("triton").__version__,
        },
        "rates": {"copy": rates.copy, "bf16": rates.bf16, "fp8": rates.fp8},
        "cases": [],
    }
    for case in cases:
        if options.few_peers and case.target_us is None and case.peer_us is None:
            case = replace(case, peer_key=None)
        result["cases"].append(measured(case, rates, peers, device))
        print("  ".join(row(result["cases"][-1])), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(table(result["cases"]))


if __name__ == "__main__":
    main()
