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
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from kernel_cases import AREAS, KernelCase, MachineRates, Prepared
from peers import Peers
from report import commit

REPLAYS = 21  # of a graph; the figure is their median
GRAPH_US = 400.0  # a graph lasts at least about so long: shorter ones are timed by their start
MOST_LAUNCHES = 96


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


def captured(run: Callable[[int], object], launches: int, copies: int) -> torch.cuda.CUDAGraph:
    """A graph of so many launches, on the copies in turn."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            run(number % copies)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, launches: int, replays: int) -> list[float]:
    """Microseconds of one launch, by replay."""
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / launches)
    return times


def time_us(prepared: Prepared, replays: int = REPLAYS) -> dict[str, float]:
    """Median, least and greatest microseconds of one launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy in range(min(2, prepared.copies)):  # compiles, and fills the allocator's pool
            prepared.run(copy)
    torch.cuda.current_stream().wait_stream(stream)
    launches = max(2, prepared.copies)
    graph = captured(prepared.run, launches, prepared.copies)
    replay_us(graph, launches, 2)
    rough = min(replay_us(graph, launches, 3))
    wanted = min(MOST_LAUNCHES, int(GRAPH_US / rough) + 1)
    if wanted > launches:
        launches = -(-wanted // prepared.copies) * prepared.copies
        graph = captured(prepared.run, launches, prepared.copies)
        replay_us(graph, launches, 3)
    times = replay_us(graph, launches, replays)
    return {"us": statistics.median(times), "least_us": min(times), "most_us": max(times), "launches": launches}


def _copy_rate(device: torch.device) -> float:
    source = torch.ones(1 << 28, device=device)  # 1 GiB: with the target, 36 times the second-level cache
    target = torch.empty_like(source)
    return 1e6 * 2 * source.nbytes / time_us(Prepared(lambda copy: torch.add(source, 1.0, out=target)))["us"]


def machine_rates(device: torch.device) -> MachineRates:
    """bytes/s of an elementwise sum of 1 GiB (read and written), FLOP/s of torch's products 8192^3 in bfloat16 and in
    FP8: the better of its two ways of accumulating."""
    copy_rate = _copy_rate(device)
    size, flops = 8192, 2 * 8192**3
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    wide = time_us(Prepared(lambda copy: torch.mm(left, right.t())))["us"]
    codes, others = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    row, column = torch.ones(size, 1, device=device), torch.ones(1, size, device=device)

    def product(fast: bool) -> Prepared:
        return Prepared(
            lambda copy: torch._scaled_mm(
                codes, others.t(), scale_a=row, scale_b=column, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
        )

    narrow = min(time_us(product(fast))["us"] for fast in (False, True))
    return MachineRates(copy_rate, 1e6 * flops / wide, 1e6 * flops / narrow)


def measured(case: KernelCase, rates: MachineRates, peers: Peers, device: torch.device) -> dict[str, Any]:
    """The line of one case, JSON-ready. "failed" in place of figures where it is wrong or does not run."""
    limit = rates.limit_us(case)
    line: dict[str, Any] = {
        "name": case.name,
        "area": case.area,
        "shape": case.shape,
        "bytes": case.bytes,
        "flops": case.flops,
        "limit_us": round(limit, 2),
        "bound": rates.bound(case),
        "target_us": case.target_us,
        "note": case.note,
    }
    try:
        prepared = case.make(device)
        error = prepared.check()
        line["error"], line["tolerance"] = error, prepared.tolerance
        if error is not None and not error <= prepared.tolerance:
            raise ArithmeticError(f"relative error {error:.2e}, at most {prepared.tolerance:.2e} passes")
        line |= _rounded(time_us(prepared))
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
        figures = _rounded(time_us(peers.prepare(case.peer_key, case.shape, device)))
    except Exception as failure:
        return {**(known or {"us": None, "source": case.peer}), "measured": False, "failed": str(failure)[:200]}
    return {**figures, "source": f"{case.peer_key}, this run", "measured": True, "known_us": case.peer_us}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in figures.items()}


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


def markdown(result: dict[str, Any]) -> str:
    """For docs/performance.md: one table, its heading names machine and commit."""
    g = result["gpu"]
    rates = result["rates"]
    heading = (
        f"{g['name']}, torch {g['torch']}, Triton {g['triton']}, commit {result['commit']}, {result['date'][:10]}. "
        f"Limits from {rates['copy'] / 1e9:,.0f} GB/s, {rates['bf16'] / 1e12:,.0f} (bf16) and "
        f"{rates['fp8'] / 1e12:,.0f} TFLOP/s (FP8), measured in the same run."
    )
    cells = [HEADER, tuple("---" for _ in HEADER), *map(row, result["cases"])]
    return "\n".join([heading, "", *("| " + " | ".join(cell) + " |" for cell in cells)])


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--only", nargs="+", choices=AREAS, default=list(AREAS), metavar="AREA", help=", ".join(AREAS)
    )
    arguments.add_argument("--match", help="only cases whose name has this in it")
    arguments.add_argument("--peers", type=Path, help="folder (or .tar.xz) of peers' kernels, see peers.py")
    arguments.add_argument("--json", type=Path, help="also write the figures to this file, after every case")
    arguments.add_argument("--commit", help="name of the state measured, where there is no repository")
    arguments.add_argument("--list", action="store_true", help="print the cases and run nothing")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    cases, missing = found_cases(options.only)
    cases = [case for case in cases if options.match is None or options.match in case.name]
    for area, reason in missing.items():
        print(f"no cases of {area}: {reason}", file=sys.stderr)
    if options.list:
        for case in cases:
            size = f"{case.bytes / 1e6:10.1f} MB {case.flops / 1e9:10.1f} GFLOP"
            print(f"{case.area:10} {case.name:40} {size}  {case.shape}")
        return
    if not torch.cuda.is_available():
        sys.exit("kernels.py: no CUDA device here (--list shows the cases)")
    device = torch.device("cuda")
    rates = machine_rates(device)
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
        result["cases"].append(measured(case, rates, peers, device))
        print("  ".join(row(result["cases"][-1])), flush=True)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result["cases"]))


if __name__ == "__main__":
    main()
