"""What structured output costs a step: 32 sequences of the bundled model that decode, with a grammar each and without.

    .venv/bin/python benchmarks/structured_output.py [--output FILE] [--quick]

Target: a step with 32 constrained rows takes at most 10 % longer than one with none. Four grammars are mixed (a JSON
schema of objects, one of enumerations, a regex, an EBNF grammar), none of which ends within a round. With drafts a step
verifies five per sequence and has 192 rows of masks.

What a step costs depends on its tokens: other experts, other drafts that are kept. So the answers of a first run with
grammars are put in the place of what later runs draw, with grammars or without: step i computes the same in all.
Rounds of both kinds take turns; of each step the fastest one of its kind counts, and of those the mean. Beside the
time that passes stands the time that all threads computed, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine_limits import cpu_model
from report import commit
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.engine.slot_constraints import StepMasks
from deepinfer.engine.target import StepTarget

SEQUENCES = 32
TARGET = 1.10
PEOPLE = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^\\d{5}$"}}},
        },
        "required": ["name", "age"],
    },
}
WORDS = {"type": "array", "minItems": 500, "items": {"enum": ["north", "east", "south", "west", "up", "down"]}}
ASKED: list[dict[str, Any]] = [
    {"json_schema": PEOPLE},
    {"json_schema": WORDS},
    {"regex": r"([A-Z][a-z]{2,9}( [a-z]{1,9}){3,9}\. ){200,400}"},
    {"ebnf": 'root ::= line{500,900}\nline ::= name " = " value "\\n"\nname ::= [a-z]+\nvalue ::= [0-9]{1,6} | name'},
]


class Step(NamedTuple):
    """Seconds of one step."""

    wall: float
    cpu: float  # of all threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each sequence in a round")
    parser.add_argument("--rounds", type=int, default=5, help="with and without grammars each")
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = 16, 1
    result: dict[str, Any] = {
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
        "load_before": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "quick": options.quick,
        "sequences": options.sequences,
        "tokens": options.tokens,
        "target_ratio": TARGET,
        "cases": {},
    }
    for name, settings in (("no drafts", {"nextn": 0}), ("5 drafts", {"nextn": 5, "mtp_varlen": False})):
        print(f"measuring {name} ...", file=sys.stderr)
        result["cases"][name] = measure(options, **settings)
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


def measure(options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Milliseconds per step of both kinds, and how long a step waited for its masks."""
    llm = LLM(options.model, max_num_seqs=options.sequences, max_model_len=2048, seed=0, verbose=False, **settings)
    seeds = range(options.sequences)  # drafts are drawn too
    free = [SamplingParams(max_tokens=options.tokens, seq_seed=seed, ignore_eos=True) for seed in seeds]
    asked = [SamplingParams(max_tokens=options.tokens, seq_seed=seed, **ASKED[seed % len(ASKED)]) for seed in seeds]
    answers: dict[str, list[int]] = {}
    play(llm, asked, answers)
    rounds: dict[str, list[list[Step]]] = {"free": [], "structured": []}
    waits: list[float] = []
    with watched_masks(waits), forced_draws(llm, answers):
        play(llm, free)  # warm up
        for _ in range(options.rounds):
            rounds["free"].append(play(llm, free))
            rounds["structured"].append(play(llm, asked))
    # A draft may differ by a rounding from round to round, and with it the number of steps until the first one ends.
    steps = min(map(len, rounds["free"] + rounds["structured"]))
    figures: dict[str, Any] = {"steps": steps}
    for name in Step._fields:
        free_ms, structured_ms = (
            1e3 * statistics.mean(min(getattr(times[i], name) for times in rounds[kind]) for i in range(steps))
            for kind in ("free", "structured")
        )
        figures[name] = {
            "free_ms": round(free_ms, 3),
            "structured_ms": round(structured_ms, 3),
            "ratio": round(structured_ms / free_ms, 4),
        }
    waits.sort()
    return {
        **figures,
        "mask_wait_ms_p50": round(1e3 * waits[len(waits) // 2], 3),
        "mask_wait_ms_p99": round(1e3 * waits[len(waits) * 99 // 100], 3),
    }


def play(llm: LLM, params: list[SamplingParams], answers: dict[str, list[int]] | None = None) -> list[Step]:
    """Every step in which all sequences decode and nothing else runs. answers: gets what was said."""
    engine, steps = llm.engine, []
    prompt = llm.tokenizer.encode_prompt("A list of what was found: ", add_bos=True)
    for number, own in enumerate(params):
        engine.check_grammar(own)
        engine.add_request(f"{number}", prompt, own)
    while engine.has_unfinished:
        begin = Step(time.perf_counter(), time.process_time())
        engine.step()
        step = Step(time.perf_counter() - begin.wall, time.process_time() - begin.cpu)
        last = engine.core.meter.last
        if last.decode_tokens == len(params) and not last.prefill_tokens:
            steps.append(step)
    for number in range(len(params)):
        completion = engine.pop_output(f"{number}").outputs[0]
        if completion.finish_reason != "length":
            raise RuntimeError(f"sequence {number} ended with {completion.finish_reason!r}: nothing to compare")
        if answers is not None:
            answers[f"{number}"] = completion.token_id
    return steps


@contextmanager
def forced_draws(llm: LLM, answers: dict[str, list[int]]) -> Iterator[None]:
    """Whatever a request draws, it is the next token of its answer."""
    draw = StepTarget.draw

    def forced(self: StepTarget, rows: Tensor | None = None) -> Tensor:
        ids = draw(self, rows)
        at = np.arange(len(ids)) if rows is None else rows.numpy()
        for place, (slot, position) in enumerate(zip(self._slots[at], self._positions[at], strict=True)):
            sequence = llm.engine.scheduler.by_slot[slot]
            assert sequence is not None
            said = answers[sequence.request.request_id]
            number = position + 1 - len(sequence.request.prompt_token_ids)
            if number < len(said):  # rows behind the limit are drawn and dropped
                ids[place] = said[number]
        return ids

    StepTarget.draw = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepTarget.draw = draw  # type: ignore[method-assign]


@contextmanager
def watched_masks(waits: list[float]) -> Iterator[None]:
    """Notes how long each step waits for its masks after the forward pass."""
    result = StepMasks.result

    def timed(self: StepMasks) -> Any:
        begin = time.perf_counter()
        try:
            return result(self)
        finally:
            waits.append(time.perf_counter() - begin)

    StepMasks.result = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepMasks.result = result  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
