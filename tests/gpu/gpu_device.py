"""Where the tests of this folder run: on a CUDA device, or nowhere.

GPU_TESTS_ON_CPU=1 runs on a CPU what a CPU can run of them, to see that a test works before a GPU is asked.
"""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TRIED_ON_CPU = not CUDA and os.environ.get("GPU_TESTS_ON_CPU") == "1"

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA and not TRIED_ON_CPU, reason="needs a CUDA device"),
]
"""For `pytestmark`: what a CPU can try, too."""

cuda_alone = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def _twins_problem() -> str | None:
    if not CUDA:
        return "needs a CUDA device"
    from deepinfer.kernels.select.backends import gpu_problem

    return gpu_problem(torch.device("cuda", 0))


_problem = _twins_problem()
twins_alone = [pytest.mark.gpu, pytest.mark.skipif(_problem is not None, reason=f"the GPU kernels: {_problem}")]
"""For tests of the Triton kernels on a Hopper GPU."""


def free_gpu() -> None:
    """Gives back what nobody holds, so that what a test before has left says nothing about this one."""
    import gc

    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
