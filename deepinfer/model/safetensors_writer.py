"""Write safetensors files tensor by tensor: the header is computed from the shapes first, so memory stays at one
chunk."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deepinfer.model.inventory_check import INDEX_NAME, SINGLE_NAME
from deepinfer.model.tensors import DTYPE_BYTES, TensorSpec

Chunks = Iterable[memoryview]  # a tensor's bytes, in order


def plan_shards(specs: Iterable[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """Tensors per file name, in inventory order; a file is closed before it would exceed `shard_bytes`. A tensor larger
    than that gets a file of its own. One file has the single-file name and needs no index."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def header_bytes(specs: Sequence[TensorSpec]) -> bytes:
    """Length prefix and JSON of a file holding `specs` in this order, padded so that the payload starts at a multiple
    of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def aligned_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Widest elements first, so that every tensor starts at a multiple of its element size."""
    return sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def write_shards(
    directory: Path,
    shards: dict[str, list[TensorSpec]],
    content: Callable[[TensorSpec], Chunks],
    progress: Callable[[int], object] = lambda written: None,
) -> None:
    """Write every file of `shards`, then the index if there are several.

    content: the bytes of a tensor, exactly `spec.nbytes` of them. progress: called with the bytes just written.
    A file gets its final name only when it is complete.
    """
    for name, specs in shards.items():
        ordered = aligned_order(specs)
        partial = directory / f"{name}.partial"
        with partial.open("wb", buffering=0) as stream:
            stream.write(header_bytes(ordered))
            for spec in ordered:
                written = 0
                for chunk in content(spec):
                    written += _write_all(stream, chunk)
                    progress(len(chunk))
                if written != spec.nbytes:
                    raise RuntimeError(f"{spec.name}: {written} bytes were produced, its shape needs {spec.nbytes}")
        partial.rename(directory / name)
    if list(shards) != [SINGLE_NAME]:
        weight_map = {spec.name: name for name, specs in shards.items() for spec in specs}
        total = sum(spec.nbytes for specs in shards.values() for spec in specs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_all(stream: Any, chunk: memoryview) -> int:
    """A raw file may take less than it is given; loop until all is written."""
    done = 0
    while done < len(chunk):
        done += stream.write(chunk[done:])
    return done


def repeat(pool: memoryview, offset: int, nbytes: int) -> Iterator[memoryview]:
    """`nbytes` bytes of an endless repetition of `pool`, starting at `offset`."""
    while nbytes:
        piece = pool[offset : offset + nbytes]
        yield piece
        nbytes -= len(piece)
        offset = 0
