"""Kernels in CUDA C++: built once, never from a damaged cache, and what is missing is said in words.

The cache and what is chosen are tested with compilers that are none; NVRTC and nvcc compile a small kernel for sm_90a
where they are found, and `attention.cu` itself.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepinfer.kernels import gpu_report, select
from deepinfer.kernels.build_cache import SEAL
from deepinfer.kernels.cuda import attention, build, driver
from deepinfer.kernels.cuda.build import Compiler, CudaBuildError, Sources, built
from deepinfer.kernels.cuda.driver import CudaError, Kernel
from deepinfer.kernels.reference.records import window_bytes
from deepinfer.kernels.select import attention as select_attention
from deepinfer.kernels.select import backends

KERNEL = """
#include <stdint.h>
#include "sum.cuh"
struct Params { int* out; int64_t count; int value; float more; };
extern "C" __global__ void fill(const Params p) {
  extern __shared__ int box[];
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  box[threadIdx.x] = sum(p.value, 1000 * rank);
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < p.count) p.out[at] = box[threadIdx.x] + int(p.more);
}
"""
HEADER = "__device__ inline int sum(int a, int b) { return a + b + EXTRA; }\n"
PARAMS, THREADS, SHARED = "Qqif", 64, 200_000
FOUND = {"NVRTC": build.nvrtc, "nvcc": build.nvcc}
gpu = pytest.mark.gpu
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel and its header; the cache is an empty one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "fill.cu").write_text(KERNEL)
    (tmp_path / "sum.cuh").write_text(HEADER)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Sources]:
    """What a compiler that only counts was given."""
    given: list[Sources] = []

    def count(sources: Sources) -> bytes:
        given.append(sources)
        return f"code {len(given)}".encode()

    monkeypatch.setattr(build, "nvrtc", lambda: Compiler("counter 1.0", count))
    return given


@pytest.fixture(params=FOUND)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Each real compiler in turn, as the only one."""
    found = compiler_or_skip(FOUND[request.param])
    monkeypatch.setattr(build, "nvrtc", lambda: found)
    monkeypatch.setattr(build, "nvcc", lambda: found)
    return found


def compiler_or_skip(find: Callable[[], Compiler]) -> Compiler:
    try:
        return find()
    except CudaBuildError as error:
        pytest.skip(str(error))


def entries(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "deepinfer" / "kernels").iterdir())


def missing() -> Compiler:
    raise CudaBuildError("it is not installed")


def test_a_kernel_is_compiled_once(folder: Path, compiled: list[Sources]) -> None:
    assert [built("fill.cu", "EXTRA=1", folder=folder) for _ in range(3)] == [(b"code 1", "counter 1.0")] * 3
    assert [(s.name, s.text, s.headers, s.defines) for s in compiled] == [
        ("fill.cu", KERNEL, {"sum.cuh": HEADER}, ("EXTRA=1",))
    ]
    (entry,) = entries(folder)
    assert entry.name.startswith("fill-") and entry.suffix == ".cubin"


def test_another_source_header_define_or_compiler_is_another_entry(
    folder: Path, compiled: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    built("fill.cu", "EXTRA=1", folder=folder)
    built("fill.cu", "EXTRA=2", folder=folder)
    (folder / "sum.cuh").write_text(HEADER + "// changed\n")
    built("fill.cu", "EXTRA=1", folder=folder)
    (folder / "fill.cu").write_text(KERNEL + "// changed\n")
    built("fill.cu", "EXTRA=1", folder=folder)
    newer = build.nvrtc()._replace(version="counter 1.1")
    monkeypatch.setattr(build, "nvrtc", lambda: newer)
    built("fill.cu", "EXTRA=1", folder=folder)
    assert len(compiled) == len(entries(folder)) == 5


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"C" + data[1:], lambda data: b""])
def test_a_damaged_entry_is_built_again(
    folder: Path, compiled: list[Sources], damage: Callable[[bytes], bytes]
) -> None:
    built("fill.cu", folder=folder)
    (entry,) = entries(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    assert built("fill.cu", folder=folder).image == b"code 2"
    assert built("fill.cu", folder=folder).image == b"code 2"
    assert entry.read_bytes()[:-SEAL] == b"code 2"


def test_a_cache_that_takes_no_file_costs_a_compile_and_a_warning(
    folder: Path, compiled: list[Sources], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "cache_folder", lambda: folder / "nowhere")
    assert [built("fill.cu", folder=folder).image for _ in range(2)] == [b"code 1", b"code 2"]
    assert "fill is compiled in every process" in caplog.text and "nowhere" in caplog.text


RANK = """
import sys, time
from pathlib import Path
from deepinfer.kernels.cuda import build
image = bytes(sys.argv[1], "ascii") * 1_000_000
def slow(sources):
    time.sleep(0.3)
    return image
build.nvrtc = lambda: build.Compiler("slow 1.0", slow)
start = float(sys.argv[2])
time.sleep(max(0.0, start - time.time()))
for _ in range(20):
    image_found = build.built("fill.cu", folder=Path(sys.argv[3])).image
    assert len(image_found) == 1_000_000 and len(set(image_found)) == 1
"""


def test_processes_that_build_at_once_leave_one_whole_entry(folder: Path) -> None:
    """Each makes other bytes, as compilers may: none sees a mixture."""
    import time

    start = str(time.time() + 4)
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, letter, start, str(folder)], stderr=subprocess.PIPE, text=True)
        for letter in "abcd"
    ]
    told = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, told
    (entry,) = entries(folder)
    assert entry.stat().st_size == 1_000_000 + SEAL


def test_without_a_compiler_the_reasons_of_both_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(build, "nvrtc", build.nvrtc.__wrapped__)
    monkeypatch.setattr(build, "nvcc", build.nvcc.__wrapped__)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(build.glob, "glob", lambda pattern: [])
    with pytest.raises(CudaBuildError) as caught:
        built("fill.cu", folder=folder)
    assert "pip install cuda-bindings nvidia-cuda-nvrtc" in str(caught.value)
    assert "install the CUDA toolkit" in str(caught.value)


def test_the_second_compiler_is_asked_where_the_first_refuses(
    folder: Path, compiled: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "nvcc", build.nvrtc)
    monkeypatch.setattr(build, "nvrtc", missing)
    assert built("fill.cu", folder=folder) == (b"code 1", "counter 1.0")


def test_a_source_that_is_not_installed_is_named(folder: Path, compiled: list[Sources]) -> None:
    with pytest.raises(CudaBuildError, match=r"install deepinfer anew: .*nothing\.cu"):
        built("nothing.cu", folder=folder)


def test_a_kernel_with_header_and_define_compiles(folder: Path, compiler: Compiler) -> None:
    image, version = built("fill.cu", "EXTRA=1", folder=folder)
    assert image[:4] == b"\x7fELF" and b"fill" in image
    assert version == compiler.version and re.fullmatch(r"(NVRTC|nvcc) \d+\.\d+[.\d]*", version)


def test_a_compiler_s_first_complaints_are_told(folder: Path, compiler: Compiler) -> None:
    (folder / "fill.cu").write_text(KERNEL + "".join(f"__device__ int wrong{n} = unknown{n};\n" for n in range(40)))
    with pytest.raises(CudaBuildError) as caught:
        built("fill.cu", "EXTRA=1", folder=folder)
    lines = str(caught.value).splitlines()
    once = lines[: len(lines) // 2]  # both ways are the same compiler here
    assert once[0] == f"{compiler.version} could not compile fill.cu for sm_90a:"
    line = (folder / "fill.cu").read_text().splitlines().index("__device__ int wrong0 = unknown0;") + 1
    assert f"fill.cu({line})" in once[1] and '"unknown0" is undefined' in once[1]
    assert len(once) < 20 and "lines more" in once[-2] and "report these lines" in once[-1]
    assert entries(folder) == []


# -- what serves ----------------------------------------------------------------------------------------------------


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


def test_rows_are_shared_by_as_few_blocks_as_make_parts_short() -> None:
    for rows in range(1, 200):
        for tiles in range(1, 14):
            parts = attention.parts_of(rows, tiles, 132)
            most = max(1, min(attention.MOST_PARTS, tiles, 132 // rows))
            longest = -(-tiles // parts)
            assert 1 <= parts <= most and rows * parts <= max(132, rows)
            assert longest == -(-tiles // most)  # no allowed number of parts has a shorter longest one
            assert parts == 1 or -(-tiles // (parts - 1)) > longest
    assert [attention.parts_of(rows, 10, 132) for rows in (1, 16, 26, 27, 33, 44, 66, 67, 132, 4096)] == [
        5, 5, 5, 4, 4, 3, 2, 1, 1, 1
    ]  # fmt: skip


# -- the driver -----------------------------------------------------------------------------------------------------


class FakeDriver:
    """Takes what it is given and keeps a copy of every launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[driver.Config, driver.Attribute, bytes]] = []
        self.refuses = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == "cuFuncLoad":
            raise AttributeError  # as a driver before CUDA 12.4
        return lambda *arguments: 0

    def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:  # type: ignore[no-untyped-def]
        copy = driver.Config.from_buffer_copy(config._obj)
        attribute = driver.Attribute.from_buffer_copy(copy.attributes.contents)
        self.launches.append((copy, attribute, ctypes.string_at(parameters[0], struct.calcsize(PARAMS))))
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
    (config, attribute, parameters), (plain, _, _) = fake.launches
    assert (*config.grid, *config.block) == (12, 1, 1, THREADS, 1, 1)
    assert (config.shared_bytes, config.stream, config.attribute_count) == (SHARED, 77, 1)
    assert (attribute.id, *attribute.cluster) == (driver.CLUSTER_DIMENSION, 3, 1, 1)
    assert struct.unpack(PARAMS, parameters) == (1 << 40, 5, -7, 2.5)
    assert (plain.grid[0], plain.attribute_count) == (9, 0)


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
def kernel(folder: Path) -> Kernel:
    """The small kernel, not yet loaded."""
    image = built("fill.cu", "EXTRA=1", folder=folder).image
    return Kernel(image, "fill", params=PARAMS, threads=THREADS, shared_bytes=SHARED)


def fill(kernel: Kernel, out: torch.Tensor, value: int, cluster: int) -> None:
    blocks = -(-len(out) // THREADS)
    kernel.launch(out.get_device(), blocks, cluster, out.data_ptr(), len(out), value, 3.5)


def filled(count: int, value: int, cluster: int) -> list[int]:
    return [value + 1000 * (at // THREADS % cluster) + 4 for at in range(count)]


@gpu
@needs_hopper
@pytest.mark.parametrize("cluster", range(1, 9))
def test_a_kernel_runs_in_clusters_and_in_graphs(kernel: Kernel, cluster: int) -> None:
    out = torch.zeros(THREADS * 3 * cluster, dtype=torch.int32, device="cuda")
    kernel.load(0)
    fill(kernel, out, 7, cluster)
    assert out.tolist() == filled(len(out), 7, cluster)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(kernel, out, 8, cluster)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert out.tolist() == filled(len(out), 8, cluster)


@gpu
@needs_hopper
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


@gpu
@needs_hopper
def test_a_thread_that_has_done_nothing_on_the_gpu_can_launch(kernel: Kernel) -> None:
    kernel.load(0)
    out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    other = threading.Thread(target=fill, args=(kernel, out, 7, 1))
    other.start()
    other.join()
    assert out.tolist() == filled(THREADS, 7, 1)


@gpu
@needs_hopper
def test_a_kernel_that_is_not_loaded_is_refused_in_a_graph(kernel: Kernel) -> None:
    with pytest.raises(RuntimeError, match="run the operation once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernel.load(0)
    kernel.load(0)


@gpu
@needs_hopper
def test_parameters_of_another_size_are_refused(folder: Path) -> None:
    image = built("fill.cu", "EXTRA=1", folder=folder).image
    with pytest.raises(CudaError, match="takes 24 bytes of parameters, is given 32"):
        Kernel(image, "fill", params="QqifQ", threads=THREADS, shared_bytes=SHARED).load(0)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_of_a_process_have_it_side_by_side(kernel: Kernel) -> None:
    outs = [torch.zeros(THREADS, dtype=torch.int32, device=f"cuda:{index}") for index in (0, 1)]
    for value, out in enumerate(outs):
        kernel.load(value)
        fill(kernel, out, value, 1)
    assert [out.tolist() for out in outs] == [filled(THREADS, value, 1) for value in (0, 1)]


@gpu
@needs_hopper
def test_doctor_names_the_compiler_on_this_gpu() -> None:
    what, state, detail = gpu_report.cuda_fact(torch.device("cuda", 0))
    assert (what, state) == ("cuda c++", "ok") and re.search("built by (NVRTC|nvcc) ", detail)
