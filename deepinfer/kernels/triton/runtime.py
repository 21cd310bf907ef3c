"""How kernels are started: on a GPU, in Triton's interpreter on a CPU, or compiled without being run.

Kernels go through `launch` alone. On meta tensors under `compiling()` it compiles what it would run, for sm_90 and
without a GPU, so that a test can look at registers and instructions (tests/kernels/triton).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True in the interpreter, whose bfloat16 `tl.dot` is silently wrong: there, widen operands to float32 first. Inline
PTX does not exist there either: give such a step a plain twin behind this flag."""

NUM_SMS = 132  # of an H200; grids of persistent kernels take it where no device is asked

_compiled: list[Any] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options); nothing for an empty grid."""
    if 0 in grid:
        return
    if _compiled is not None:
        _compiled.append(kernel.warmup(*args, grid=grid, **options))
        return
    kernel[grid](*args, **options)


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Inside, `launch` compiles for sm_90 and runs nothing. Yields the list of what was compiled
    (triton.compiler.CompiledKernel: `metadata`, `asm`). Give operations tensors on the meta device. Not possible in the
    interpreter."""
    global _compiled
    if INTERPRET.value:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted here and cannot be compiled")
    before, _compiled = _compiled, []
    device, driver._active = driver._active, _NoDevice()
    try:
        yield _compiled
    finally:
        driver._active = device
        _compiled = before


class _NoDevice:
    """A driver that only names the target."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def num_sms(x: Tensor) -> int:
    """Streaming multiprocessors of the tensor's device."""
    if x.device.type != "cuda":
        return NUM_SMS
    return torch.cuda.get_device_properties(x.device).multi_processor_count
