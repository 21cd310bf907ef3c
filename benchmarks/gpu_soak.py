"""Ten thousand decode steps of nano on a GPU: does memory stay flat?

    python benchmarks/gpu_soak.py --steps 10000 --json soak.json

Sequences come and go all the time: greedy and drawn ones, some of them cut off by an abort, so graphs, rounds, the
runner's own path, prefills and the prefix cache all have their turn. Every `--every` steps it writes down what the
device has allocated and reserved, page-locked host memory, and the process's resident memory. Bytes allocated on the
device and page-locked ones have to be the same whenever the engine is empty and has as many graphs: what follows a pass
is recorded when it is first asked for, which for rare mixtures of requests is late. Resident memory may grow by
allocators' caches, so the second half of the run is looked at. Exits 1 where memory is not flat. A step of nano takes
a few milliseconds on an H200, so the whole run some minutes at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from deepinfer.config import EngineConfig
from deepinfer.engine.build import build_core
from deepinfer.engine.engine import Engine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.kernels import select
from deepinfer.kernels.device import resolve_device
from deepinfer.model import load_model

NANO = Path(__file__).parents[1] / "models" / "nano"
# bytes: what the last copy of an emptied engine took, some numbers a sequence, is held until the next one
PINNED_SPREAD = 4096
# bytes that torch takes from the device in the second half: a rare kind of step comes late. What leaks is allocated.
RESERVED_GROWTH = 32 << 20
RESIDENT_GROWTH = 32 << 20  # bytes in the second half of a run, at most
WARM_STEPS = 100  # and until every kind of step was seen


class Soak:
    """An engine that never runs dry, and what it took."""

    def __init__(self, device: str, drafts: int, sequences: int, seed: int = 0) -> None:
        self.device = torch.device(device)
        self._random = random.Random(seed)
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        twins = select.gpu_twins(self.device, getattr(torch, dtype))
        model = load_model(NANO, device=device, dtype=dtype, drafts=drafts > 0)
        self._vocab = model.config.vocab_size
        self._sequences = sequences
        config = EngineConfig(
            max_model_len=512,
            max_num_seqs=sequences,
            max_num_batched_tokens=256,
            num_blocks=4 * sequences,
            drafts=drafts,
            kv_format="float32" if dtype == "float32" else "hopper" if twins else "packed",
            graph_rows=sequences * (1 + drafts) if twins else 0,
            window_entries=4,
            seed=0,
        )
        self.engine = Engine(build_core(NANO, model, config))
        self.steps, self.tokens, self._requests = 0, 0, 0
        self._open: set[str] = set()

    def run(self, steps: int, every: int, sample: Callable[[dict[str, Any]], None]) -> None:
        """So many steps; every few of them the engine is emptied and memory written down."""
        end = self.steps + steps
        while self.steps < end:
            goal = min(end, self.steps + every)
            while self.steps < goal:
                while len(self._open) < self._sequences + 2:
                    self._add()
                if self._random.random() < 0.01:
                    self._forget(self._random.choice(sorted(self._open)), abort=True)
                self._step()
            while self.engine.has_unfinished:
                self._step()
            sample(self.memory())

    def _add(self) -> None:
        name, r = f"{self._requests}", self._random
        self._requests += 1
        prompt = [3 + (7 * i + r.randrange(20)) % (self._vocab // 2) for i in range(r.choice((3, 40, 130, 300)))]
        penalized = r.random() < 0.025  # a step with such a one is no round, and takes ten times as long
        params = SamplingParams(
            temperature=r.choice((0.0, 0.0, 0.8)),
            top_p=r.choice((1.0, 0.9)),
            repetition_penalty=1.2 if penalized else 1.0,
            max_tokens=r.randint(1, 60),
            seq_seed=r.randrange(1 << 30),
            ignore_eos=True,
        )
        self.engine.add_request(name, prompt, params)
        self._open.add(name)

    def _step(self) -> None:
        self.engine.step()
        self.steps += 1
        for name in [name for name in self._open if not self.engine.is_unfinished(name)]:
            self._forget(name)

    def _forget(self, name: str, abort: bool = False) -> None:
        if abort:
            self.engine.abort(name)
        output = self.engine.pop_output(name)
        self.tokens += sum(len(one.token_id) for one in output.outputs)
        self._open.discard(name)

    @property
    def late_graphs(self) -> int:
        """Graphs of what follows a pass: one per size and kind of requests, recorded at first use."""
        rounds = getattr(getattr(self.engine.core.loop, "_runner", None), "rounds", None)
        return 0 if rounds is None else len(rounds._finishes)

    def memory(self) -> dict[str, Any]:
        gc.collect()
        found: dict[str, Any] = {"step": self.steps, "tokens": self.tokens, "resident_bytes": resident_bytes()}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            found["graphs"] = self.late_graphs
            found["allocated_bytes"] = torch.cuda.memory_allocated()
            found["reserved_bytes"] = torch.cuda.memory_reserved()
            found["pinned_bytes"] = pinned_bytes()
        return found


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def pinned_bytes() -> int | None:
    """Page-locked host memory that torch's allocator holds; None where torch does not count it."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None:
        return None
    found = stats()
    for key in ("allocated_bytes.current", "allocated_bytes.allocated"):
        if key in found:
            return int(found[key])
    return None


def problems(samples: list[dict[str, Any]]) -> list[str]:
    """What was not flat, in words. samples: of an empty engine, the warm-up left out."""
    found = []
    last = [one for one in samples if one.get("graphs") == samples[-1].get("graphs")]
    for name, allowed in (("allocated_bytes", 0), ("pinned_bytes", PINNED_SPREAD)):
        values = [one[name] for one in last if one.get(name) is not None]
        if values and max(values) - min(values) > allowed:
            found.append(f"{name} went from {values[0]:,} to {values[-1]:,}, at most {max(values):,}")
    half = samples[len(samples) // 2 :]
    if len(half) > 1:
        for name, allowed in (("reserved_bytes", RESERVED_GROWTH), ("resident_bytes", RESIDENT_GROWTH)):
            values = [one[name] for one in half if name in one]
            if values and values[-1] - values[0] > allowed:
                found.append(f"{name} grew by {values[-1] - values[0]:,} in the second half")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=250, help="steps between two looks at memory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the result here")
    asked = parser.parse_args()
    try:
        resolve_device(asked.device)
    except ValueError as problem:
        print(f"{problem}; --device cpu soaks the CPU's engine")
        return 2
    soak = Soak(asked.device, asked.drafts, asked.sequences)
    samples: list[dict[str, Any]] = []
    soak.run(max(WARM_STEPS, asked.every), max(WARM_STEPS, asked.every), lambda one: None)
    began = time.perf_counter()
    with tqdm(total=asked.steps, unit="step", file=sys.stderr, mininterval=2) as bar:

        def sample(one: dict[str, Any]) -> None:
            samples.append(one)
            bar.update(asked.every)

        soak.run(asked.steps, asked.every, sample)
    seconds = time.perf_counter() - began
    wrong = problems(samples)
    device = torch.cuda.get_device_name() if soak.device.type == "cuda" else "cpu"
    result = {
        "steps": asked.steps,
        "tokens": samples[-1]["tokens"],
        "seconds": round(seconds, 1),
        "device": device,
        "drafts": asked.drafts,
        "sequences": asked.sequences,
        "problems": wrong,
        "samples": samples,
    }
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{asked.steps} steps, {result['tokens']} tokens, {seconds:.1f} s on {device}: {wrong or 'memory is flat'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
