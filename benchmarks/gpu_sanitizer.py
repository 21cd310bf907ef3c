"""compute-sanitizer over one small run of every family of GPU kernels: memcheck, and racecheck for the small ones, or
synccheck where racecheck reports what is right.

    python benchmarks/gpu_sanitizer.py                      # everything: minutes, most of them compilation
    python benchmarks/gpu_sanitizer.py --family records --family dense --tool memcheck
    python benchmarks/gpu_sanitizer.py --json sanitizer.json

Each family is a few tests of tests/kernels/gpu, at the small shapes that they have, in a process of its own under the
tool. PyTorch's caching allocator is off there: inside one of its large blocks memcheck sees no access that is out of
bounds; and 64 bytes of padding lie behind every allocation. Families run side by side (`--jobs`), because most of the
time goes to compilers. Prints a line a family and exits 1 where something was found or a test failed, 2 where the tool
does not work on this machine: some virtual machines do not let it at the device.

Known limits: racecheck looks at shared memory alone and knows nothing of accesses through the tensor memory
accelerator. An arrival at an mbarrier counts for the arriving lane only (2025.3.1): where __syncwarp and one lane's
arrival stand for a warp, it reports the other lanes' accesses, though the order is right; where every lane arrives, it
reports none, of asynchronous copies either. Attention in CUDA C++ arrives by one lane, so it has synccheck instead,
which does not look for races. What torch's own kernels do in the references is checked along with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 77  # exit code of the tool where it has findings
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


@dataclass(frozen=True)
class Family:
    """file: of tests/kernels/gpu, without test_ and .py. tests: pytest's -k. small: for racecheck, too. mbarriers: one
    lane arrives at them for its warp, so synccheck in place of racecheck."""

    file: str
    tests: str
    small: bool = False
    mbarriers: bool = False

    def takes(self, tool: str) -> bool:
        return {"memcheck": True, "racecheck": self.small, "synccheck": self.mbarriers}[tool]


FAMILIES = {
    "quantize": Family("triton_quantize", "codes_and_scales or norms or rotations", small=True),
    "dense": Family(
        "triton_dense", "products_of_any_shape or parts_of_a_cut or heads_are_turned or queries_leave", small=True
    ),
    "records": Family("triton_records", "reference_s_bytes or many_random", small=True),
    "paging": Family("triton_paging", "rows_of or staged or histories", small=True),
    "attention": Family(
        "triton_attention", "attention_is_the_reference_s or unpacked_keys or rows_without_keys", small=True
    ),
    "cuda_attention": Family("cuda_attention", "rows_without_keys or window_scales", mbarriers=True),
    "router": Family("triton_router", "choice_weights or ties", small=True),
    "experts": Family("triton_experts", "mixture_equals or plan_sorts or plan_of_one or products_are_right"),
    "indexer": Family("triton_indexer", "scores_equal or candidates_limit or inserted_keys or rotated_quantised"),
    "index_select": Family("triton_index_select", "chosen_entries"),
    "index_exact": Family("triton_index_exact", "from_end_to_end"),
    "invariant": Family("triton_invariant", "row_of_a_product or parts_are_summed or plain_index", small=True),
    "replicas": Family("triton_replicas", "windows_below", small=True),
    "hyper": Family("triton_hyper", "step_equals or expand_and_collapse"),
    "engram": Family("triton_engram", "injection or hashes or folded_rows", small=True),
    "compressor": Family("triton_compressor", "pooled_pairs or long_chunk", small=True),
    "sampling": Family("triton_sampling", "any_vocabulary or every_kind or flat_row"),
    "drafting": Family("triton_drafting", "greedy_chains or rows_of_a_round or verdict or which_drafts", small=True),
}


def tool_path() -> str | None:
    return shutil.which("compute-sanitizer") or next(
        (str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer")) if path.exists()), None
    )


def command(sanitizer: str, tool: str, family: Family) -> list[str]:
    own = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    if tool == "memcheck":
        own += ["--padding", "64"]
    test = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    return [*own, *test, f"tests/kernels/gpu/test_{family.file}.py", "-k", family.tests]


def judge(code: int, output: str) -> tuple[str, int]:
    """In a word what a run says, and how many findings: clean, found, failed (a test), refused (the tool)."""
    findings = sum(int(a or b) for a, b in SUMMARY.findall(output))
    if "not supported" in output and "passed" not in output:
        return "refused", 0
    if code == FOUND or findings:
        return "found", findings
    if code == 0 and "passed" in output and SUMMARY.search(output):
        return "clean", 0
    return "failed", 0


def check(sanitizer: str, tool: str, name: str, limit: float) -> dict[str, Any]:
    began = time.perf_counter()
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    try:
        done = subprocess.run(
            command(sanitizer, tool, FAMILIES[name]),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
        )
        output, (verdict, findings) = done.stdout, judge(done.returncode, done.stdout)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        verdict, findings = "timeout", 0
    seconds = round(time.perf_counter() - began, 1)
    told = "" if verdict == "clean" else output[-4000:]
    return {"family": name, "tool": tool, "verdict": verdict, "findings": findings, "seconds": seconds, "output": told}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only this one; may be repeated")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all, where they fit")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=600, help="seconds for one family under one tool")
    parser.add_argument("--json", type=Path, help="write the results here")
    asked = parser.parse_args()
    sanitizer = tool_path()
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        return 2
    named = asked.tool and asked.family  # then this is what is wanted, whether it fits or not
    work = [
        (tool, name)
        for tool in asked.tool or TOOLS
        for name in asked.family or FAMILIES
        if named or FAMILIES[name].takes(tool)
    ]
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = list(pool.map(lambda one: check(sanitizer, one[0], one[1], asked.limit), work))
    for one in results:
        print("{tool:<10} {family:<14} {verdict:<8} {findings:>4} findings {seconds:>7} s".format(**one))
        if one["output"]:
            print(one["output"])
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    verdicts = {one["verdict"] for one in results}
    if verdicts == {"clean"}:
        return 0
    return 2 if verdicts <= {"clean", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
