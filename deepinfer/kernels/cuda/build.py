"""CUDA C++ sources of a folder -> machine code for sm_90a, once per source and compiler version.

Compilers in order: NVRTC, a library that torch's CUDA wheels bring along, through `cuda.bindings`; then nvcc of every
CUDA toolkit. What one of them made is kept in the project's cache folder, its name a hash of source, headers, defines,
flags and compiler version. Whatever is wrong with one of them, the next is asked.
"""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer.kernels.build_cache import cache_folder, entry_key, new_entry, read_entry

SOURCES = Path(__file__).parent
ARCHITECTURE = "sm_90a"  # the "a" stands for wgmma and setmaxnreg, which no later architecture runs
FLAGS = (f"-arch={ARCHITECTURE}", "-std=c++17")
TIMEOUT_S = 300  # a compile takes about a second
VERSION_TIMEOUT_S = 20  # to say its version takes a compiler milliseconds, and the engine's start waits for it
TOOLKITS = "/usr/local"  # CUDA's: the chosen one in "cuda", each in a folder such as "cuda-13.0"
LOG_LINES = 12  # of a compiler's complaint; what follows the first error is mostly its consequence
# NVRTC has no headers of the system's: these stand in for the only ones that sources may include.
INTEGERS = """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
"""
SYSTEM_HEADERS = {"stdint.h": INTEGERS, "cstdint": INTEGERS}

logger = logging.getLogger(__name__)
# What was asked of a compiler -> why it could not. Not asked again in this process, say for the next device.
_failed: dict[Hashable, str] = {}


class CudaBuildError(RuntimeError):
    """No machine code could be had. The message says what each compiler said and what to do."""


class Sources(NamedTuple):
    """What a compiler is given."""

    name: str  # of the file with the kernel, e.g. "attention.cu"
    text: str
    headers: Mapping[str, str]  # name -> text of everything that it may include from its folder
    defines: tuple[str, ...]  # "NAME=VALUE"


class Compiler(NamedTuple):
    version: str  # as people read it, e.g. "NVRTC 13.0.88"; another one compiles anew
    compile: Callable[[Sources], bytes]  # -> machine code; CudaBuildError with its log


class Built(NamedTuple):
    image: bytes  # a cubin
    compiler: str  # its version


def built(name: str, *defines: str, folder: Path = SOURCES) -> Built:
    """Machine code of `folder`/`name`, which may include the *.cuh of its folder and stdint.h. CudaBuildError.

    From the cache, or by the first compiler that can make it. A damaged entry of the cache is made anew; where nothing
    can be kept, that costs a compile in every process and a warning.
    """
    try:
        headers = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cuh"))}
        sources = Sources(name, (folder / name).read_text(encoding="utf-8"), headers, defines)
    except OSError as error:
        raise CudaBuildError(f"a source is missing, install deepinfer anew: {error}") from error
    programs = nvcc_programs()
    problems: dict[str, None] = {}  # once each: a toolkit may be found by several paths
    finders: list[Callable[[], Compiler]] = [nvrtc, *(functools.partial(nvcc, program) for program in programs)]
    for find in finders:
        try:
            compiler = find()
            return Built(_cached(sources, compiler), compiler.version)
        except CudaBuildError as error:
            problems[str(error)] = None
    if not programs:
        problems[f"nvcc: neither on the PATH nor in {TOOLKITS}/cuda*/bin; install the CUDA toolkit"] = None
    raise CudaBuildError("\n".join(problems))


@contextmanager
def _asked(what: Hashable, name: str) -> Iterator[None]:
    """Around a question to the compiler `name`, whatever may be wrong with it and the files that it needs:
    CudaBuildError, and the same again, without waiting, where `what` has failed before."""
    if what in _failed:
        raise CudaBuildError(_failed[what])
    try:
        yield
    except CudaBuildError as error:
        _failed[what] = str(error)
        raise
    except Exception as error:
        _failed[what] = f"{name}: {type(error).__name__}: {error}"
        raise CudaBuildError(_failed[what]) from error


def _cached(sources: Sources, compiler: Compiler) -> bytes:
    parts = (sources.text, *(part for header in sources.headers.items() for part in header), *sources.defines)
    stem, key = sources.name.removesuffix(".cu"), entry_key(*parts, *FLAGS, compiler.version)
    try:
        folder = cache_folder()
    except OSError as error:
        logger.warning("%s is compiled in every process: there is no folder to keep it in (%s)", stem, error)
        return _compiled(sources, compiler, key)
    target = folder / f"{stem}-{key}.cubin"
    image = read_entry(target)
    if image is not None:
        return image
    image = _compiled(sources, compiler, key)
    try:
        with new_entry(target) as made:
            made.write_bytes(image)
    except OSError as error:
        logger.warning("%s is compiled in every process: %s cannot be written (%s)", stem, folder, error)
    return image


def _compiled(sources: Sources, compiler: Compiler, key: str) -> bytes:
    with _asked((compiler.compile, key), compiler.version):
        image = compiler.compile(sources)
    return image


@functools.cache
def nvrtc() -> Compiler:
    """The compiler library through `cuda.bindings`. CudaBuildError where one of the two is missing."""
    with _asked("NVRTC", "NVRTC"):
        try:
            from cuda.bindings import nvrtc as library
        except ImportError as error:
            raise CudaBuildError(
                f"NVRTC: cuda.bindings cannot be imported ({error}); torch's CUDA wheels bring it along, "
                "else pip install cuda-bindings nvidia-cuda-nvrtc"
            ) from error
        try:
            status, major, minor = library.nvrtcVersion()
        except Exception as error:  # the loader of the library has exceptions of its own
            raise CudaBuildError(
                f"NVRTC: the library cannot be loaded ({error}); pip install nvidia-cuda-nvrtc"
            ) from error
        if int(status):
            raise CudaBuildError(f"NVRTC: the library does not say its version ({status.name})")
        version = next(_wheel_versions(f"{major}.{minor}"), f"{major}.{minor}")
    return Compiler(f"NVRTC {version}", functools.partial(_compile_by_nvrtc, library, f"NVRTC {version}"))


def _wheel_versions(release: str) -> Iterator[str]:
    """Versions of installed wheels of NVRTC, which themselves are more exact than what it says."""
    for wheel in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{release.split('.')[0]}"):
        try:
            version = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{release}."):
            yield version


def _compile_by_nvrtc(library: Any, version: str, sources: Sources) -> bytes:
    headers = {**SYSTEM_HEADERS, **sources.headers}
    options = [*FLAGS, *(f"-D{define}" for define in sources.defines)]
    status, program = library.nvrtcCreateProgram(
        sources.text.encode(),
        sources.name.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    if int(status):
        raise CudaBuildError(f"{version}: no program could be made of {sources.name} ({status.name})")
    try:
        (status,) = library.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status):
            log = _text_of(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise _refused(version, sources.name, log.decode(errors="replace").rstrip("\0") or status.name)
        return _text_of(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(program)


def _text_of(size: Any, read: Any, program: Any) -> bytes:
    """What one of NVRTC's pairs of functions gives."""
    _, count = size(program)
    text = b" " * count  # written in place by the library
    (status,) = read(program, text)
    if int(status):
        raise CudaBuildError(f"NVRTC does not give its result ({status.name})")
    return text


def nvcc_programs() -> list[str]:
    """Compilers of CUDA toolkits, in the order in which they are asked: on the PATH, of the chosen toolkit, of the
    others from the newest on."""
    others = glob.glob(f"{TOOLKITS}/cuda?*")
    others.sort(key=lambda folder: [int(number) for number in re.findall(r"\d+", Path(folder).name)], reverse=True)
    programs: dict[str, str] = {}  # real path -> as it was found
    for name in ("nvcc", *(f"{folder}/bin/nvcc" for folder in (f"{TOOLKITS}/cuda", *others))):
        program = shutil.which(name)
        if program is not None:
            programs.setdefault(os.path.realpath(program), program)
    return list(programs.values())


@functools.cache
def nvcc(program: str) -> Compiler:
    """One of `nvcc_programs`. CudaBuildError where it does not say its version."""
    with _asked(program, f"nvcc: {program} does not run"):
        version = f"nvcc {_version_in(_ran([program, '--version'], VERSION_TIMEOUT_S, check=True).stdout)}"
    return Compiler(version, functools.partial(_compile_by_nvcc, program, version))


def _version_in(told: str) -> str:
    found = re.search(r"\bV([\d.]+)", told)
    return found.group(1) if found else told.strip()


def _compile_by_nvcc(program: str, version: str, sources: Sources) -> bytes:
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as name:
        folder = Path(name)
        for file, text in {sources.name: sources.text, **sources.headers}.items():
            (folder / file).write_text(text, encoding="utf-8")
        defines = [f"-D{define}" for define in sources.defines]
        command = [program, "-cubin", *FLAGS, *defines, "-o", "made.cubin", sources.name]
        done = _ran(command, TIMEOUT_S, folder)
        if done.returncode:
            raise _refused(version, sources.name, done.stderr or done.stdout)
        return (folder / "made.cubin").read_bytes()


def _ran(
    command: list[str], timeout_s: float, folder: Path | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """What it says may be in any encoding: a path, a compiler in the user's language."""
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, cwd=folder, check=check
    )


def _refused(version: str, name: str, log: str) -> CudaBuildError:
    lines = [line for line in log.splitlines() if line.strip()]
    more = [f"... and {len(lines) - LOG_LINES} lines more"] if len(lines) > LOG_LINES else []
    return CudaBuildError(
        "\n".join(
            (
                f"{version} could not compile {name} for {ARCHITECTURE}:",
                *lines[:LOG_LINES],
                *more,
                "Where the source is as released, use the CUDA release of your torch, or report these lines.",
            )
        )
    )
