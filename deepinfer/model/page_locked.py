"""Host memory that a GPU reads by itself: locked to its pages and mapped into the device's address space."""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.kernels.streams import page_lock

Bytes = npt.NDArray[np.uint8]

COPY_THREADS = 8
COPY_BYTES = 64 << 20  # that one thread copies at once


def available_bytes() -> int:
    """Memory that could be taken without swapping, page cache included (Linux's MemAvailable); 0 where unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


class PageLocked:
    """`tensor`: the bytes of an array, page-locked. In place where the array is writable memory; of a file's read-only
    map a copy is made, by threads: a file cannot be locked everywhere, and its rows rarely lie at multiples of 16
    bytes, which decides how wide a kernel reads."""

    def __init__(self, source: Bytes) -> None:
        """source: contiguous. RuntimeError where the system refuses to give or to lock so much."""
        try:
            self.tensor: Tensor = torch.from_numpy(source if source.flags.writeable else _copied(source))
        except OSError as error:
            raise RuntimeError(f"no {source.nbytes / 2**30:,.1f} GiB of host memory for a copy: {error}") from None
        unlock = page_lock(self.tensor)
        # Also where nobody closes it: memory that is freed while it is locked cannot be locked again.
        self._unlock = weakref.finalize(self, unlock)

    def close(self) -> None:
        """Unlock, if that was not done. Nothing on the device may read it any more."""
        self._unlock()


def _copied(source: Bytes) -> Bytes:
    memory = mmap.mmap(-1, max(source.nbytes, 1))
    memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, dtype=np.uint8, count=source.nbytes)
    flat = source.reshape(-1)

    def copy(start: int) -> None:
        target[start : start + COPY_BYTES] = flat[start : start + COPY_BYTES]

    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(copy, range(0, source.nbytes, COPY_BYTES)))
    return target.reshape(source.shape)
