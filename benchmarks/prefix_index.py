"""What the host's side of the cache costs, without a model: hashing, lookup, blocks. Prints JSON.

    .venv/bin/python benchmarks/prefix_index.py [--repeat 20] [--tokens 1048576]

Figures are medians in milliseconds, single thread, each repetition on fresh state where state matters: wall time, which
the targets are about, and the process's own time, which does not grow when the machine is shared.
Targets (issue "engine"): cold hash + lookup of a 1M-token prompt <= 60 ms, incremental <= 5 ms, taking and releasing
8,192 blocks <= 2 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from deepinfer.cache.hashing import HashChain, namespace
from deepinfer.cache.manager import CacheManager
from deepinfer.config import BLOCK_SIZE

TARGETS_MS = {"cold_hash_and_lookup": 60.0, "incremental_hash_and_lookup": 5.0, "take_and_release": 2.0}
NAMESPACE = namespace("benchmark", "packed", 1)


class Figure(NamedTuple):
    """Milliseconds."""

    wall: float
    own: float

    def over(self, count: float) -> Figure:
        return Figure(self.wall / count, self.own / count)


def median_ms(repeat: int, action: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> Figure:
    """Medians over `repeat` runs of `action`, each after an untimed `prepare`."""
    wall, own = [], []
    for _ in range(repeat):
        prepare()
        start, start_own = time.perf_counter(), time.process_time()
        action()
        own.append(time.process_time() - start_own)
        wall.append(time.perf_counter() - start)
    return Figure(1e3 * statistics.median(wall), 1e3 * statistics.median(own))


def make_manager(num_blocks: int, mode: str = "bounded") -> CacheManager:
    """Sizes of the real model: window 128, 40 layers, 3 tokens of look-back."""
    return CacheManager(
        max_num_seqs=4,
        num_blocks=num_blocks,
        table_width=num_blocks,
        window=128,
        num_layers=40,
        prefix_caching=mode,
        lookback=3,
    )


def fill(cache: CacheManager, chain: HashChain, tokens: int) -> None:
    """A sequence with these hashes was computed and has gone."""
    slot = cache.open()
    cache.reserve(slot, tokens)
    cache.publish(slot, chain, tokens)
    cache.close(slot)
    cache.take_edits()


def hash_and_lookup(num_tokens: int, repeat: int) -> dict[str, Figure]:
    """cold: a prompt that nobody has hashed, all of it in the cache. incremental: the same with one new block, as after
    each block of output. adopt: taking the hit. sha256_alone: the hash function over the same bytes, the limit."""
    token_ids = np.random.default_rng(0).integers(0, 129_280, num_tokens + 2 * BLOCK_SIZE, dtype=np.int32)
    cache = make_manager(num_tokens // BLOCK_SIZE + 2)
    known = HashChain(NAMESPACE)
    known.extend(token_ids)
    fill(cache, known, num_tokens)

    def cold() -> None:
        chain = HashChain(NAMESPACE)
        chain.extend(token_ids[:num_tokens])
        assert cache.find(chain, num_tokens).length >= num_tokens - 2 * BLOCK_SIZE

    def shorten() -> None:
        del known.hashes[num_tokens // BLOCK_SIZE :]

    def incremental() -> None:
        known.extend(token_ids[: num_tokens + BLOCK_SIZE])
        assert cache.find(known, num_tokens + BLOCK_SIZE).length >= num_tokens - BLOCK_SIZE

    def adopt() -> None:
        slot = cache.open()
        cache.adopt(slot, hit, token_ids)
        cache.close(slot)
        cache.take_edits()

    hit = cache.find(known, num_tokens)
    data = token_ids[:num_tokens].tobytes()
    blocks = [data[start : start + 4 * BLOCK_SIZE] + bytes(16) for start in range(0, len(data), 4 * BLOCK_SIZE)]
    return {
        "cold_hash_and_lookup": median_ms(repeat, cold),
        "incremental_hash_and_lookup": median_ms(repeat, incremental, shorten),
        "lookup": median_ms(repeat, lambda: cache.find(known, num_tokens)),
        "adopt_and_close": median_ms(repeat, adopt),
        "sha256_alone": median_ms(repeat, lambda: [sha256(block).digest() for block in blocks]),
    }


def blocks(count: int, repeat: int) -> dict[str, Figure]:
    """take_and_release: reserve for one sequence and close it, through the manager, edits included. Then the same where
    every block has to be evicted first, publishing what a sequence computed, and one block at a time."""
    chain, other = HashChain(NAMESPACE), HashChain(NAMESPACE + b"other")
    token_ids = np.random.default_rng(1).integers(0, 129_280, count * BLOCK_SIZE, dtype=np.int32)
    for one in (chain, other):
        one.extend(token_ids)
    tokens = count * BLOCK_SIZE
    plain, full = make_manager(count, "off"), make_manager(count)
    fill(full, chain, tokens)

    def take_and_release() -> None:
        slot = plain.open()
        plain.reserve(slot, tokens)
        plain.close(slot)
        plain.take_edits()

    def evict_and_free() -> None:
        slot = full.open()
        full.reserve(slot, tokens)
        full.close(slot)
        full.take_edits()

    def publish() -> None:
        full.publish(publisher[0], chain, tokens)

    publisher: list[int] = []

    def prepare_publish() -> None:
        for slot in publisher:
            full.close(slot)
        full.clear_prefix_cache()
        publisher[:] = [full.open()]
        full.reserve(publisher[0], tokens)
        full.take_edits()

    growing = plain.open()

    def grow() -> None:
        for block in range(count):
            plain.reserve(growing, block * BLOCK_SIZE + 1)

    def restart() -> None:
        nonlocal growing
        plain.close(growing)
        growing = plain.open()
        plain.take_edits()

    figures = {
        "take_and_release": median_ms(repeat, take_and_release),
        "evict_all_and_free": median_ms(repeat, evict_and_free, lambda: fill(full, other, tokens)),
        "publish": median_ms(repeat, publish, prepare_publish),
        "grow_by_one_block": median_ms(max(3, repeat // 4), grow, restart).over(count),
    }
    plain.check_integrity()
    full.check_integrity()
    return figures


def measure(tokens: int = 1 << 20, count: int = 8192, repeat: int = 20) -> dict[str, Any]:
    """All figures, the targets, and which of them the wall time missed."""
    figures = hash_and_lookup(tokens, repeat) | blocks(count, repeat)
    missed = [name for name, target in TARGETS_MS.items() if figures[name].wall > target]
    return {
        "tokens": tokens,
        "blocks": count,
        "repeat": repeat,
        "wall_ms": {name: round(figure.wall, 4) for name, figure in figures.items()},
        "process_ms": {name: round(figure.own, 4) for name, figure in figures.items()},
        "targets_ms": TARGETS_MS,
        "missed": missed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=20)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.tokens, arguments.blocks, arguments.repeat), indent=2))


if __name__ == "__main__":
    main()
