"""Writes synthetic token streams with many processes.

python -m training.synth.build chat --phrases FILE --out DIR --count 120000
python -m training.synth.build look --length 4096 --data DIR --out DIR --count 4000
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
from pathlib import Path

import numpy as np

from training.marks import mark_turns

_state: dict[str, object] = {}


def _start(tokenizer_dir: str, phrases: str, data: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from training.synth.lookup import Haystack
    from training.synth.render import Phrases
    from training.tokenizer import ASSISTANT, EOS, load_tokenizer

    tokenizer = load_tokenizer(tokenizer_dir)
    _state["turn"] = [tokenizer.token_to_id(token) for token in (ASSISTANT, EOS)]
    _state["encode"] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    _state["phrases"] = Phrases.load(phrases) if phrases else None
    files = [f for kind in ("prose", "doc") for f in sorted(Path(data).glob(f"*.{kind}.u16"))] if data else []
    _state["hay"] = Haystack([np.memmap(f, dtype=np.uint16, mode="r") for f in files])


def _chats(task: tuple[int, int, int]) -> bytes:
    from training.synth.chats import chat

    seed, count, _ = task
    rng = random.Random(seed)
    ids: list[int] = []
    for _ in range(count):
        ids += mark_turns(_state["encode"](chat(rng, _state["phrases"])), *_state["turn"])
    return np.array(ids, dtype=np.uint16).tobytes()


def _looks(task: tuple[int, int, int]) -> bytes:
    from training.synth.lookup import row

    seed, count, length = task
    rng = random.Random(seed)
    rows = [row(rng, length, _state["hay"], _state["encode"]) for _ in range(count)]
    return np.array(rows, dtype=np.uint16).tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["chat", "look"])
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--phrases", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--tokenizer", default="models/nano")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    step = max(1, args.count // (args.processes * 4))
    seeds = range(0, args.count, step)
    tasks = [(args.seed * 1_000_003 + s, min(step, args.count - s), args.length) for s in seeds]
    with mp.get_context("spawn").Pool(args.processes, _start, (args.tokenizer, args.phrases, args.data)) as pool:
        data = b"".join(pool.imap(_chats if args.what == "chat" else _looks, tasks))
    name = args.out / f"synth-{args.seed}.{args.what}{args.length or ''}.u16"
    name.with_suffix(".tmp").write_bytes(data)
    name.with_suffix(".tmp").rename(name)


if __name__ == "__main__":
    main()
