"""Damage a checkpoint on purpose: rewrite a safetensors file with a changed header or payload."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, dict[str, Any]]


def load(file: Path) -> tuple[Header, bytes]:
    """Header without metadata, and payload."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, raw[8 + length :]


def store(file: Path, header: Header, payload: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + payload)


def rewrite(file: Path, change: Callable[[dict[str, tuple[str, list[int], bytes]]], None]) -> None:
    """Let `change` edit name -> (dtype, shape, bytes), then write a consistent file again."""
    header, payload = load(file)
    tensors = {n: (e["dtype"], e["shape"], payload[slice(*e["data_offsets"])]) for n, e in header.items()}
    change(tensors)
    fresh: Header = {}
    out = b""
    for name, (dtype, shape, raw) in tensors.items():
        fresh[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(out), len(out) + len(raw)]}
        out += raw
    store(file, fresh, out)


def poke(file: Path, name: str, element: bytes, at: int = 0) -> None:
    """Overwrite bytes inside a tensor, in place."""
    header, _ = load(file)
    raw = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    start = 8 + length + header[name]["data_offsets"][0] + at
    raw[start : start + len(element)] = element
    file.write_bytes(raw)
