"""Files that are written beside their name and then renamed, by processes that may be killed meanwhile.

Who writes one holds a lock on it, which the system takes back when the process ends, however it ends. So a file that
nobody has locked is nobody's, and may be removed; its age would not tell, for a disk may be slow or a clock wrong.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(file: Path) -> Iterator[IO[bytes]]:
    """A new file in the directory of `file`, which takes its place when the block is left, on disk and readable by all,
    and is removed if an exception leaves the block. OSError where the system refuses."""
    stream = _locked_file(file)
    temporary = Path(stream.name)
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)  # a temporary file is its owner's alone
            temporary.replace(file)  # before the lock is given up with the file
    finally:
        temporary.unlink(missing_ok=True)


def remove_abandoned(directory: Path, suffix: str) -> int:
    """Removes what killed processes left in the directory of files whose name ends so -> bytes that were freed. What
    another process is writing stays, and so does all that cannot be locked or removed."""
    freed = 0
    for path in directory.glob(f".*{suffix}.*"):
        with suppress(OSError), path.open("r+b") as stream:  # NFS locks what may be written
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody writes it
            size = os.fstat(stream.fileno()).st_size
            path.unlink()  # under the lock: see _locked_file
            freed += size
    return freed


def _locked_file(file: Path) -> IO[bytes]:
    while True:
        stream = tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False)  # noqa: SIM115
        with suppress(OSError):  # a file system without locks: then nobody else can lock it either, so it is left alone
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()  # between these two calls somebody took it for abandoned
