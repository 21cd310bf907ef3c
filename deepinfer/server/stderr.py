"""Standard error that stops nobody: what is written goes through a thread.

Whoever collects the log may stop reading. A pipe is full after some hundred lines then, and the next one to write
waits: the event loop with all its streams, say, because the engine was lost and the log is to know. Here lines wait in
a queue, and are dropped when that is full (access_log.LogWriter).
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepinfer.server.access_log import LogWriter

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CLOSING_SECONDS = 2.0  # for what waits, when the process ends


class LineStream(io.TextIOBase):
    """A text stream whose whole lines are given to `write`, which must not wait."""

    encoding = "utf-8"

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        return 2


@contextmanager
def queued_stderr() -> Iterator[LogWriter]:
    """As long as it lasts, `sys.stderr` and the log are such a stream. Yields what takes further lines."""
    before, root = sys.stderr, logging.getLogger()
    writer, handler = _install()
    try:
        yield writer
    finally:
        sys.stderr = before
        root.removeHandler(handler)
        writer.close(CLOSING_SECONDS)


def queue_stderr_for_good() -> None:
    """For the rest of the process's life."""
    writer, _ = _install()
    atexit.register(writer.close, CLOSING_SECONDS)


def _install() -> tuple[LogWriter, logging.Handler]:
    # A file of its own: a thread that waits in the old one would hold its lock, at the interpreter's end too.
    writer = LogWriter(io.FileIO(os.dup(2), "wb"))
    sys.stderr = LineStream(writer.write)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    if not logging.getLogger().handlers:  # where somebody else has set the log up, it is his
        logging.getLogger().addHandler(handler)
    return writer, handler
