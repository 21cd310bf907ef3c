"""Compile the C++ sources once per machine and source version, and load them through ctypes."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from deepinfer.kernels.build_cache import cache_folder, entry_key, new_entry, read_entry

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno")
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT_S = 300  # a compile takes 5 to 20 seconds on a slow machine


class Library(NamedTuple):
    handle: ctypes.CDLL | None
    explanation: str  # which compiler made it, or why there is none


def _machine() -> str:
    """What -march=native depends on: a library from another machine's cache must not be loaded."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, target: Path) -> str | None:
    """Build into `target`; -> None, or the start of what went wrong."""
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    try:
        with new_entry(target) as made:
            command = [compiler, *FLAGS, "-o", str(made), *sources]
            subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return None
    except subprocess.CalledProcessError as error:
        return error.stderr.strip()[:400]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


@functools.cache
def library() -> Library:
    """The compiled kernels, or the reason why there are none. Compiles at most once per process."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return Library(None, f"no C++ compiler found ({', '.join(COMPILERS)}); install one, e.g. the package g++")
    text = "".join(path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp"))
    target = cache_folder() / f"kernels-{entry_key(text, compiler, *FLAGS, _machine())}.so"
    if read_entry(target) is None:
        problem = _compile(compiler, target)
        if problem is not None:
            return Library(None, f"{compiler} could not build the CPU kernels: {problem}")
    try:
        return Library(ctypes.CDLL(str(target)), f"CPU kernels built by {compiler}")
    except OSError as error:
        return Library(None, f"the CPU kernels could not be loaded: {error}")
