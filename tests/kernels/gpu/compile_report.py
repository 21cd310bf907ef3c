"""Compiles what the modules named on the command line list, for sm_90 and without a GPU; prints JSON. Run as a script,
without TRITON_INTERPRET: `test_triton_compile.py` does.

Each module has CASES: name -> function that calls an operation on meta tensors. Result: {module: {"cases": {case:
[kernel, ...]}, "wgmma": ..., "stack": ...}} with a kernel's name, registers, stack and shared bytes, and whether its
PTX has wgmma, or "what went wrong" in place of kernels; and what the module says of its cases (WGMMA, STACK).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def cuobjdump() -> Path | None:
    """The disassembler that Triton brings along; None where it does not."""
    import triton

    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return found if found.exists() else None


def resources(cubin: bytes, tool: Path) -> tuple[int, int, int]:
    """Registers a thread, stack bytes a thread (0: nothing is spilled) and static shared bytes of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = USAGE.search(done.stdout)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of its resources: {done.stdout[-300:]} {done.stderr[-300:]}")
    registers, stack, shared = map(int, found.groups())
    return registers, stack, shared


def compiled_case(job: tuple[str, str]) -> tuple[str, str, Any]:
    """module, case -> the same, and its kernels or what went wrong."""
    module, case = job
    from deepinfer.kernels.triton.runtime import compiling

    tool = cuobjdump()
    assert tool is not None
    try:
        # What a kernel prints while it is compiled must not end in the report.
        with contextlib.redirect_stdout(sys.stderr), compiling() as kernels:
            importlib.import_module(module).CASES[case]()
    except Exception as error:
        return module, case, f"{type(error).__name__}: {error}"[-2000:]
    found = {}
    for kernel in kernels:
        registers, stack, _ = resources(kernel.asm["cubin"], tool)
        name, shared = kernel.metadata.name, kernel.metadata.shared
        wgmma = "wgmma.mma_async" in kernel.asm["ptx"]
        found[kernel.metadata.hash] = {
            "name": name, "registers": registers, "stack": stack, "shared": shared, "wgmma": wgmma
        }  # fmt: skip
    return module, case, list(found.values())


def main(modules: list[str]) -> None:
    report: dict[str, dict[str, Any]] = {}
    for module in modules:
        found = importlib.import_module(module)
        wgmma, stack = sorted(getattr(found, "WGMMA", ())), getattr(found, "STACK", {})
        report[module] = {"cases": dict.fromkeys(found.CASES), "wgmma": wgmma, "stack": stack}
    jobs = [(module, case) for module in modules for case in report[module]["cases"]]
    # The compiler runs in the process itself: children side by side, forked after the slow imports.
    with multiprocessing.get_context("fork").Pool(min(16, os.cpu_count() or 1)) as pool:
        for module, case, kernels in pool.imap_unordered(compiled_case, jobs, chunksize=1):
            report[module]["cases"][case] = kernels
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
