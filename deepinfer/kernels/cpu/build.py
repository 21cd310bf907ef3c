"""Compile the C++ sources once per machine and source version, and load them through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

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


def _cache_folder() -> Path:
    """~/.cache/deepinfer/kernels, or without a usable home a folder of this user's own among temporary files."""
    try:
        folder = Path.home() / ".cache" / "deepinfer" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    folder = Path(tempfile.gettempdir()) / f"deepinfer-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return folder  # nobody else can have put a library there
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="deepinfer-kernels-"))


def _is_whole(target: Path) -> bool:
    """Whether the library is the file that was built: loading a truncated one would kill the process."""
    try:
        return _digest(target) == target.with_suffix(".sha256").read_text()
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(compiler: str, target: Path) -> str | None:
    """Build into `target`; -> None, or the start of what went wrong."""
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    descriptor, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [compiler, *FLAGS, "-o", name, *sources]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            return done.stderr.strip()[:400]
        seal = Path(name).with_suffix(".seal")
        seal.write_text(_digest(Path(name)))
        os.replace(name, target)  # atomic: several processes may build at once; one that sees an old seal builds again
        os.replace(seal, target.with_suffix(".sha256"))
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        Path(name).unlink(missing_ok=True)


@functools.cache
def library() -> Library:
    """The compiled kernels, or the reason why there are none. Compiles at most once per process."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return Library(None, f"no C++ compiler found ({', '.join(COMPILERS)}); install one, e.g. the package g++")
    text = "".join(path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp"))
    key = hashlib.sha256("\n".join((text, compiler, *FLAGS, _machine())).encode()).hexdigest()[:24]
    target = _cache_folder() / f"kernels-{key}.so"
    if not _is_whole(target):
        problem = _compile(compiler, target)
        if problem is not None:
            return Library(None, f"{compiler} could not build the CPU kernels: {problem}")
    try:
        return Library(ctypes.CDLL(str(target)), f"CPU kernels built by {compiler}")
    except OSError as error:
        return Library(None, f"the CPU kernels could not be loaded: {error}")
