"""What a GPU can run of this engine, and why not the rest: for `deepinfer doctor`. Facts that were tried."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

import torch

from deepinfer.env import EnvironmentVariableError
from deepinfer.kernels.cuda import attention
from deepinfer.kernels.select import backends

GIB = 1 << 30
PACKAGE = "deepinfer.kernels.triton"
# What serves a request on Hopper, by module of kernels/triton.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "FP8 products, norms, rotations": ("quantize", "dense", "norm", "rope", "grouped_output"),
    "routed experts in FP4": ("router", "experts", "moe"),
    "sparse attention over packed records": ("attention", "records", "paging"),
    "index scores and choice of entries": ("index_keys", "indexer"),
    "hyper-connections, compressor, Engram": ("hyper", "compressor", "engram"),
    "draws, drafts and their verification": ("sampling", "markov", "verify"),
}
PINNED_TRIAL = 64 << 20
# Of the released model's two tables: (384,006,168 + 384,016,682 rows) x (256 codes + 8 scales).
RELEASED_TABLES = (384_006_168 + 384_016_682) * 264

Fact = tuple[str, str, str]  # what, "ok" | "note" | "no", detail


def facts() -> Iterator[Fact]:
    """Device by device, then what they share."""
    yield triton_fact()
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "no device is visible to the driver" if built else "this torch was built without CUDA"
        yield "cuda", "note", f"not available, {why}; device=cpu works, with float32 kernels where a compiler is found"
        yield "gpu kernels", "note", f"not used here: {why}; made for Hopper ({len(OPERATIONS)} groups, bfloat16)"
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        problem = backends.gpu_problem(device)
        yield device_fact(index, torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)[0], problem)
        if problem is None:
            yield from kernel_facts(device)
            yield cuda_fact(device)
    yield pinned_fact(memory_of_host())


def triton_fact() -> Fact:
    try:
        return "triton", "ok", f"{metadata.version('triton')}: compiles the GPU kernels, interprets them in tests"
    except metadata.PackageNotFoundError:
        needed = torch.cuda.is_available()
        detail = "not installed; GPU kernels need it: pip install 'deepinfer[gpu]'"
        return "triton", "no" if needed else "note", detail if needed else f"{detail}; a CPU misses nothing"


def device_fact(index: int, properties: Any, free: int, problem: str | None) -> Fact:
    """properties: torch.cuda.get_device_properties. problem: why the kernels do not run there, None if they do."""
    detail = (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} SMs, {properties.total_memory / GIB:.0f} GiB ({free / GIB:.0f} free)"
    )
    if problem is None:
        return f"cuda:{index}", "ok", f"{detail}; bfloat16 runs the GPU kernels, float32 plain PyTorch"
    return f"cuda:{index}", "note", f"{detail}; plain PyTorch runs here, slowly. The GPU kernels do not: {problem}"


def kernel_facts(device: torch.device) -> Iterator[Fact]:
    """A kernel is compiled and run; then every group whose modules are there."""
    failed = trial(device)
    if failed is not None:
        yield "gpu kernels", "no", f"a small one could not be compiled and run: {failed}"
        return
    for name, modules in OPERATIONS.items():
        missing = [reason for module in modules if (reason := _import_problem(module)) is not None]
        yield "gpu kernels", "no" if missing else "ok", f"{name}{': ' if missing else ''}{'; '.join(missing)}"


def cuda_fact(device: torch.device) -> Fact:
    """Whether the kernels in CUDA C++ could be built and loaded, by which compiler, and if not why."""
    try:
        problem = attention.problem(device)
    except EnvironmentVariableError as error:
        return "cuda c++", "note", f"not tried: {error}"
    if problem is not None:
        return "cuda c++", "note", f"sparse attention runs in Triton, slower: {' '.join(problem.split())}"
    return "cuda c++", "ok", f"sparse attention, {attention.SERVED}, built by {attention.compiler()}"


def trial(device: torch.device) -> str | None:
    """Why a norm of a few rows cannot be had, None if it can: compiler, assembler and driver take part in it."""
    try:
        norm = import_module(f"{PACKAGE}.norm")
        x = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
        y = norm.rms_norm(x, torch.full((256,), 2.0, device=device), 1e-6)
        wrong = float((y.float() - 2.0).abs().max())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"[:300]
    return None if wrong < 0.02 else f"it is off by {wrong:g}"


def _import_problem(module: str) -> str | None:
    try:
        import_module(f"{PACKAGE}.{module}")
    except Exception as error:
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


def pinned_fact(host_bytes: int) -> Fact:
    """Whether the device can read host memory directly, as it does Engram's rows."""
    try:
        torch.empty(PINNED_TRIAL, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return "pinned memory", "no", f"cannot be had ({reason}); Engram's rows are gathered by the host instead"
    fits = host_bytes > RELEASED_TABLES * 1.1
    detail = (
        f"works; the released model's Engram tables take {RELEASED_TABLES / GIB:.0f} GiB of the host's "
        f"{host_bytes / GIB:.0f} GiB"
    )
    return "pinned memory", "ok", detail if fits else f"{detail}: too little to lock, their rows are read from disk"


def memory_of_host() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
