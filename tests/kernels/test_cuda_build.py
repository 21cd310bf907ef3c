"""Kernels in CUDA C++ are built once, never taken from a damaged cache, and what is missing or broken is said.

The cache and the choice are tested with compilers that are none; NVRTC and nvcc compile a small kernel for sm_90a where
they are found, and `attention.cu` itself.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import small_kernel
import torch
from small_kernel import HEADER, KERNEL

from deepinfer.kernels import build_cache, gpu_report
from deepinfer.kernels.build_cache import SEAL
from deepinfer.kernels.cuda import attention, build
from deepinfer.kernels.cuda.build import Compiler, CudaBuildError, Sources, built

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from compile_report import cuobjdump


def first_nvcc() -> Compiler:
    programs = build.nvcc_programs()
    if not programs:
        raise CudaBuildError("nvcc is not found")
    return build.nvcc(programs[0])


NVRTC = build.nvrtc.__wrapped__
FOUND: dict[str, Callable[[], Compiler]] = {"NVRTC": build.nvrtc, "nvcc": first_nvcc}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel and its header; the cache is an empty one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "_failed", {})
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
    monkeypatch.setattr(build, "nvcc_programs", lambda: ["the same one"])
    monkeypatch.setattr(build, "nvcc", lambda program: found)
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


def test_another_source_header_define_compiler_or_flag_is_another_entry(
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
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-lineinfo"))
    built("fill.cu", "EXTRA=1", folder=folder)
    assert len(compiled) == len(entries(folder)) == 6


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
    monkeypatch.setattr(build, "nvrtc", NVRTC)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(build, "TOOLKITS", str(folder))
    with pytest.raises(CudaBuildError) as caught:
        built("fill.cu", folder=folder)
    assert "pip install cuda-bindings nvidia-cuda-nvrtc" in str(caught.value)
    assert "install the CUDA toolkit" in str(caught.value)


def test_the_second_compiler_is_asked_where_the_first_refuses(
    folder: Path, compiled: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = build.nvrtc()
    monkeypatch.setattr(build, "nvcc_programs", lambda: ["counter"])
    monkeypatch.setattr(build, "nvcc", lambda program: counter)
    monkeypatch.setattr(build, "nvrtc", missing)
    assert built("fill.cu", folder=folder) == (b"code 1", "counter 1.0")


# -- compilers that are broken ---------------------------------------------------------------------------------------

SAYS_VERSION = "if [ $1 = --version ]; then echo 'release 13.0, V13.0.88'; exit 0; fi\n"
MAKES = "printf made > made.cubin\n"
HANGS = "exec sleep 100\n"
BROKEN = {  # what a program called nvcc does -> what is said of it
    "exit 3\n": r"nvcc does not run: CalledProcessError: .* exit status 3",
    HANGS: r"nvcc does not run: TimeoutExpired: .* after 2 seconds",
    SAYS_VERSION + HANGS: r"nvcc 13\.0\.88: TimeoutExpired: .* after 3 seconds",
    SAYS_VERSION: r"nvcc 13\.0\.88: FileNotFoundError: .*made\.cubin",
    SAYS_VERSION + "printf '\\351\\377 oui\\n' >&2; exit 1\n": r"nvcc 13\.0\.88 could not compile .*\n\ufffd\ufffd oui",
    "printf 'V13.0 \\351\\377\\n'\n": r"nvcc 13\.0: FileNotFoundError: .*made\.cubin",
}


def install(folder: Path, does: str) -> None:
    """A program called nvcc."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvcc").write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/asked\n{does}')
    (folder / "nvcc").chmod(0o755)


def asked(folder: Path) -> int:
    """How often it ran."""
    return len((folder / "asked").read_text().splitlines())


@pytest.fixture
def toolkits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No NVRTC, no other nvcc than those which a test puts into folders below this one, or into "path"."""
    monkeypatch.setattr(build, "nvrtc", missing)
    monkeypatch.setattr(build, "TOOLKITS", str(folder / "toolkits"))
    monkeypatch.setenv("PATH", f"{folder / 'path'}:/usr/bin:/bin")
    monkeypatch.setattr(build, "TIMEOUT_S", 3)
    monkeypatch.setattr(build, "VERSION_TIMEOUT_S", 2)
    return folder / "toolkits"


@pytest.mark.parametrize("does", BROKEN)
def test_a_broken_nvcc_is_passed_over_for_the_next_and_asked_once(folder: Path, toolkits: Path, does: str) -> None:
    install(folder / "path", does)
    for _ in range(2):
        with pytest.raises(CudaBuildError, match=BROKEN[does]):
            built("fill.cu", folder=folder)
    times = asked(folder / "path")
    assert times == (2 if SAYS_VERSION in does or "V13" in does else 1)
    install(toolkits / "cuda-13.0" / "bin", SAYS_VERSION + MAKES)  # the same version, but whole
    assert built("fill.cu", folder=folder) == (b"made", "nvcc 13.0.88")
    assert asked(folder / "path") == times


def test_toolkits_are_asked_from_the_newest_on_behind_the_chosen_ones(folder: Path, toolkits: Path) -> None:
    names = "cuda-9.2", "cuda-13.0", "cuda-12.10", "cuda", "cuda-11.8", "cuda-12.9"
    for name in names:
        install(toolkits / name / "bin", "")
    install(folder / "path", "")
    (toolkits / "cuda-14").symlink_to(toolkits / "cuda-12.9")
    (toolkits / "cuda-15").mkdir()
    found = [Path(program).relative_to(folder).parts[-3] for program in build.nvcc_programs()[1:]]
    assert build.nvcc_programs()[0] == str(folder / "path" / "nvcc")
    assert found == ["cuda", "cuda-14", "cuda-13.0", "cuda-12.10", "cuda-11.8", "cuda-9.2"]  # 12.9 once


def test_a_toolkit_too_old_for_hopper_is_passed_over(folder: Path, toolkits: Path) -> None:
    refuses = "echo \"Value 'sm_90a' is not defined for option 'gpu-architecture'\" >&2; exit 1\n"
    install(folder / "path", SAYS_VERSION.replace("V13.0.88", "V11.8.89") + refuses)
    install(toolkits / "cuda-13.0" / "bin", SAYS_VERSION + MAKES)
    assert built("fill.cu", folder=folder) == (b"made", "nvcc 13.0.88")


def test_without_temporary_files_the_reason_is_told(
    folder: Path, toolkits: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(folder / "path", SAYS_VERSION + MAKES)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "nowhere"))
    with pytest.raises(CudaBuildError, match=r"nvcc 13\.0\.88: FileNotFoundError: .*nowhere"):
        built("fill.cu", folder=folder)
    monkeypatch.setattr(build, "nvrtc", lambda: Compiler("counter 1.0", lambda sources: b"code"))
    assert built("fill.cu", folder=folder).image == b"code"
    assert "fill is compiled in every process: there is no folder to keep it in" in caplog.text


@pytest.mark.parametrize("broken", ["nvrtcVersion", "nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetCUBIN"])
def test_nvcc_is_asked_where_nvrtc_raises_what_nobody_knows(
    folder: Path, toolkits: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    calls = []

    def fail(*given: object) -> None:
        calls.append(broken)
        raise LookupError("libnvrtc-builtins is not found")

    library = ModuleType("cuda.bindings.nvrtc")
    answers = {"Version": (0, 13, 0), "CreateProgram": (0, 1), "CompileProgram": (0,), "GetCUBINSize": (0, 9)}
    for name, answer in {**answers, "DestroyProgram": (0,)}.items():
        monkeypatch.setattr(library, f"nvrtc{name}", lambda *_, answer=answer: answer, raising=False)
    monkeypatch.setattr(library, broken, fail, raising=False)
    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = library  # type: ignore[attr-defined]
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.bindings.nvrtc": library}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(build, "nvrtc", functools.cache(NVRTC))
    for _ in range(2):
        with pytest.raises(CudaBuildError, match=r"NVRTC.*libnvrtc-builtins is not found"):
            built("fill.cu", folder=folder)
    assert calls == [broken]
    install(folder / "path", SAYS_VERSION + MAKES)
    assert built("fill.cu", folder=folder) == (b"made", "nvcc 13.0.88")


def test_folders_of_others_cost_one_of_this_process_and_a_warning(
    folder: Path, compiled: list[Sources], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    taken = folder / f"deepinfer-kernels-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    assert [built("fill.cu", folder=folder).image for _ in range(2)] == [b"code 1"] * 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(taken) in caplog.text and list(taken.iterdir()) == []
    (own,) = (path for path in folder.glob("deepinfer-kernels-*") if path != taken)
    build_cache._folder_of_this_process(taken).cleanup()  # as at the end of the process
    assert not own.exists()


@pytest.fixture
def hopper(folder: Path, toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A Hopper GPU as far as `problem` asks for one, with a compiler that makes nothing."""
    install(folder / "path", SAYS_VERSION)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(attention, "_devices", {})
    monkeypatch.delenv("DEEPINFER_CUDA_KERNELS", raising=False)
    attention._kernel.cache_clear()
    yield torch.device("cuda", 0)
    attention._kernel.cache_clear()


def test_attention_says_why_it_cannot_be_built_and_asks_once_for_all_devices(
    folder: Path, hopper: torch.device
) -> None:
    for index in range(8):
        assert "made.cubin" in str(attention.problem(torch.device("cuda", index)))
    assert asked(folder / "path") == 2


def test_to_switch_them_off_is_no_warning_and_told_by_doctor(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPINFER_CUDA_KERNELS", "0")
    caplog.set_level(logging.INFO)
    assert "DEEPINFER_CUDA_KERNELS=0" in gpu_report.cuda_fact(hopper)[2]
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "DEEPINFER_CUDA_KERNELS=0" in record.getMessage()


def test_gpu_tests_of_attention_skip_with_its_own_reason(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import attention_cases

    assert attention_cases.cuda_problem() is not None  # the interpreter's CPU, or a GPU that is no Hopper one here
    monkeypatch.setattr(attention_cases, "gpu_problem", lambda device: None)
    monkeypatch.setattr(attention_cases, "DEVICE", hopper)
    assert "made.cubin" in str(attention_cases.cuda_problem())
    monkeypatch.setitem(attention._devices, 0, "it is switched off")
    assert attention_cases.cuda_problem() == "it is switched off"


# -- sources and compilers as they are -------------------------------------------------------------------------------


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
    assert lines[0] == f"{compiler.version} could not compile fill.cu for sm_90a:"
    line = (folder / "fill.cu").read_text().splitlines().index("__device__ int wrong0 = unknown0;") + 1
    assert f"fill.cu({line})" in lines[1] and '"unknown0" is undefined' in lines[1]
    assert len(lines) < 20 and "lines more" in lines[-2] and "report these lines" in lines[-1]
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
