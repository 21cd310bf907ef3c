"""Kernels in CUDA C++: where attention takes them, what is said where it cannot, and how they are launched.

The driver is one that only takes notes, and the GPU one that is asked for its name; on a real one a small kernel runs.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_kernel
import torch
from small_kernel import PARAMS, SHARED, THREADS

from deepinfer.kernels import gpu_report, select
from deepinfer.kernels.cuda import attention, driver
from deepinfer.kernels.cuda.build import CudaBuildError, built
from deepinfer.kernels.cuda.driver import CudaError, Kernel
from deepinfer.kernels.reference.records import window_bytes
from deepinfer.kernels.select import attention as select_attention
from deepinfer.kernels.select import backends

WITHOUT = not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(WITHOUT, reason="needs a Hopper GPU")(test))


def not_built(name: str) -> None:
    raise CudaBuildError("no compiler\nat all")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A Hopper GPU as far as `problem` asks for one."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(attention, "_devices", {})
    monkeypatch.delenv("DEEPINFER_CUDA_KERNELS", raising=False)
    monkeypatch.setattr(attention, "built", not_built)
    attention._kernel.cache_clear()
    yield torch.device("cuda", 0)
    attention._kernel.cache_clear()


def test_the_switch_turns_them_off_before_anything_is_compiled(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_CUDA_KERNELS", "0")
    assert attention.problem(hopper) == "DEEPINFER_CUDA_KERNELS=0 switches the kernels in CUDA C++ off"
    monkeypatch.setattr(attention, "_devices", {})
    monkeypatch.setenv("DEEPINFER_CUDA_KERNELS", "perhaps")
    assert "DEEPINFER_CUDA_KERNELS='perhaps': use 1 or 0" in gpu_report.cuda_fact(hopper)[2]
    monkeypatch.setenv("DEEPINFER_CUDA_KERNELS", "1")
    assert attention.problem(hopper) == "no compiler\nat all"


def test_a_reason_is_logged_once_and_told_by_doctor(hopper: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    assert attention.problem(hopper) == attention.problem(hopper) == "no compiler\nat all"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "runs in Triton on cuda:0" in record.getMessage()
    what, state, detail = gpu_report.cuda_fact(hopper)
    assert (what, state) == ("cuda c++", "note") and detail.endswith("in Triton, slower: no compiler at all")


def test_other_devices_are_told_why_and_log_nothing(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blackwell = SimpleNamespace(major=10, minor=0, multi_processor_count=148)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: blackwell)
    assert attention.problem(hopper) == "it is made for compute capability 9.0, not for 10.0"
    assert attention.problem(torch.device("cpu")) == "it is made for CUDA devices, not for cpu"
    assert caplog.records == []


def test_queries_on_a_cpu_are_not_served() -> None:
    q = torch.zeros(1, attention.HEADS, attention.DIM, dtype=torch.bfloat16)
    pool = torch.zeros(4, attention.WINDOW_BYTES, dtype=torch.uint8)
    assert not attention.serves(q, pool, None)
    with pytest.raises(ValueError, match="not served"):
        attention.sparse_attention(q, pool, torch.zeros(1, 4, dtype=torch.int32), None, None, torch.zeros(64), 1.0)


@pytest.mark.parametrize("served", [False, True])
def test_where_it_serves_it_runs_and_nothing_is_unpacked(monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    def attend(*arguments: object, invariant: bool) -> tuple[str, bool]:
        return "CUDA C++", invariant

    twin = SimpleNamespace(serves=lambda q, window_pool, kv_pool: served, sparse_attention=attend)
    with select.interpreted_gpu():
        monkeypatch.setattr(backends.gpu(), "cuda_attention", twin)
        monkeypatch.setattr(backends.gpu().attention, "sparse_attention", lambda *_, invariant: ("Triton", invariant))
        q = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
        pool = torch.zeros(4, window_bytes(128), dtype=torch.uint8)
        many = q.expand(select_attention.UNPACKED_ROWS, -1, -1)
        assert select.unpacks_keys(many, pool) is not served
        assert not select.unpacks_keys(many[1:], pool)
        indices, sink = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(8)
        out = select.sparse_attention(q, pool, indices, None, None, sink, 1.0, split=True, invariant=True)
    assert out == ("CUDA C++" if served else "Triton", True)


@pytest.mark.parametrize("clusters", [(), (132, 66, 39, 30, 22, 17, 15, 15)])  # the second are an H200's
def test_rows_are_shared_by_as_few_blocks_as_make_parts_short(clusters: tuple[int, ...]) -> None:
    held = clusters or [132 // n for n in range(1, 9)]
    for rows in range(1, 140):
        for tiles in range(1, 14):
            parts = attention.parts_of(rows, tiles, 132, clusters)
            allowed = [n for n in range(1, 9) if n == 1 or (n <= tiles and rows <= held[n - 1])]
            longest = min(-(-tiles // n) for n in allowed)
            assert parts == min(n for n in allowed if -(-tiles // n) == longest)
            assert (parts - 1) * longest < tiles  # the last part is not empty
    found = [attention.parts_of(rows, 10, 132, clusters) for rows in (1, 22, 23, 26, 30, 33, 39, 40, 44, 66, 67)]
    assert found == ([5, 5, 4, 4, 4, 3, 3, 2, 2, 2, 1] if clusters else [5, 5, 5, 5, 4, 4, 3, 3, 3, 2, 1])


# -- the driver -----------------------------------------------------------------------------------------------------


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
