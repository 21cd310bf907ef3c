"""How kernels in CUDA C++ are launched: by a driver that only takes notes, and on a GPU, where a small kernel runs."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import small_kernel
import torch
from small_kernel import PARAMS, SHARED, THREADS

from deepinfer.kernels import gpu_report
from deepinfer.kernels.cuda import attention, driver
from deepinfer.kernels.cuda.build import built
from deepinfer.kernels.cuda.driver import CudaError, Kernel

WITHOUT = not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(WITHOUT, reason="needs a Hopper GPU")(test))


class FakeDriver:
    """Takes what it is given and keeps a copy of every launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[driver.Config, dict[int, tuple[int, ...]], bytes]] = []
        self.refuses = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == "cuFuncLoad":
            raise AttributeError  # as a driver before CUDA 12.4
        return lambda *arguments: 0

    def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:  # type: ignore[no-untyped-def]
        copy = driver.Config.from_buffer_copy(config._obj)
        attributes = {a.id: tuple(a.cluster) for a in copy.attributes[: copy.attribute_count]}
        self.launches.append((copy, attributes, ctypes.string_at(parameters[0], struct.calcsize(PARAMS))))
        return self.refuses


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    cuda = FakeDriver()
    monkeypatch.setattr(driver, "driver", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77 + device, raising=False)
    return cuda


def test_structures_are_the_driver_s() -> None:
    assert ctypes.sizeof(driver.Config) == 56 and ctypes.sizeof(driver.Attribute) == 72
    assert (driver.Config.stream.offset, driver.Config.attributes.offset) == (32, 40)
    assert struct.calcsize(attention.PARAMS) == 104


def test_a_launch_carries_grid_cluster_stream_and_parameters(fake: FakeDriver) -> None:
    kernel = Kernel(b"", "fill", params=PARAMS, threads=THREADS, shared_bytes=SHARED)
    kernel.load(0)
    kernel.launch(0, 12, 3, 1 << 40, 5, -7, 2.5)
    kernel.launch(0, 9, 1, 0, 0, 0, 0.0)
    (config, attributes, parameters), (plain, fewer, _) = fake.launches
    assert (*config.grid, *config.block) == (12, 1, 1, THREADS, 1, 1)
    assert (config.shared_bytes, config.stream) == (SHARED, 77)
    assert attributes[driver.CLUSTER_DIMENSION] == (3, 1, 1)
    assert struct.unpack(PARAMS, parameters) == (1 << 40, 5, -7, 2.5)
    assert plain.grid[0] == 9 and driver.CLUSTER_DIMENSION not in fewer


@pytest.mark.parametrize("early", [False, True])
def test_only_a_kernel_that_waits_by_itself_is_started_early(fake: FakeDriver, early: bool) -> None:
    kernel = Kernel(b"", "fill", params=PARAMS, threads=THREADS, shared_bytes=SHARED, early=early)
    kernel.load(0)
    kernel.launch(0, 2, 2, 0, 0, 0, 0.0)
    ((_, attributes, _),) = fake.launches
    assert attributes.get(driver.EARLY_LAUNCH, (0, 0, 0))[0] == early


def test_threads_do_not_share_what_they_hand_over(fake: FakeDriver) -> None:
    kernel = Kernel(b"", "fill", params=PARAMS, threads=THREADS, shared_bytes=SHARED)
    kernel.load(0)
    kernel.launch(0, 1, 1, 0, 0, 0, 0.0)
    other = threading.Thread(target=kernel.launch, args=(0, 1, 1, 0, 0, 0, 0.0))
    other.start()
    other.join()
    first, second = (ctypes.addressof(config.attributes.contents) for config, _, _ in fake.launches)
    assert first != second


def test_the_first_use_while_a_graph_is_captured_is_refused_in_words(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"'fill' is loaded at its first use.*run the operation once before"):
        Kernel(b"", "fill", params=PARAMS, threads=THREADS, shared_bytes=SHARED).load(0)


def test_a_refused_launch_says_which(fake: FakeDriver) -> None:
    kernel = Kernel(b"", "fill", params=PARAMS, threads=THREADS, shared_bytes=SHARED)
    kernel.load(0)
    fake.refuses = 1
    with pytest.raises(CudaError, match="fill: launch of 4 blocks: unknown error \\(CUDA error 1\\)"):
        kernel.launch(0, 4, 1, 0, 0, 0, 0.0)


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Machine code of the small kernel; the cache is an empty one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    small_kernel.write(tmp_path)
    return built("fill.cu", "EXTRA=1", folder=tmp_path).image


@pytest.fixture
def kernel(image: bytes) -> Kernel:
    """Not yet loaded."""
    return Kernel(image, "fill", params=PARAMS, threads=THREADS, shared_bytes=SHARED)


def fill(kernel: Kernel, out: torch.Tensor, value: int, cluster: int) -> None:
    blocks = -(-len(out) // THREADS)
    kernel.launch(out.get_device(), blocks, cluster, out.data_ptr(), len(out), value, 3.5)


def filled(count: int, value: int, cluster: int) -> list[int]:
    return [value + 1000 * (at // THREADS % cluster) + 4 for at in range(count)]


@on_hopper
@pytest.mark.parametrize("cluster", range(1, 9))
def test_a_kernel_runs_in_clusters_and_in_graphs(kernel: Kernel, cluster: int) -> None:
    out = torch.zeros(THREADS * 3 * cluster, dtype=torch.int32, device="cuda")
    kernel.load(0)
    assert 12 <= kernel.clusters(0, cluster) * cluster <= 132  # 200,000 bytes: a block a multiprocessor
    fill(kernel, out, 7, cluster)
    assert out.tolist() == filled(len(out), 7, cluster)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(kernel, out, 8, cluster)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert out.tolist() == filled(len(out), 8, cluster)


@on_hopper
def test_a_kernel_waits_for_what_its_stream_did_before(kernel: Kernel) -> None:
    kernel.load(0)
    out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        out.fill_(-1)
        fill(kernel, out, 7, 1)
        seen = out.clone()
    torch.cuda.synchronize()
    assert seen.tolist() == filled(THREADS, 7, 1)


@on_hopper
def test_a_thread_that_has_done_nothing_on_the_gpu_can_launch(kernel: Kernel) -> None:
    kernel.load(0)
    out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    other = threading.Thread(target=fill, args=(kernel, out, 7, 1))
    other.start()
    other.join()
    assert out.tolist() == filled(THREADS, 7, 1)


@on_hopper
def test_a_kernel_that_is_not_loaded_is_refused_in_a_graph(kernel: Kernel) -> None:
    with pytest.raises(RuntimeError, match="run the operation once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernel.load(0)
    kernel.load(0)


@on_hopper
def test_parameters_of_another_size_are_refused(image: bytes) -> None:
    with pytest.raises(CudaError, match="takes 24 bytes of parameters, is given 32"):
        Kernel(image, "fill", params="QqifQ", threads=THREADS, shared_bytes=SHARED).load(0)


@on_hopper
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_of_a_process_have_it_side_by_side(kernel: Kernel) -> None:
    outs = [torch.zeros(THREADS, dtype=torch.int32, device=f"cuda:{index}") for index in (0, 1)]
    for value, out in enumerate(outs):
        kernel.load(value)
        fill(kernel, out, value, 1)
    assert [out.tolist() for out in outs] == [filled(THREADS, value, 1) for value in (0, 1)]


@on_hopper
def test_doctor_names_the_compiler_on_this_gpu() -> None:
    what, state, detail = gpu_report.cuda_fact(torch.device("cuda", 0))
    assert (what, state) == ("cuda c++", "ok") and re.search("built by (NVRTC|nvcc) ", detail)
