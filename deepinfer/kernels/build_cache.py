"""Where compiled kernels are kept, and how a file there is known to be whole.

An entry carries the digest of its content behind it, so that it is replaced in one step whoever else is building the
same one. Loaders of shared libraries do not mind the bytes at the end.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SEAL = hashlib.sha256().digest_size  # bytes at the end of an entry

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """~/.cache/deepinfer/kernels, or where that cannot be written a folder of this user's own among temporary files.
    Where another user has that name: one of this process alone, with a warning. OSError where there is none at all."""
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
    return Path(_folder_of_this_process(folder).name)


@functools.cache
def _folder_of_this_process(taken: Path) -> tempfile.TemporaryDirectory[str]:
    """In place of `taken`; it goes when the process ends."""
    made = tempfile.TemporaryDirectory(prefix="deepinfer-kernels-", ignore_cleanup_errors=True)
    logger.warning("kernels are compiled in every process: no home to keep them in, and others may write %s", taken)
    return made


def entry_key(*parts: str) -> str:
    """The part of an entry's name that changes with any of what it was made from."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def read_entry(target: Path) -> bytes | None:
    """The content of an entry; None where there is none, or where it is not what was stored: loading a truncated
    library would kill the process."""
    try:
        data = target.read_bytes()
    except OSError:
        return None
    content, seal = data[:-SEAL], data[-SEAL:]
    return content if len(data) > SEAL and hashlib.sha256(content).digest() == seal else None


@contextmanager
def new_entry(target: Path) -> Iterator[Path]:
    """A file beside `target` to write the content into; it becomes the entry at the end, whole or not at all. OSError
    where the folder takes no file."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(descriptor)
    made = Path(name)
    try:
        yield made
        with made.open("r+b") as file:
            seal = hashlib.sha256(file.read()).digest()
            file.write(seal)
        os.replace(made, target)  # atomic: several processes may build at once
    finally:
        made.unlink(missing_ok=True)
