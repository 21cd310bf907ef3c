"""Prefill and decode speed of the engine, by the vendor's definitions. One JSON line per point (--result_jsonl).

    python examples/benchmark.py --mode decode --tag EP1DP1 --decode_num_requests 64 --result_jsonl sweep.jsonl
    python examples/benchmark.py --mode prefill --prefill_batch_size 32768
    PROFILE=1 python examples/benchmark.py --mode both          # a trace of 2 prefill and 3 decode steps, no rates

decode: all requests have --context_length tokens, of which all but --non_cached_tokens are a common prefix, computed
once. Steps in which all of them decode are samples. 50 warm-up and 60 logged steps are skipped, and the last 61 samples
give 60 intervals: avg_sps, steps/s. tok_s_gpu = avg_sps x requests x (1 + nextn) / cp counts every draft as accepted:
an upper bound. Beside it: the same scaled to an acceptance (three formulas, each named), and what was really emitted.
prefill: requests of the same kind, one token out. 5 warm-up chunks are skipped, the last 11 samples give 10 intervals:
tokens/s of input that was not cached.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams, __version__
from deepinfer.env import read_environment
from deepinfer.model.config import ModelConfig
from deepinfer.model.hub import resolve_model


@dataclass(frozen=True)
class Counts:
    """Steps that are skipped, and the intervals that count."""

    warm_up: int
    logged: int
    intervals: int

    @property
    def samples(self) -> int:
        """Samples that a run needs."""
        return self.warm_up + self.logged + self.intervals + 1


DECODE = Counts(warm_up=50, logged=60, intervals=60)
PREFILL = Counts(warm_up=5, logged=0, intervals=10)
QUICK = Counts(warm_up=2, logged=0, intervals=4)  # to see that it runs: not to be published
PROFILED = {"prefill": 2, "decode": 3}
SMALLEST_BLOCK = 128
VENDOR_CONTEXT = 32_768
VENDOR_DRAFTS = 5  # means: as many as the checkpoint drafts


@dataclass(frozen=True)
class Sample:
    """The end of a step that counts: seconds on a clock, and what the step did."""

    at: float
    prefill_tokens: int
    generated_tokens: int


def steady(samples: Sequence[Sample], counts: Counts) -> list[Sample]:
    """The last `intervals` + 1 samples. ValueError where there are too few behind those that are skipped."""
    if len(samples) < counts.samples:
        raise ValueError(f"{len(samples)} steps of the full batch, {counts.samples} are needed")
    return list(samples[-(counts.intervals + 1) :])


def decode_figures(samples: Sequence[Sample], counts: Counts, requests: int, nextn: int, cp: int) -> dict[str, float]:
    """avg_sps and what follows from it. tok_s_gpu: every draft accepted; emitted_tok_s_gpu: what really came out."""
    kept = steady(samples, counts)
    seconds = kept[-1].at - kept[0].at
    sps = counts.intervals / seconds
    emitted = sum(sample.generated_tokens for sample in kept[1:])
    return {
        "avg_sps": sps,
        "step_ms": 1e3 / sps,
        "tok_s_gpu": sps * requests * (1 + nextn) / cp,
        "tok_s_user": sps * (1 + nextn),
        "emitted_tok_s_gpu": emitted / seconds / cp,
        "accept_length": emitted / counts.intervals / requests,
    }


def scaled(all_accept: float, acceptance: float, nextn: int) -> dict[str, float]:
    """An all-accept rate at an acceptance a of n drafts, by formula: linear (1 + a n) / (1 + n), geometric
    (1 - a^(n+1)) / (1 - a) / (1 + n), flat a. The vendor's curves name none; geometric is the one to plan with."""
    a, n = acceptance, nextn
    chain = float(n + 1) if a == 1 else (1 - a ** (n + 1)) / (1 - a)
    factors = {"linear": (1 + a * n) / (1 + n), "geometric": chain / (1 + n), "flat": a}
    return {name: all_accept * factor for name, factor in factors.items()}


def prefill_figures(samples: Sequence[Sample], counts: Counts, cp: int) -> dict[str, float]:
    """Tokens/s of input that was not cached, and the mean step."""
    kept = steady(samples, counts)
    seconds = kept[-1].at - kept[0].at
    tokens = sum(sample.prefill_tokens for sample in kept[1:])
    return {"tok_s_gpu": tokens / seconds / cp, "step_ms": 1e3 * seconds / counts.intervals}


class Bench:
    """Drives an engine step by step."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.engine, self.options = llm, llm.engine, options
        self._random = np.random.default_rng(options.seed)
        self._number = 0
        cached = max(0, options.context_length - options.non_cached_tokens) // SMALLEST_BLOCK * SMALLEST_BLOCK
        self._prefix = self._tokens(cached)
        if cached:
            self._add(np.concatenate((self._prefix, self._tokens(1))), 1)
            while self.engine.has_unfinished:
                self.engine.step()

    @property
    def cached(self) -> int:
        """Tokens of every request that are a common prefix: whole blocks."""
        return len(self._prefix)

    def decode(self, samples: int) -> list[Sample]:
        """Steps in which all requests decode, and nothing else is computed."""
        requests = self.options.decode_num_requests
        # As many as they could emit at most, so that none ends before the last sample.
        out = (samples + requests + 8) * (1 + self.llm.engine_config.drafts)
        for _ in range(requests):
            self._add(self._prompt(), out)
        return self._run(samples, lambda step: step.decode_tokens == requests and not step.prefill_tokens)

    def prefill(self, samples: int) -> list[Sample]:
        """Steps that compute input, but for the last ones, which may be short."""
        size = self.options.prefill_batch_size
        own = self.options.context_length - self.cached
        for _ in range(-(-(samples + 2) * size // own)):
            self._add(self._prompt(), 1)
        return self._run(samples, lambda step: step.prefill_tokens > 0)

    def _run(self, samples: int, counts: Callable[[Any], bool]) -> list[Sample]:
        found: list[Sample] = []
        try:
            while len(found) < samples and self.engine.has_unfinished:
                self.engine.step()
                step = self.engine.core.meter.last
                if counts(step):
                    found.append(Sample(time.perf_counter(), step.prefill_tokens, step.generated_tokens))
        finally:
            for number in range(self._number):
                self.engine.discard(f"bench-{number}")
            while self.engine.core.has_unfinished:  # what was in flight
                self.engine.step()
        return found

    def _prompt(self) -> np.ndarray:
        return np.concatenate((self._prefix, self._tokens(self.options.context_length - self.cached)))

    def _tokens(self, count: int) -> np.ndarray:
        """random: ids of no meaning, so drafts are hardly ever accepted. text: what a reader would see."""
        if self.options.prompt_mode == "text":
            ids = self.llm.tokenizer.encode_text(Path(__file__).read_text(encoding="utf-8"))
            begin = int(self._random.integers(len(ids)))
            return np.resize(np.roll(np.array(ids, np.int32), -begin), count)
        most = min(self.llm.tokenizer.vocab_size, self.llm.config.vocab_size) * 9 // 10  # below the control tokens
        return self._random.integers(3, most, size=count, dtype=np.int32)

    def _add(self, ids: np.ndarray, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(f"bench-{self._number}", ids, params)
        self._number += 1


def profile(bench: Bench, mode: str, folder: Path) -> Path:
    """A trace of a few steps, for a browser's trace viewer."""
    import torch

    with torch.profiler.profile() as trace:
        samples = getattr(bench, mode)(PROFILED[mode])
    file = folder / f"profile-{mode}.json"
    trace.export_chrome_trace(str(file))
    print(f"{mode}: {len(samples)} steps are in {file}; no rate is derived from them")
    return file


def point(bench: Bench, options: argparse.Namespace, mode: str, figures: dict[str, Any]) -> dict[str, Any]:
    """One line of --result_jsonl."""
    llm = bench.llm
    drafts = llm.engine_config.drafts
    size = {"prefill": "prefill_batch_size", "decode": "decode_num_requests"}[mode]
    line: dict[str, Any] = {
        "mode": mode,
        "tag": options.tag or f"EP{options.ep}DP{options.dp or 1}",
        "model": llm.path.name,
        "ep_size": options.ep,
        "cp": options.cp,
        "context_length": options.context_length,
        "non_cached_tokens": options.context_length - bench.cached,
        "nextn": drafts,
        "redundant_experts": 0,
        "yoco_clip": bool(options.yoco_clip),
        size: getattr(options, size),
        "prompt_mode": options.prompt_mode,
        **{name: round(value, 4) for name, value in figures.items()},
    }
    if mode == "decode":
        line["acceptance"] = options.acceptance
        line["scaled_tok_s_gpu"] = {
            name: round(value, 4) for name, value in scaled(figures["tok_s_gpu"], options.acceptance, drafts).items()
        }
    device = f"{llm.settings.device}, {llm.settings.dtype}"
    made = {"device": device, "version": __version__, "date": datetime.now().isoformat(timespec="seconds")}
    return line | made | ({"quick": True} if options.quick else {})


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("prefill", "decode", "both"), default="both")
    parser.add_argument("--tag", help="name of the curve that the point belongs to; default from the parallel size")
    parser.add_argument("--model_name", "--model", help="directory, hub id or nano; default as of the engine")
    parser.add_argument(
        "--context_length",
        type=int,
        help="tokens of each request; default 32,768, or what the model has room for beside the run's output if less",
    )
    parser.add_argument(
        "--non_cached_tokens",
        type=int,
        help="of them, how many are no common prefix; default an eighth, 4,096 of 32,768 at most. The prefix is whole "
        f"blocks of {SMALLEST_BLOCK} tokens, so this is rounded up",
    )
    parser.add_argument("--decode_num_requests", type=int, default=64)
    parser.add_argument("--prefill_batch_size", type=int, default=32_768, help="tokens of a prefill step")
    parser.add_argument(
        "--nextn", type=int, default=VENDOR_DRAFTS, help="drafts of a step; as many as the checkpoint drafts at most"
    )
    parser.add_argument("--acceptance", type=float, default=0.75, help="of the scaled line")
    parser.add_argument("--yoco_clip", action="store_true", help="decoder truncation of prompts: faster, not exact")
    parser.add_argument("--prompt_mode", choices=("random", "text"), default="random")
    parser.add_argument("--result_jsonl", type=Path, metavar="FILE", help="append the points to this file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts; only 1 is built")
    parser.add_argument("--dp", type=int, help="data-parallel ranks; only 1 is built")
    parser.add_argument("--cp", type=int, default=1, help="ranks that split a prompt; only 1 is built")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; nothing to publish")
    options = parser.parse_args(argv)
    for name in ("context_length", "non_cached_tokens", "decode_num_requests", "prefill_batch_size"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name}: must be at least 1, got {getattr(options, name)}")
    if not 0 <= options.acceptance <= 1:
        parser.error(f"--acceptance: must be from 0 to 1, got {options.acceptance}")
    if options.result_jsonl is not None:
        folder = next((folder for folder in options.result_jsonl.absolute().parents if folder.exists()), Path("/"))
        target = options.result_jsonl if options.result_jsonl.exists() else folder
        if options.result_jsonl.is_dir() or not folder.is_dir() or not os.access(target, os.W_OK):
            parser.error(f"--result_jsonl: {options.result_jsonl} cannot be written")
    return options


def fit(options: argparse.Namespace, config: ModelConfig, output: int) -> None:
    """Settles the lengths, before weights are loaded; whatever is not as given or as the vendor's is said on stderr.

    output: positions to keep free behind the context. ValueError where there is no room.
    """
    room = config.max_position_embeddings - output
    if room < 1:
        raise ValueError(
            f"the run's output needs {output} of the model's {config.max_position_embeddings} positions, so no context "
            "fits; take fewer --decode_num_requests"
        )
    if options.context_length is None:
        options.context_length = min(VENDOR_CONTEXT, room)
        if room < VENDOR_CONTEXT:
            print(
                f"benchmark: --context_length {room}, not the vendor's {VENDOR_CONTEXT}: the model has "
                f"{config.max_position_embeddings} positions, of which the run's output takes {output}",
                file=sys.stderr,
            )
    elif options.context_length > room:
        raise ValueError(
            f"--context_length: {options.context_length} does not fit; at most {room}, as the model has "
            f"{config.max_position_embeddings} positions, of which the run's output takes {output}"
        )
    asked = options.non_cached_tokens
    if asked is None:
        asked = min(4_096, max(1, options.context_length // 8))
    cached = max(0, options.context_length - asked) // SMALLEST_BLOCK * SMALLEST_BLOCK
    options.non_cached_tokens = options.context_length - cached
    if options.non_cached_tokens != asked:
        why = f"the common prefix is whole blocks of {SMALLEST_BLOCK} tokens"
        if asked > options.context_length:
            why = "a request has no more tokens"
        print(f"benchmark: --non_cached_tokens {options.non_cached_tokens}, not {asked}: {why}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    environment = read_environment()
    modes = ("prefill", "decode") if options.mode == "both" else (options.mode,)
    decode, prefill = (QUICK, QUICK) if options.quick else (DECODE, PREFILL)
    path = resolve_model(options.model_name)
    config = ModelConfig.from_dir(path)
    most = min(config.dspark_block_size, VENDOR_DRAFTS) if config.num_drafts else 0
    if options.nextn != VENDOR_DRAFTS and not 0 <= options.nextn <= most:
        raise ValueError(f"--nextn: must be from 0 to {most} with this model, got {options.nextn}")
    output = (decode.samples + options.decode_num_requests + 10) * (1 + min(options.nextn, most))
    fit(options, config, output)
    longest = options.context_length + output
    at_once = max(
        options.decode_num_requests,
        -(-options.prefill_batch_size // min(options.non_cached_tokens, options.context_length)) + 1,
    )
    llm = LLM(
        path,
        device=options.device,
        dtype=options.dtype,
        max_model_len=longest,
        max_num_seqs=at_once,
        max_num_batched_tokens=max(options.prefill_batch_size, at_once * 6),
        nextn=None if options.nextn == VENDOR_DRAFTS else options.nextn,
        mtp_varlen=False,
        yoco_truncation="compact" if options.yoco_clip else "off",
        ep=options.ep,
        dp=options.dp,
        cp=options.cp,
    )
    bench = Bench(llm, options)
    if environment.profile:
        folder = options.result_jsonl.parent if options.result_jsonl else Path.cwd()
        for mode in modes:
            profile(bench, mode, folder)
        return
    for mode in modes:
        counts = decode if mode == "decode" else prefill
        samples = getattr(bench, mode)(counts.samples)
        if mode == "decode":
            figures = decode_figures(samples, counts, options.decode_num_requests, llm.engine_config.drafts, options.cp)
        else:
            figures = prefill_figures(samples, counts, options.cp)
        line = json.dumps(point(bench, options, mode, figures))
        print(line)
        if options.result_jsonl is not None and environment.rank == 0:  # of many, one writes
            options.result_jsonl.parent.mkdir(parents=True, exist_ok=True)
            with options.result_jsonl.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"benchmark: {error}")
