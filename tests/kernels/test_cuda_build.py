"""Kernels in CUDA C++ are built once, never taken from a damaged cache, and what is missing is said in words.

The cache is tested with compilers that are none; NVRTC and nvcc compile a small kernel for sm_90a where they are found,
and `attention.cu` itself.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import small_kernel
from small_kernel import HEADER, KERNEL

from deepinfer.kernels.build_cache import SEAL
from deepinfer.kernels.cuda import attention, build
from deepinfer.kernels.cuda.build import Compiler, CudaBuildError, Sources, built

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from compile_report import cuobjdump

FOUND = {"NVRTC": build.nvrtc, "nvcc": build.nvcc}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel and its header; the cache is an empty one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    small_kernel.write(tmp_path)
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
from deepinfer.kernels.cuda import attention, build
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


# -- attention.cu ---------------------------------------------------------------------------------------------------

STACK_BYTES = 64  # of a thread, at most: a few words are spilled beside its 128 registers
RESERVED_BYTES = 1024  # of a block's shared memory, which the system takes
PARAMETERS_AT = 528  # in the first constant bank of sm_90
USAGE = re.compile(r"Function attention:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+) CONSTANT\[0\]:(\d+)")


@pytest.fixture(scope="module", params=FOUND)
def attention_code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`attention.cu` as each compiler makes it."""
    compiler = compiler_or_skip(FOUND[request.param])
    headers = {path.name: path.read_text() for path in build.SOURCES.glob("*.cuh")}
    code = tmp_path_factory.mktemp("attention") / "attention.cubin"
    text = (build.SOURCES / "attention.cu").read_text()
    code.write_bytes(compiler.compile(Sources("attention.cu", text, headers, ())))
    return code


def dumped(code: Path, *options: str) -> str:
    """What cuobjdump says, of the toolkit or of Triton, which brings it along."""
    tool = shutil.which("cuobjdump") or cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump: neither on the PATH nor in Triton")
    return subprocess.run([tool, *options, code], capture_output=True, text=True, check=True).stdout


def test_attention_spills_next_to_nothing_and_fits_a_processor(attention_code: Path) -> None:
    found = USAGE.search(dumped(attention_code, "--dump-resource-usage"))
    assert found is not None
    registers, stack, shared, local, constants = map(int, found.groups())
    assert stack + local <= STACK_BYTES
    assert registers * attention.THREADS <= 65_536
    assert shared <= RESERVED_BYTES  # all that a block can have is asked for at the launch
    assert constants - PARAMETERS_AT == struct.calcsize(attention.PARAMS)


def test_attention_multiplies_on_the_tensor_cores(attention_code: Path) -> None:
    assert len(re.findall(r"\bHGMMA\.64x\d+x16\.F32\b", dumped(attention_code, "-sass"))) > 30
