"""What the prefix cache saves and what it costs: requests with a common prefix, a mixed batch under both loops, and the
host's index at full size. The bundled model on this machine.

    .venv/bin/python benchmarks/prefix_cache.py --json [--only shared_prefix mixed_requests index]

Targets: 32 requests with a common prefix of 3,000 tokens compute at least 85 % fewer prompt tokens than without a
cache; the overlapped loop is not slower than the plain one; the index as in benchmarks/prefix_index.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import prefix_index

from deepinfer import LLM, SamplingParams

REQUESTS, PREFIX, SUFFIX, OUTPUT = 32, 3_000, (20, 60), 8
MIXED = 200
FIRST_TEXT_ID = 300  # ids above it are plain text in the bundled tokenizer


def token_ids(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(FIRST_TEXT_ID, vocab_size - 200) for _ in range(count)]


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    """Seconds, and what the engine counted meanwhile."""
    before = _counts(llm)
    begin = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - begin
    counts = {name: value - before[name] for name, value in _counts(llm).items()}
    generated = sum(len(completion.token_id) for output in outputs for completion in output.outputs)
    tokens = [[completion.token_id for completion in output.outputs] for output in outputs]
    return {
        "seconds": round(seconds, 2),
        "prompt_tokens": sum(map(len, prompts)),
        "generated_tokens": generated,
        "output_tokens_per_second": round(generated / seconds, 1),
        "total_tokens_per_second": round((generated + sum(map(len, prompts))) / seconds, 1),
        **{name: round(value, 4) for name, value in counts.items()},
        "tokens": tokens,
    }


def _counts(llm: LLM) -> dict[str, float]:
    totals = llm.engine.core.stats().totals
    names = (
        "prefill_tokens", "replay_tokens", "prefix_hits", "windows_hit", "windows_replayed", "device_seconds",
        "idle_seconds", "schedule_seconds", "settle_seconds",
    )  # fmt: skip
    return {name: getattr(totals, name) for name in names}


def shared_prefix() -> dict[str, Any]:
    """The same 32 requests without a cache, with the exact one and with the bounded one; together, and one by one."""
    draw = random.Random(0)
    report: dict[str, Any] = {"requests": REQUESTS, "prefix_tokens": PREFIX}
    prompts: list[list[int]] = []
    params = [SamplingParams(temperature=0, max_tokens=OUTPUT)] * REQUESTS
    for mode in ("off", "exact", "bounded"):
        llm = LLM(
            "nano",
            max_num_seqs=REQUESTS,
            enable_prefix_caching=mode != "off",
            prefix_mode="exact" if mode == "off" else mode,
            verbose=False,
        )
        if not prompts:
            common = token_ids(draw, PREFIX, llm.config.vocab_size)
            prompts = [common + token_ids(draw, draw.randint(*SUFFIX), llm.config.vocab_size) for _ in range(REQUESTS)]
        report[mode] = run(llm, prompts, params)
        if mode != "off":
            other = token_ids(draw, PREFIX, llm.config.vocab_size)
            later = [other + prompt[PREFIX:] for prompt in prompts]
            alone = [run(llm, [prompt], params[:1]) for prompt in later]
            report[f"{mode}_one_by_one"] = {
                name: round(sum(part[name] for part in alone), 2)
                for name in ("seconds", "prompt_tokens", "prefill_tokens", "replay_tokens")
            }
    cold = report["off"].pop("tokens")
    for mode in ("exact", "bounded"):
        report[mode]["tokens_equal_to_cold"] = report[mode].pop("tokens") == cold
        work = report[mode]["prefill_tokens"] + report[mode]["replay_tokens"]
        report[mode]["prefill_work_saved"] = round(1 - work / report["off"]["prefill_tokens"], 4)
        one_by_one = report[f"{mode}_one_by_one"]
        work = one_by_one["prefill_tokens"] + one_by_one["replay_tokens"]
        one_by_one["prefill_work_saved"] = round(1 - work / one_by_one["prompt_tokens"], 4)
    return report


def mixed_requests() -> dict[str, Any]:
    """200 requests of all kinds under both loops, twice each, alternating; the better run counts."""
    draw = random.Random(1)
    report: dict[str, Any] = {"requests": MIXED}
    engines = {name: LLM("nano", overlap=name == "overlapped", verbose=False) for name in ("plain", "overlapped")}
    vocab_size = engines["plain"].config.vocab_size
    common = token_ids(draw, 600, vocab_size)
    prompts, params = [], []
    for number in range(MIXED):
        own = token_ids(draw, draw.choice([5, 30, 120, 400, 900]), vocab_size)
        prompts.append(common + own if number % 3 == 0 else own)
        params.append(
            SamplingParams(
                temperature=draw.choice([0.0, 0.8]),
                top_p=draw.choice([1.0, 0.9]),
                seq_seed=number,
                max_tokens=draw.choice([8, 32, 64]),
                frequency_penalty=draw.choice([0.0, 0.0, 0.2]),
            )
        )
    tokens = {}
    for _ in range(2):
        for name, llm in engines.items():
            llm.engine.cache.clear_prefix_cache()
            result = run(llm, prompts, params)
            tokens[name] = result.pop("tokens")
            if name not in report or result["seconds"] < report[name]["seconds"]:
                report[name] = result
    report["tokens_equal"] = tokens["plain"] == tokens["overlapped"]
    report["overlapped_over_plain"] = round(report["plain"]["seconds"] / report["overlapped"]["seconds"], 3)
    return report


PARTS = {"shared_prefix": shared_prefix, "mixed_requests": mixed_requests, "index": prefix_index.measure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line instead of an indented object")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run; default all")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    for name in options.only:
        print(f"measuring {name} ...", file=sys.stderr)
        report[name] = PARTS[name]()
    text = json.dumps(report, indent=None if options.json else 1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
