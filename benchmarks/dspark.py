"""What drafting brings: acceptance by kind of text, and tokens per second without drafts, with a fixed number and with
as many as pay. `make bench` runs this.

    .venv/bin/python benchmarks/dspark.py [--json] [--output results/dspark.json] [--markdown docs/performance.md]

Prompts: benchmarks/prompts/drafting.jsonl (training/draft_prompts.py says where they are from). Three parts:
acceptance: all drafts verified, greedy and at temperature 1 by either rule of acceptance.
speed: a constant number of sequences decodes greedily; a prompt takes the place of one that has ended. Steps with a
prompt in them do not count. The engines of the three modes take turns of a fraction of a second, so that a busy moment
of the machine hits all three.
scheduling: the host's time to choose how many drafts a step verifies, and which.

Acceptance does not depend on the machine; run the rest on an idle one. The load average is recorded in the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
from draft_scheduling import scheduling_cost
from report import ROOT, commit, heading, machine, obtain
from rich.console import Console
from rich.table import Table

from deepinfer import LLM, SamplingParams
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.config import blocks_for
from deepinfer.metrics.drafts import DraftStats
from deepinfer.model.hub import resolve_model

PROMPTS = ROOT / "benchmarks" / "prompts" / "drafting.jsonl"
PARTS = ("acceptance", "speed", "scheduling")
MODES: dict[str, dict[str, Any]] = {"off": {"nextn": 0}, "fixed": {"mtp_varlen": False}, "varlen": {"mtp_varlen": True}}
CONCURRENCY, QUICK_CONCURRENCY = (1, 4, 16, 32, 64), (1, 2)
TOKENS, QUICK_TOKENS = 96, 12  # of a sequence, in every part
LEAST_PROMPTS = 8  # that a row of the table sees: one alone says little of drafts
SLICE_S = 0.4  # an engine's turn; it finds its caches cold, for a step or two
SEQUENCES = 256  # that the scheduling cost is measured with
BEGIN, END = "<!-- dspark: begin -->", "<!-- dspark: end -->"
Json = dict[str, Any]
Prompts = dict[str, list[list[int]]]  # token ids by kind


def read_prompts(tokenizer: Tokenizer, file: Path, most: int | None) -> Prompts:
    """At most so many of each kind."""
    kinds: Prompts = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        ids = kinds.setdefault(entry["kind"], [])
        if most is None or len(ids) < most:
            ids.append(tokenizer.encode_prompt(entry["text"], add_bos=True))
    return kinds


# -- acceptance -----------------------------------------------------------------------------------------------------


def acceptance(engines: dict[str, LLM], prompts: Prompts, tokens: int) -> list[Json]:
    """By law and kind. engines: of the requests with the coupled rule, and of those with the residual one."""
    figures = []
    laws = (("greedy", "coupled", 0.0), ("coupled", "coupled", 1.0), ("residual", "residual", 1.0))
    entries = [(kind, ids) for kind, part in prompts.items() for ids in part]
    for law, engine, temperature in laws:
        print(f"acceptance, {law} ...", file=sys.stderr)
        params = SamplingParams(temperature=temperature, max_tokens=tokens)
        outputs = engines[engine].generate(
            prompt_token_ids=[ids for _, ids in entries], sampling_params=params, use_tqdm=False
        )
        whole = DraftStats()
        by_kind = {kind: DraftStats() for kind in prompts}
        for (kind, _), output in zip(entries, outputs, strict=True):
            for stats in (by_kind[kind], whole):
                stats.merge(output.metrics.drafts)
        for kind, stats in (*by_kind.items(), ("all", whole)):
            number = len(prompts[kind]) if kind in prompts else len(entries)
            figures.append({"kind": kind, "law": law, "temperature": temperature, "prompts": number, **counts(stats)})
    return figures


def counts(stats: DraftStats) -> Json:
    return {
        "rounds": stats.rounds,
        "verify_length": round(stats.verify_length, 3),
        "accept_length": round(stats.accept_length, 3),
        "accept_rate": round(stats.acceptance_rate, 4),
        "accepted_at": [round(kept / stats.rounds, 4) for kept in stats.accepted_at],
        "calibration_error": round(stats.calibration_error, 4),
    }


# -- speed ----------------------------------------------------------------------------------------------------------


class Lane:
    """One engine under a constant load: `concurrency` sequences, the next prompt whenever one has ended."""

    def __init__(self, llm: LLM, prompts: list[list[int]], concurrency: int, tokens: int) -> None:
        self.engine, self.concurrency = llm.engine, concurrency
        self.prompts = cycle(prompts)
        self.params = SamplingParams(temperature=0, max_tokens=tokens)
        self.numbers = count()
        self.seconds, self.tokens, self.steps, self.stats = 0.0, 0, 0, DraftStats()
        self.running = 0
        while self.engine.core.meter.last.kind != "decode" or self.running < concurrency or not self.steps:
            self.step()
        self.seconds, self.tokens, self.steps, self.stats = 0.0, 0, 0, DraftStats()

    def step(self) -> None:
        while self.running < self.concurrency:
            self.engine.add_request(str(next(self.numbers)), next(self.prompts), self.params)
            self.running += 1
        begin = time.perf_counter()
        deltas = self.engine.step()
        seconds = time.perf_counter() - begin
        last = self.engine.core.meter.last
        if last.kind == "decode" and last.decode_tokens == self.concurrency:
            self.seconds += seconds
            self.tokens += sum(len(delta.token_ids) for delta in deltas)
            self.steps += 1
            if last.drafts is not None:
                self.stats.merge(last.drafts)
        for delta in deltas:
            if delta.finish_reason is not None:
                self.engine.pop_output(delta.request_id)
                self.running -= 1

    def turn(self, seconds: float) -> None:
        """Steps until that much time counted."""
        until = self.seconds + seconds
        while self.seconds < until:
            self.step()

    def close(self) -> Json:
        for request_id in self.engine.outputs.unfinished():
            self.engine.discard(request_id)
        figure = {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "step_ms": round(1000 * self.seconds / self.steps, 2),
            "steps": self.steps,
            "tokens": self.tokens,
        }
        drafted = self.stats.rounds > 0
        return figure | {
            "verify_length": round(self.stats.verify_length, 3) if drafted else 0.0,
            "accept_length": round(self.stats.accept_length, 3) if drafted else 1.0,
        }


def speed(engines: dict[str, LLM], prompts: Prompts, concurrencies: tuple[int, ...], tokens: int) -> list[Json]:
    """The three modes at every concurrency."""
    mixed = [ids for group in zip(*prompts.values(), strict=False) for ids in group]  # all kinds in turn
    rows = []
    for concurrency in concurrencies:
        print(f"speed, {concurrency} sequences ...", file=sys.stderr)
        lanes = {mode: Lane(llm, mixed, concurrency, tokens) for mode, llm in engines.items()}
        wanted = max(concurrency, min(LEAST_PROMPTS, len(mixed))) * tokens
        while any(lane.tokens < wanted for lane in lanes.values()):
            for lane in lanes.values():
                lane.turn(SLICE_S)
        figures = {mode: lane.close() for mode, lane in lanes.items()}
        off, fixed, varlen = (figures[mode]["tokens_per_s"] for mode in MODES)
        gains = {"fixed_over_off": fixed / off, "varlen_over_off": varlen / off}
        gains["varlen_over_best"] = varlen / max(off, fixed)
        rows.append({"concurrency": concurrency, **figures, **{name: round(gain, 3) for name, gain in gains.items()}})
    return rows


# -- the run --------------------------------------------------------------------------------------------------------


def build(options: argparse.Namespace, length: int, **mode: Any) -> LLM:
    """length: of the longest prompt with its answer."""
    sequences = max(options.concurrency)
    return LLM(
        options.model,
        device="cpu",
        **{"nextn": options.drafts, **mode},
        enable_prefix_caching=False,  # a prompt that comes again is computed again
        max_model_len=length,
        max_num_seqs=sequences,
        num_blocks=sequences * (blocks_for(length) + 1),
        verbose=False,
    )


def measure(options: argparse.Namespace) -> Json:
    if options.threads:
        torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    tokenizer = Tokenizer.from_directory(resolve_model(options.model))
    prompts = read_prompts(tokenizer, options.prompts, 2 if options.quick else None)
    length = max(len(ids) for part in prompts.values() for ids in part) + options.tokens
    modes = MODES if "speed" in options.only else {"fixed": MODES["fixed"]}
    engines = {mode: build(options, length, **arguments) for mode, arguments in modes.items()}
    llm = engines["fixed"]
    result: Json = {
        "benchmark": "dspark",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(load),
        "model": llm.path.name,
        "dtype": llm.settings.dtype,
        "drafts": options.drafts,
        "tokens": options.tokens,
        "quick": options.quick,
    }
    if "speed" in options.only:
        result["speed"] = speed(engines, prompts, tuple(options.concurrency), options.tokens)
    if "acceptance" in options.only:
        both = {"coupled": llm, "residual": build(options, length, mtp_varlen=False, seed=None)}
        result["acceptance"] = acceptance(both, prompts, options.tokens)
    if "scheduling" in options.only:
        torch.set_num_threads(1)  # the host's own work, as in an engine whose device is another
        steps = 40 if options.quick else 400
        result["scheduling"] = {"sequences": SEQUENCES} | scheduling_cost(SEQUENCES, options.drafts, steps)
    return result


# -- showing it -----------------------------------------------------------------------------------------------------

ACCEPTANCE_HEAD = ("kind", "law", "prompts", "tokens a round", "kept at 1 / 2 / ...", "of drafts", "ECE")
SPEED_HEAD = (
    "sequences", "verify length", "accept length", "tokens/s", "fixed / off", "varlen / off", "varlen / best of both",
)  # fmt: skip


def acceptance_rows(result: Json) -> Iterator[list[str]]:
    for f in result["acceptance"]:
        at = " ".join(f"{share:.2f}" for share in f["accepted_at"])
        cells = [f["kind"], f["law"], str(f["prompts"]), f"{f['accept_length']:.2f}", at]
        yield [*cells, f"{100 * f['accept_rate']:.0f} %", f"{f['calibration_error']:.3f}"]


def speed_rows(result: Json) -> Iterator[list[str]]:
    """One line per concurrency: fixed / varlen lengths, off / fixed / varlen speeds."""
    for row in result["speed"]:
        drafting = [row[mode] for mode in ("fixed", "varlen")]
        cells = [" / ".join(f"{f[name]:.2f}" for f in drafting) for name in ("verify_length", "accept_length")]
        rates = " / ".join(f"{row[mode]['tokens_per_s']:,.0f}" for mode in MODES)
        gains = [f"{row[name]:.2f}" for name in ("fixed_over_off", "varlen_over_off", "varlen_over_best")]
        yield [str(row["concurrency"]), *cells, rates, *gains]


def tables(result: Json) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    if "acceptance" in result:
        title = f"Acceptance, all {result['drafts']} drafts verified, {result['tokens']} tokens a prompt"
        yield title, ACCEPTANCE_HEAD, list(acceptance_rows(result))
    if "speed" in result:
        title = "Decode at temperature 0; lengths: fixed / varlen, tokens/s: off / fixed / varlen"
        yield title, SPEED_HEAD, list(speed_rows(result))


def scheduling_line(result: Json) -> str:
    cost = result["scheduling"]
    total = cost["plan"] + cost["select"]
    return (
        f"Scheduling at {cost['sequences']} sequences, one thread, median: budget {cost['plan']:.0f} us + selection "
        f"{cost['select']:.0f} us = {total:.0f} us (aim 100); booking the outcome {cost['settle']:.0f} us."
    )


def markdown(result: Json) -> str:
    lines = [heading(result) + "."]
    for title, head, rows in tables(result):
        lines += ["", title + ".", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    if "scheduling" in result:
        lines += ["", scheduling_line(result)]
    return "\n".join(lines)


def show(result: Json) -> None:
    console = Console(width=120)
    console.print(heading(result))
    for title, head, rows in tables(result):
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if "scheduling" in result:
        console.print(scheduling_line(result))


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, hub id or nano; default DEEPINFER_HF_MODEL_DIR or nano")
    parser.add_argument("--threads", type=int, help="threads of torch and of the CPU kernels; default as torch chooses")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with kind and text")
    parser.add_argument("--drafts", type=int, default=5, help="drafts verified at most (default 5)")
    parser.add_argument("--concurrency", type=int, nargs="+", help=f"default {' '.join(map(str, CONCURRENCY))}")
    parser.add_argument("--tokens", type=int, help=f"of a sequence (default {TOKENS})")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; default all")
    parser.add_argument("--quick", action="store_true", help="two prompts a kind, a few tokens, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the tables")
    parser.add_argument("--output", type=Path, help="write the JSON here, too")
    parser.add_argument("--input", type=Path, help="show this JSON again, measure nothing")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="put the tables between the marks of this page")
    options = parser.parse_args(given)
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    options.concurrency = options.concurrency or (QUICK_CONCURRENCY if options.quick else CONCURRENCY)
    return options


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    result = obtain(options, measure, markdown, (BEGIN, END))
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
