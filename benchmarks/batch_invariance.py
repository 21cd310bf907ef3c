"""What batch invariance costs on a GPU: the forward pass of one rank's share of a few layers, with it and without.

    python benchmarks/batch_invariance.py --layers 8 --seqs 64 --nextn 5 0

For every number of drafts a verify step of seqs x (1 + nextn) rows, as a graph where there are graphs, median of
--steps. With batch invariance, also whether its rows have the bits that they have one sequence at a time. Exits 2, with
the reason, where there is nothing to measure: without a GPU, unless --device cpu asks for that.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from typing import NamedTuple

import numpy as np
import torch

from deepinfer.bench.rank_memory import check_memory
from deepinfer.bench.rank_share import Rank, RankShare
from deepinfer.cache.edits import SetLength
from deepinfer.kernels.device import resolve_device
from deepinfer.kernels.timing import wall_seconds
from deepinfer.model.batch import Batch

NO_GPU = (
    "this machine has no GPU that torch can use, and the cost of batch invariance is one of GPU kernels: run it on a "
    "GPU; to see it run on a CPU, say --device cpu --preset tiny --ep 2 --layers 5 --seqs 3 --context 100"
)


class Figure(NamedTuple):
    rows: int
    batch_invariant: bool
    milliseconds: float
    rows_alone_differ: int | None  # of those that were computed alone; None: not looked at


def measure(share: RankShare, device: torch.device) -> Figure:
    """Builds the rank, opens its sequences and computes a verify step of all of them, over and over."""
    rank = Rank(share, device)
    if device.type == "cuda":
        rank.forward.capture()
    rank.open_sequences()
    batch = rank.verify_batch()
    seconds = []
    for _ in range(share.steps + 1):  # the first one compiles
        seconds.append(wall_seconds(lambda: rank.verify(batch), device))
        rank.rewind(batch)
    differ = _differ_alone(rank, batch) if share.batch_invariant else None
    return Figure(batch.num_rows, share.batch_invariant, 1e3 * statistics.median(seconds[1:]), differ)


def _differ_alone(rank: Rank, batch: Batch) -> int:
    """Rows of the first and the last sequence whose logits have other bits when it is alone in its step."""
    each, tokens = int(batch.lengths[0]), batch.token_ids.unflatten(0, (len(batch.chunk_slots), -1))
    with torch.inference_mode():
        together = rank.forward.forward(batch, rank.storage).unflatten(0, (len(batch.chunk_slots), -1)).clone()
        rank.rewind(batch)
        differ = 0
        for place in {0, len(batch.chunk_slots) - 1}:
            one = Batch.from_arrays(
                slots=batch.chunk_slots[place : place + 1],
                starts=batch.starts[place : place + 1],
                lengths=np.array([each]),
                num_logits=np.array([each]),
                token_ids=tokens[place],
                device=rank.device,
            )
            alone = rank.model.forward(one, rank.storage)  # planned, not padded
            rank.storage.apply([SetLength(int(one.chunk_slots[0]), int(one.starts[0]), ())])
            differ += int((alone != together[place]).any(1).sum())
    return differ


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="flash")
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--nextn", type=int, nargs="+", default=[5, 0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args(arguments)
    try:
        if asked.device == "auto" and not torch.cuda.is_available():
            raise ValueError(NO_GPU)
        device = resolve_device(asked.device)
        shares = _shares(asked, device)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    for share in shares:
        found = measure(share, device)
        alone = "" if found.rows_alone_differ is None else f", {found.rows_alone_differ} rows differ alone"
        name = "batch invariant" if share.batch_invariant else "not invariant"
        print(f"{found.rows} rows, {name}: {found.milliseconds:.2f} ms a forward pass{alone}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


def _shares(asked: argparse.Namespace, device: torch.device) -> list[RankShare]:
    """All that will be measured. ValueError where one of them cannot be: before the first one takes its minutes."""
    shares = [
        RankShare(
            preset=asked.preset,
            ep=asked.ep,
            layers=asked.layers,
            sequences=asked.seqs,
            context=asked.context,
            nextn=nextn,
            prefill_chunk=0,
            steps=asked.steps,
            batch_invariant=invariant,
            dtype="float32" if device.type == "cpu" else "bfloat16",
        )
        for nextn in asked.nextn
        for invariant in (False, True)
    ]
    for share in shares:
        share.config()
        check_memory(share, device)
    return shares


if __name__ == "__main__":
    sys.exit(main())
