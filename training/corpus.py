"""Reading the text corpus and turning it into token streams.

A shard is an xz file of JSON lines {"text", "src", "kind", "name"}. A document becomes BOS + text + EOS; the documents
of one kind and one shard are stored back to back as uint16 in `<shard>.<kind>.u16`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing as mp
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

KINDS = ("prose", "doc", "code", "zh", "zh-en")
_tokenizer = None


def documents(shard: str | Path) -> Iterator[dict[str, str]]:
    """The records of one .jsonl.xz shard."""
    with lzma.open(shard, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def sample_texts(folder: str | Path, megabytes: float) -> Iterator[str]:
    """A sample for the tokeniser; Chinese is thinned because it would take a third of the merges."""
    left = megabytes * 1e6
    for shard in sorted(Path(folder).glob("train-*.jsonl.xz")):
        for number, record in enumerate(documents(shard)):
            if record["kind"].startswith("zh") and number % 4:
                continue
            text = record["text"][:200_000]
            left -= len(text.encode())
            if left < 0:
                return
            yield text


def _start(tokenizer_dir: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from training.tokenizer import load_tokenizer

    _tokenizer = load_tokenizer(tokenizer_dir)


def _encode(task: tuple[str, list[str]]) -> tuple[str, bytes]:
    kind, texts = task
    pieces = []
    for text in texts:
        # Blocks of whole lines: the BPE cache and the splitter stay fast on megabyte documents.
        ids = [0]
        for block in blocks(text):
            ids.extend(_tokenizer.encode(block, add_special_tokens=False).ids)
        pieces.append(np.array([*ids, 1], dtype=np.uint16))
    return kind, np.concatenate(pieces).tobytes()


def blocks(text: str, size: int = 50_000) -> Iterator[str]:
    """Cuts a text behind a non-blank character followed by a line break, about every `size` characters."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.find("\n", end)
            end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


def _tasks(shard: Path) -> Iterator[tuple[str, list[str]]]:
    waiting: dict[str, list[str]] = {}
    size: dict[str, int] = {}
    for record in documents(shard):
        kind = record["kind"]
        waiting.setdefault(kind, []).append(record["text"])
        size[kind] = size.get(kind, 0) + len(record["text"])
        if size[kind] > 400_000:
            yield kind, waiting.pop(kind)
            size[kind] = 0
    yield from waiting.items()


def encode_shards(shards: list[Path], tokenizer_dir: str, out: Path, processes: int) -> None:
    """Encodes shards with a process pool; a file appears under its final name only when complete."""
    out.mkdir(parents=True, exist_ok=True)
    with mp.get_context("spawn").Pool(processes, _start, (tokenizer_dir,)) as pool:
        for shard in shards:
            streams: dict[str, list[bytes]] = {}
            for kind, data in pool.imap(_encode, _tasks(shard)):
                streams.setdefault(kind, []).append(data)
            for kind, parts in streams.items():
                name = out / f"{shard.name.split('.')[0]}.{kind}.u16"
                name.with_suffix(".tmp").write_bytes(b"".join(parts))
                name.with_suffix(".tmp").rename(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", nargs="+", type=Path)
    parser.add_argument("--tokenizer", default="models/nano")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    encode_shards(args.shards, args.tokenizer, args.out, args.processes)


if __name__ == "__main__":
    main()
