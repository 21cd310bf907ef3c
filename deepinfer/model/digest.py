"""Which model a directory holds, in 32 bytes: what cached state depends on besides tokens and format."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

SAMPLE = 1 << 16  # bytes


def model_digest(path: str | Path) -> bytes:
    """SHA-256 over config.json, tokenizer.json, and of every safetensors file the name, the size, the head (with the
    tensors' names and places) and samples of the weights.

    Reading all weights would take minutes for the released model. Eight samples of 64 KiB per file, spread evenly, tell
    fine-tunes apart, which change every tensor; copies of one model on several machines agree.
    """
    directory = Path(path)
    digest = sha256()
    for name in ("config.json", "tokenizer.json"):
        file = directory / name
        digest.update(f"{name}:".encode() + (file.read_bytes() if file.is_file() else b""))
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as data:
            head = int.from_bytes(data.read(8), "little")  # the format's own length of its head
            data.seek(0)
            digest.update(data.read(min(8 + head, size)))
            for sample in range(8):
                data.seek(size * sample // 8)
                digest.update(data.read(SAMPLE))
    return digest.digest()
