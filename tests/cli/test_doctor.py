"""What doctor says of GPUs, on machines that this one is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepinfer.cli.doctor import examine
from deepinfer.kernels import gpu_report
from deepinfer.model.footprint import fits
from deepinfer.model.presets import preset

GIB = 1 << 30
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 * GIB)
CPU = torch.device("cpu")


def test_a_hopper_gpu_runs_the_kernels() -> None:
    what, state, detail = gpu_report.device_fact(0, H200, 139 * GIB, None)
    assert (what, state) == ("cuda:0", "ok")
    assert "capability 9.0" in detail and "140 GiB (139 free)" in detail and "GPU kernels" in detail


def test_another_gpu_is_told_why_not() -> None:
    other = SimpleNamespace(**{**vars(H200), "name": "A100", "major": 8})
    _, state, detail = gpu_report.device_fact(1, other, 0, "they are made for Hopper, not for 8.0")
    assert state == "note" and "do not: they are made for Hopper" in detail


def test_a_cpu_machine_promises_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {finding.what: finding for finding in examine()}
    assert found["cuda"].state == found["gpu kernels"].state == "note"
    assert "not used here" in found["gpu kernels"].detail
    assert "pinned memory" not in found


def test_every_kernel_module_that_is_named_exists() -> None:
    folder = Path(gpu_report.__file__).parent / "triton"
    named = {module for modules in gpu_report.OPERATIONS.values() for module in modules}
    assert {module for module in named if not (folder / f"{module}.py").is_file()} == set()


def test_a_kernel_that_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("first line\nptxas was not found")

    monkeypatch.setattr(gpu_report, "import_module", broken)
    assert gpu_report.trial(CPU) == "RuntimeError: ptxas was not found"
    ((what, state, detail),) = gpu_report.kernel_facts(CPU)
    assert (what, state) == ("gpu kernels", "no") and "ptxas was not found" in detail


def test_kernel_groups_are_named_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "trial", lambda device: None)
    monkeypatch.setattr(gpu_report, "OPERATIONS", {"fine": ("norm",), "broken": ("norm", "no_such_module")})
    fine, broken = gpu_report.kernel_facts(CPU)
    assert fine == ("gpu kernels", "ok", "fine")
    assert broken[1] == "no" and "no_such_module cannot be imported" in broken[2]


def test_size_of_the_released_tables() -> None:
    assert fits(preset("flash"), 100 * GIB, [8])[0].host_bytes == gpu_report.RELEASED_TABLES


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*size: int, **options: object) -> torch.Tensor:
        raise RuntimeError("no driver\ntrace")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", refuse)
        assert gpu_report.pinned_fact(GIB)[1:] == (
            "no",
            "cannot be had (no driver); Engram's rows are gathered by the host instead",
        )
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    assert "too little to lock" in gpu_report.pinned_fact(128 * GIB)[2]
    assert "too little" not in gpu_report.pinned_fact(512 * GIB)[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_serves_on_this_gpu() -> None:
    found = list(gpu_report.facts())
    assert [fact for fact in found if fact[1] == "no"] == []
    assert sum(fact[0] == "gpu kernels" for fact in found) == len(gpu_report.OPERATIONS)
