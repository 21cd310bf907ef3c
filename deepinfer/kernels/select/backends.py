"""Which family of kernels serves a device and a dtype, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from deepinfer.kernels.cpu.build import library
from deepinfer.kernels.cpu.threads import lend_torch_threads

_reference_only = False


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


def explain(device: torch.device, dtype: torch.dtype) -> str:
    """One line for people: what runs here, and why not something faster."""
    if device.type != "cpu":
        return f"reference operations (plain PyTorch) on {device}: GPU kernels are not built yet"
    if dtype != torch.float32:
        return f"reference operations (plain PyTorch): the CPU kernels serve float32, not {dtype}"
    return library().explanation if cpu_twins(device, dtype) else f"reference operations: {library().explanation}"


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
