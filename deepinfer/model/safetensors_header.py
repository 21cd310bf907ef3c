"""Headers of safetensors files, checked before any tensor byte is read.

Layout of a file: u64 little-endian header length n, n bytes of JSON, then the payload. The JSON maps a name to `dtype`,
`shape` and `data_offsets` [begin, end) counted from the payload's start; the payload has neither gaps nor overlaps.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000  # the format's own limit; protects against a length read from a damaged file
# Bits per element of every type that the format knows: a foreign type must be reported as such, not as damage.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that does not hold what its config promises, or a damaged file."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands. `offset` counts bytes from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file by name. Reads the header only.

    Raises CheckpointError, naming the file, if it is missing, truncated, longer than its header says, or if its tensors
    overlap or leave gaps.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or 8 + length > size:
                raise CheckpointError(
                    f"{file.name} is truncated: {size} bytes end inside the header; download it again"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{file.name} claims a header of {length} bytes; it is no safetensors file")
            text = stream.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing in {file.parent}") from None
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from None
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        start = 8 + length
        tensors = {name: _entry(file, name, entry, start) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file.name} has a damaged header ({error}); download it again") from None

    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            raise CheckpointError(
                f"{file.name}: {name} {what} ({position - start} expected, {tensor.offset - start} found)"
            )
        position += tensor.nbytes
    if position != size:
        what = "is truncated" if position > size else "has bytes after its last tensor"
        raise CheckpointError(f"{file.name} {what}: {size} bytes, its header says {position}; download it again")
    return tensors


def _entry(file: Path, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{file.name}: {name} has the unknown dtype {dtype!r}")
    wanted = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if min(shape, default=0) < 0 or begin < 0 or end - begin != wanted:
        raise CheckpointError(
            f"{file.name}: {name} {dtype} {list(shape)} needs {wanted} bytes, its offsets span {end - begin}"
        )
    return StoredTensor(file, dtype, shape, start + begin, wanted)
