"""Which family of kernels serves a device and a dtype, and what is said about it.

The GPU kernels are Triton's, which is imported where they run for the first time: elsewhere it may be missing. Some
have a twin in CUDA C++ (`kernels/cuda`), which stands in where it could be built.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.cpu.build import library
from deepinfer.kernels.cpu.threads import lend_torch_threads
from deepinfer.kernels.cuda import attention as cuda_attention

_reference_only = False
_interpreted = False


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, every operation runs its reference: for comparisons."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def cpu_twins(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether float32 CPU kernels serve this device and dtype. The first question may compile them."""
    return device.type == "cpu" and dtype == torch.float32 and not _reference_only and library().handle is not None


def gpu_twins(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the GPU kernels serve this device and dtype."""
    if dtype != torch.bfloat16 or _reference_only:
        return False
    return _interpreted if device.type == "cpu" else gpu_problem(device) is None


@cache
def gpu_problem(device: torch.device) -> str | None:
    """Why the GPU kernels do not run on a device, None if they do."""
    if device.type != "cuda":
        return f"they are made for CUDA devices, not for {device.type}"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"they are made for Hopper (compute capability 9.0), not for {major}.{minor}"
    return None if importlib.util.find_spec("triton") else "they need Triton (pip install 'deepinfer[gpu]')"


def gpu() -> Any:
    """`kernels.gpu_ops`, the module of the GPU kernels."""
    from deepinfer.kernels import gpu_ops

    return gpu_ops


@contextmanager
def interpreted_gpu() -> Iterator[None]:
    """Inside, the GPU kernels serve bfloat16 on a CPU, in Triton's interpreter: for tests at tiny shapes."""
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


def explain(device: torch.device, dtype: torch.dtype) -> str:
    """One line for people: what runs here, and why not something faster. Builds what has to be built to know it: not
    inside the capture of a graph."""
    if device.type != "cpu":
        if gpu_twins(device, dtype):
            return _explain_gpu(device)
        reason = f"the GPU kernels serve bfloat16, not {dtype}" if dtype != torch.bfloat16 else gpu_problem(device)
        return f"reference operations (plain PyTorch) on {device}: {reason}"
    if dtype != torch.float32:
        return f"reference operations (plain PyTorch): the CPU kernels serve float32, not {dtype}"
    return library().explanation if cpu_twins(device, dtype) else f"reference operations: {library().explanation}"


def _explain_gpu(device: torch.device) -> str:
    name, problem = torch.cuda.get_device_name(device), cuda_attention.problem(device)
    if problem is None:
        return f"GPU kernels in Triton, attention of {cuda_attention.SERVED} in CUDA C++, on {name}"
    # the whole of a compiler's complaint is in the log
    return f"GPU kernels in Triton on {name}; not in CUDA C++: {textwrap.shorten(problem, 200, placeholder=' ...')}"


@contextmanager
def step_threads(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Around a forward pass: the CPU kernels, where they serve it, get all of torch's threads."""
    with lend_torch_threads() if cpu_twins(device, dtype) else nullcontext():
        yield


def cpu_fast(x: Tensor, multiple: int = 8) -> bool:
    return x.shape[-1] % multiple == 0 and cpu_twins(x.device, x.dtype)


def whole_numbers(x: Tensor) -> bool:
    """CPU twins that only count serve every dtype of the model, where they are not switched off."""
    return cpu_twins(x.device, torch.float32)


def gpu_fast(x: Tensor) -> bool:
    return gpu_twins(x.device, x.dtype)


def gpu_numbers(x: Tensor) -> bool:
    """GPU twins that only count serve every dtype of the model, where they are not switched off."""
    return gpu_twins(x.device, torch.bfloat16)
