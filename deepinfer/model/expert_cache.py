"""Shuffled experts on disk, where a user asks for it: one file per layer, so that a second load reads what the first
one laid out (`kernels/triton/experts_layout.py`).

    DIRECTORY/<layout and checkpoint>/<layer>.experts     head, JSON, padded to 4 KiB; then the bank's tensors

A file is written beside its name and then renamed, so nobody ever reads half of one, and the next load removes what a
killed process left (`temporary_file.py`); it is mapped, and every 64 MiB of it are checked against their CRC-32 before
they are used. What does not fit (another checkpoint, another layout, another part of the experts), is cut short or
damaged is told of in the log and written anew: the cache is never the reason why a model is another one.
"""

from __future__ import annotations

import json
import logging
import mmap
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.model.digest import model_digest
from deepinfer.model.temporary_file import remove_abandoned, replacing

if TYPE_CHECKING:
    from deepinfer.kernels.triton.experts_layout import ShuffledBank

logger = logging.getLogger(__name__)

LAYOUT = 1  # of the bank's bytes: to be raised with every change of `experts_layout.shuffle` or of the head below
MAGIC = b"DIEXPERT"
HEAD = 4096  # bytes that the head is padded to a multiple of
PIECE = 64 << 20  # bytes that are checked at once, by one thread
THREADS = 8
SUFFIX = ".experts"


class ExpertCache:
    """The banks of one checkpoint in a directory."""

    def __init__(self, directory: Path, checkpoint: str | Path) -> None:
        """directory: the user's; checkpoint: whose files name what is cached (`model_digest`)."""
        self._model = model_digest(checkpoint).hex()
        self._root = directory
        self.directory = directory / f"{LAYOUT}-{self._model[:32]}"
        self._full = False
        self.read_layers = self.written_layers = 0

    def check(self, banks: Iterable[tuple[str, int]]) -> None:
        """Names of banks and their bytes, all that will be asked for. ValueError where those that are missing cannot be
        written: the directory cannot be made or written to, or has no room for them. Removes what processes left that
        were killed while they wrote."""
        try:
            if freed := remove_abandoned(self.directory, SUFFIX):
                logger.info("expert_cache: %.2f GiB of a killed process's files removed", freed / 2**30)
            missing = sum(size + HEAD for name, size in banks if not self._file(name).exists())
            if not missing:
                return
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise ValueError(f"expert_cache: {self._root} cannot be written to: {error}") from error
        if missing > free:
            raise ValueError(
                f"expert_cache: {self._root} has {free / 2**30:,.2f} GiB free, the experts that are not there yet take "
                f"{missing / 2**30:,.2f} GiB; make room, name another directory, or leave expert_cache out"
            )

    def read(self, name: str, bank: ShuffledBank) -> int | None:
        """Fills the bank with what is stored under the name -> groups that were rounded when it was made; None where
        nothing is stored that can be used."""
        file = self._file(name)
        try:
            rounded = self._fill(file, name, bank)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("expert_cache: %s cannot be used and is made anew: %s", file, error)
            return None
        self.read_layers += 1
        return rounded

    def write(self, name: str, bank: ShuffledBank, rounded: int) -> None:
        """Stores the bank under the name. A disk that refuses is told of once, and no more is written."""
        if self._full:
            return
        file = self._file(name)
        parts = [tensor.cpu().contiguous().view(torch.uint8).view(-1).numpy() for tensor in _tensors(bank)]
        head = {**self._expected(name, bank), "rounded": rounded, "checks": _checks(parts)}
        text = json.dumps(head).encode()
        start = -(-(len(MAGIC) + 8 + len(text)) // HEAD) * HEAD
        try:
            with replacing(file) as stream:
                stream.write((MAGIC + len(text).to_bytes(8, "little") + text).ljust(start, b"\0"))
                for part in parts:
                    stream.write(part.data)
        except OSError as error:
            self._full = True
            logger.warning("expert_cache: %s was not written, nor will more be: %s", file, error)
            return
        self.written_layers += 1

    def tell(self) -> None:
        """One line in the log: what was read and what was written."""
        logger.info(
            "expert_cache: %d layers read from %s, %d written", self.read_layers, self.directory, self.written_layers
        )

    # -- parts ----------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"

    def _expected(self, name: str, bank: ShuffledBank) -> dict[str, Any]:
        sizes = {"first": bank.first, "experts": bank.experts, "inner": bank.inner, "width": bank.width}
        return {"layout": LAYOUT, "model": self._model, "name": name, **sizes}

    def _fill(self, file: Path, name: str, bank: ShuffledBank) -> int:
        """OSError, and ValueError saying what is wrong with the file; then the bank is not to be used either."""
        with file.open("rb") as stream:
            # A private map: torch wants memory that it might write to, and nobody does.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        head, start = _head(mapped)
        expected = self._expected(name, bank)
        if wrong := [key for key, value in expected.items() if head.get(key) != value]:
            told = ", ".join(f"{key} {head.get(key)!r}, not {expected[key]!r}" for key in wrong)
            raise ValueError(f"it is of something else: {told}")
        tensors = _tensors(bank)
        size = sum(tensor.nbytes for tensor in tensors)
        if len(mapped) != start + size:
            raise ValueError(f"it has {len(mapped):,} bytes instead of {start + size:,}")
        payload = np.frombuffer(mapped, np.uint8, size, start)
        if _checks([payload]) != head.get("checks"):
            raise ValueError("its bytes are not those that were written")
        at = 0
        for tensor in tensors:
            part = torch.from_numpy(payload[at : at + tensor.nbytes])
            tensor.view(torch.uint8).view(-1).copy_(part)
            at += tensor.nbytes
        return int(head["rounded"])


def bank_bytes(experts: int, inner: int, width: int) -> int:
    """Of a bank of so many experts, w1 and w3 [inner, width] and w2 [width, inner]."""
    from deepinfer.kernels.triton.experts_layout import ShuffledBank

    return sum(tensor.nbytes for tensor in _tensors(ShuffledBank.empty(experts, inner, width, torch.device("meta"))))


def _tensors(bank: ShuffledBank) -> list[Tensor]:
    """In the order in which they are stored."""
    return [tensor for half in (bank.up, bank.down) for tensor in (half.codes, half.scales, half.factors)]


def _head(mapped: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The head of a file and where the tensors begin. ValueError where there is none."""
    first = len(MAGIC) + 8
    end = first + int.from_bytes(mapped[len(MAGIC) : first], "little")
    if mapped[: len(MAGIC)] != MAGIC or end > len(mapped):
        raise ValueError("its head cannot be read")
    try:
        head = json.loads(mapped[first:end])
    except ValueError:
        head = None
    if not isinstance(head, dict):
        raise ValueError("its head cannot be read")
    return head, -(-end // HEAD) * HEAD


def _checks(parts: Sequence[np.ndarray]) -> list[str]:
    """CRC-32 of every PIECE of the bytes of all parts one behind the other, as text."""
    pieces: list[list[memoryview]] = [[]]
    room = PIECE
    for part in parts:
        view = part.data
        while len(view):
            if not room:
                pieces.append([])
                room = PIECE
            pieces[-1].append(view[:room])
            taken = len(pieces[-1][-1])
            view, room = view[taken:], room - taken

    def check(piece: list[memoryview]) -> str:
        value = 0
        for view in piece:  # zlib lets other threads run meanwhile
            value = zlib.crc32(view, value)
        return f"{value:08x}"

    with ThreadPoolExecutor(THREADS, "expert-cache") as pool:
        return list(pool.map(check, pieces))
