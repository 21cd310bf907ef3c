"""CPU speed of a model, beside what the machine could do at best. `make bench` runs this.

Prefill tokens/s of one prompt and decode tokens/s of several batches, greedy, float32; each through `model.forward`
(the step without sampling) and through `LLM.generate` (everything a user waits for). Every figure is a median of at
least 20 steps (--quick: 3). The limit of a shape is the larger of two times: its matrix products at torch's best
float32 speed on the same shapes, and the bytes it must read at the best bandwidth (benchmarks/step_cost.py says what is
counted). `of peak` is stricter: all operations at the best rate that any of these shapes reached.

Run it on an idle machine; the load average is recorded in the JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from machine_limits import product_seconds, read_bandwidth
from report import ROOT, commit, heading, machine, obtain
from rich.console import Console
from rich.table import Table
from shapes import Shape, cpu_shapes
from step_cost import StepCost, step_cost

from deepinfer import LLM, SamplingParams
from deepinfer.cache import Cache, blocks_for
from deepinfer.kernels import select
from deepinfer.kernels.weights import DenseWeight, PackedWeight
from deepinfer.model import Chunk
from deepinfer.model.backbone import DeepseekV41

TEXT = ROOT / "LICENSE"  # English that every clone has; prompts are cuts of it
STEPS, QUICK_STEPS, WARM_UP = 24, 3, 2
STEP_TOKENS = 1024  # tokens per step of LLM.generate, the engine's default on a CPU
BEGIN, END = "<!-- cpu_throughput: begin -->", "<!-- cpu_throughput: end -->"
PEER = "none runs V4.1 on a CPU"
Json = dict[str, Any]


# -- prompts and steps ----------------------------------------------------------------------------------------------


def prompts(llm: LLM, batch: int, length: int) -> list[list[int]]:
    """`batch` different cuts of the text, `length` tokens each."""
    ids = llm.tokenizer.encode_text(TEXT.read_text(encoding="utf-8"))
    ids *= -(-(length + 7 * batch) // len(ids))
    return [ids[7 * number : 7 * number + length] for number in range(batch)]


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def forward_prefill(llm: LLM, shape: Shape, steps: int) -> list[float]:
    (ids,) = prompts(llm, 1, shape.new)
    cache = Cache.for_model(llm.model, max_num_seqs=1, num_blocks=blocks_for(shape.new))
    times = []
    for _ in range(WARM_UP + steps):
        slot = cache.open()
        cache.reserve(slot, shape.new)
        chunk = Chunk(slot, 0, ids, 1)
        times.append(timed(lambda chunk=chunk: llm.model.forward([chunk], cache)))  # type: ignore[misc]
        cache.close(slot)
    return times[WARM_UP:]


def forward_decode(llm: LLM, shape: Shape, steps: int) -> tuple[list[float], int]:
    """Step times, and the mean number of distinct routed experts of a layer in one of the steps."""
    total = shape.context + WARM_UP + steps + 1
    cache = Cache.for_model(llm.model, max_num_seqs=shape.batch, num_blocks=shape.batch * blocks_for(total))
    tokens = []
    slots = [cache.open() for _ in range(shape.batch)]
    for slot, ids in zip(slots, prompts(llm, shape.batch, shape.context), strict=True):
        cache.reserve(slot, total)
        tokens.append(int(llm.model.forward([Chunk(slot, 0, ids, 1)], cache).argmax()))
    hits: list[int] = []

    def count_experts(name: str, value: torch.Tensor) -> None:
        if name.endswith("ffn.router_ids"):
            hits.append(value.unique().numel())

    times = []
    for step in range(1 + WARM_UP + steps):
        chunks = [Chunk(slot, shape.context + step, [token]) for slot, token in zip(slots, tokens, strict=True)]
        llm.model.trace = count_experts if step == 0 else None
        start = time.perf_counter()
        logits = llm.model.forward(chunks, cache)
        times.append(time.perf_counter() - start)
        tokens = logits.argmax(-1).tolist()
    return times[1 + WARM_UP :], round(statistics.mean(hits))


def generate_prefill(llm: LLM, shape: Shape, steps: int) -> list[float]:
    ids = prompts(llm, 1, shape.new)
    params = SamplingParams(temperature=0, max_tokens=1)
    run = lambda: llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)  # noqa: E731
    return [timed(run) for _ in range(WARM_UP + steps)][WARM_UP:]


def decode_tokens(shape: Shape, steps: int) -> int:
    """Output tokens until `steps` steps have been timed: while the last prompts are computed, the first sequence is
    already some tokens ahead."""
    return -(-shape.batch * (shape.context + 1) // STEP_TOKENS) + 1 + WARM_UP + steps


def generate_decode(llm: LLM, shape: Shape, steps: int) -> list[float]:
    """Times of the engine's steps in which every sequence decodes and none is in its prompt."""
    params = SamplingParams(temperature=0, max_tokens=decode_tokens(shape, steps), ignore_eos=True)
    seen: set[str] = set()
    times: list[float] = []
    step = llm.engine.step

    def timed_step() -> list:
        start = time.perf_counter()
        deltas = step()
        took = time.perf_counter() - start
        ids = {delta.request_id for delta in deltas}
        if len(ids) == shape.batch and ids <= seen:
            times.append(took)
        seen.update(ids)
        return deltas

    ids = prompts(llm, shape.batch, shape.context)
    with patch.object(llm.engine, "step", timed_step):
        llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
    return times[WARM_UP:]


# -- limits ---------------------------------------------------------------------------------------------------------


def weight_bytes(model: DeepseekV41) -> float:
    """Bytes per weight in the form that the model holds."""
    if isinstance(model.head, PackedWeight):
        return model.head.packed.itemsize
    return model.head.values.itemsize if isinstance(model.head, DenseWeight) else 4


def limit(cost: StepCost, held: float, budget_s: float) -> Json:
    seconds = {product: product_seconds(product, budget_s) for product in set(cost.products)}
    nbytes = cost.bytes(held)
    bandwidth = read_bandwidth(nbytes, 5 * budget_s)
    products_s = sum(seconds[product] * product.times for product in cost.products)
    best = max(product.flops / product.times / seconds[product] for product in cost.products)
    return {
        "flops": cost.flops,
        "matmul_flops_per_s": cost.flops / products_s,
        "matmul_s": products_s,
        "best_flops_per_s": best,
        "bytes": nbytes,
        "bytes_per_s": bandwidth,
        "read_s": nbytes / bandwidth,
        "limit_s": max(products_s, nbytes / bandwidth),
        "peak_limit_s": max(cost.flops / best, nbytes / bandwidth),
    }


def figure(path: str, shape: Shape, times: list[float], bound: Json) -> Json:
    median = statistics.median(times)
    return {
        "figure": shape.figure,
        "path": path,
        "batch": shape.batch,
        "context": shape.context,
        "new": shape.new,
        "shape": str(shape),
        "steps": len(times),
        "median_s": median,
        "min_s": min(times),
        "tokens_per_s": shape.rows / median,
        "limit_tokens_per_s": shape.rows / bound["limit_s"],
        "percent_of_limit": 100 * bound["limit_s"] / median,
        "percent_of_peak": 100 * bound["peak_limit_s"] / median,
        "limit": bound,
    }


# -- the run --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Json:
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = cpu_shapes(options.prefill, options.context, tuple(options.batches))
    steps, budget = (QUICK_STEPS, 0.02) if options.quick else (STEPS, 0.15)
    most = max(options.batches)
    longest = max(shape.context + (decode_tokens(shape, steps) if shape.context else shape.new + 1) for shape in shapes)
    load = os.getloadavg()[0]
    llm = LLM(
        options.model,
        device="cpu",
        nextn=0,
        enable_prefix_caching=False,  # every repetition computes its prompt
        max_model_len=longest,
        max_num_seqs=most,
        max_num_batched_tokens=max(STEP_TOKENS, most),
        num_blocks=most * (blocks_for(longest) + 1),  # + 1: the scheduler keeps some free while others run
        verbose=False,
    )
    held = weight_bytes(llm.model)
    figures = []
    for shape in shapes:
        print(f"{shape.figure} {shape} ...", file=sys.stderr)
        if shape.figure == "prefill":
            direct, hit = forward_prefill(llm, shape, steps), None
            whole = generate_prefill(llm, shape, steps)
        else:
            direct, hit = forward_decode(llm, shape, steps)
            whole = generate_decode(llm, shape, steps)
        bound = limit(step_cost(llm.config, shape, hit), held, budget)
        figures += [figure("model.forward", shape, direct, bound), figure("LLM.generate", shape, whole, bound)]
    return {
        "benchmark": "cpu_throughput",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(load),
        "model": llm.path.name,
        "kernels": select.explain(llm.model.device, llm.model.numerics.dtype),
        "dtype": llm.settings.dtype,
        "bytes_per_weight": held,
        "quick": options.quick,
        "figures": figures,
    }


def show(result: Json) -> None:
    table = Table(title=heading(result), title_justify="left")
    for name in ("figure", "shape", "through"):
        table.add_column(name)
    for name in ("tokens/s", "limit", "of limit", "of peak", "bound by"):
        table.add_column(name, justify="right")
    for f in result["figures"]:
        table.add_row(*cells(f))
    Console(width=120).print(table)


def cells(f: Json) -> list[str]:
    bound = "products" if f["limit"]["matmul_s"] >= f["limit"]["read_s"] else "reads"
    rates = [f"{f['tokens_per_s']:,.0f}", f"{f['limit_tokens_per_s']:,.0f}"]
    shares = [f"{f['percent_of_limit']:.0f} %", f"{f['percent_of_peak']:.0f} %"]
    return [f["figure"], f["shape"], f["path"], *rates, *shares, bound]


def markdown(result: Json) -> str:
    """The table of docs/performance.md."""
    where = f"{result['machine']['cpu']}, {result['machine']['threads']} threads"
    lines = [heading(result) + ".", ""]
    lines.append("| figure | tokens/s | limit | of limit | of peak | bound by | peer | shape | machine |")
    lines.append("|---|---:|---:|---:|---:|---|---|---|---|")
    for f in result["figures"]:
        name, shape, path, *rest = cells(f)
        lines.append(f"| {' | '.join([f'{name}, `{path}`', *rest, PEER, shape, where])} |")
    return "\n".join(lines)


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, hub id or nano; default DEEPINFER_HF_MODEL_DIR or nano")
    parser.add_argument("--threads", type=int, help="threads of torch and of the CPU kernels; default as torch chooses")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    parser.add_argument("--input", type=Path, help="show this JSON again, measure nothing")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="put the table between the marks of this page")
    parser.add_argument("--quick", action="store_true", help="3 steps per figure, to see that it runs")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt (default 2048)")
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step (default 512)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences per decode step")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    result = obtain(options, measure, markdown, (BEGIN, END))
    show(result)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
