"""Decode perplexity of nano by workload, to the bit: what an engine of another speed must give again.

    .venv/bin/python examples/refresh_offline_decode_ppl.py                  # short, chat
    .venv/bin/python examples/refresh_offline_decode_ppl.py --long_context   # long_context

Runs the workloads in batch-invariant mode, with drafts, and writes them to tests/models/offline_decode_ppl.json under
this machine's platform; other platforms and workloads in the file stay. tests/models/test_offline_decode_ppl.py
compares. Run it after a change that is meant to move the numbers (another nano, another kernel), and on a new platform.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from offline_inference import CHAT, ENGLISH, PYTHON, long_context, long_prompt

from deepinfer import LLM, SamplingParams
from deepinfer.codec.conversation import Conversation, Turn
from deepinfer.codec.template import render
from deepinfer.kernels.cpu.build import COMPILERS

BASELINES = Path(__file__).resolve().parents[1] / "tests" / "models" / "offline_decode_ppl.json"
Baselines = dict[str, dict[str, dict[str, Any]]]  # platform -> workload -> shape, sampling parameters, results

QUESTIONS = (
    "Write a haiku about rain.",
    "How many days are there in a week?",
    "Explain what a list is in Python.",
    "Name three animals that live in the sea.",
    "What do you get when you mix blue and yellow?",
    "Tell me a short story about a fox.",
    "Is 17 a prime number?",
)
PROSE = "When the rain stopped, the children ran out into the garden and"
SCRIPT = "import os\nimport sys\n\n\ndef main(argv):\n"


@dataclass(frozen=True)
class Workload:
    prompts: Callable[[LLM], list[str]]
    params: Callable[[LLM], SamplingParams]


def _question(text: str) -> str:
    return render(Conversation(turns=(Turn(role="user", text=text),), thinking=False)).text


def _sampled(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.95, presence_penalty=0.2, seq_seed=7, max_tokens=max_tokens, ignore_eos=True
    )


WORKLOADS = {
    "short": Workload(
        lambda llm: [ENGLISH, PYTHON, PROSE, SCRIPT],
        lambda llm: SamplingParams(temperature=0, seq_seed=7, max_tokens=32, ignore_eos=True),
    ),
    "chat": Workload(
        lambda llm: [render(CHAT).text, *map(_question, QUESTIONS)],
        lambda llm: _sampled(96),
    ),
    # 16,389 tokens in and 4,096 out, in proportion to nano's context of 4,096
    "long_context": Workload(
        lambda llm: [long_prompt(llm, long_context(llm.engine_config.max_model_len)[0])],
        lambda llm: _sampled(long_context(llm.engine_config.max_model_len)[1]),
    ),
}


def platform_name() -> str:
    """All that bits of the float32 CPU kernels depend on, beside their source (docs/determinism.md):

    the compiler and the processor it tunes for, because -march=native decides which products and sums become one fused
    operation; the C library, whose expf and log1pf the kernels call; PyTorch's build and vector width, because
    cos, sin, log and log_softmax are its own.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ValueError(f"no C++ compiler ({', '.join(COMPILERS)}), so nothing is batch invariant; install g++")
    # the compiler's own names: of its version, and of the processor that "native" stands for
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    version = re.search(r'__VERSION__ "(.*)"', macros)
    tuned = sorted(set(re.findall(r"__tune_(\w+?)__ ", macros))) or [f"generic {platform.machine()}"]
    return "; ".join(
        (
            "cpu float32",
            f"{Path(compiler).name} {version[1] if version else 'unknown'} for {' '.join(tuned)}",
            " ".join(platform.libc_ver()),
            f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        )
    )


def open_llm() -> LLM:
    """Batch invariant, drafting as it does by default. Every other setting may be another one: that is the promise."""
    return LLM("nano", device="cpu", dtype="float32", max_num_seqs=8, batch_invariant=True, verbose=False)


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def measure(llm: LLM, name: str) -> dict[str, Any]:
    """What is stored for one workload: its shape and sampling parameters, and what came out."""
    workload = WORKLOADS[name]
    params = workload.params(llm).with_changes(prompt_logprobs=0)
    outputs = llm.generate(workload.prompts(llm), params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    ids = [completion.token_id for completion in completions]
    given = [
        listed[token]
        for output in outputs
        for token, listed in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        if listed is not None
    ]
    return {
        "model": "nano",
        "prompt_tokens": [output.prompt_len for output in outputs],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "ignore_eos": params.ignore_eos,
        "seq_seed": params.seq_seed,
        "output_tokens": sum(map(len, ids)),
        "prompt_ppl": perplexity(given),
        "decode_ppl": perplexity([value for completion in completions for value in completion.token_logprobs]),
        "token_hash": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
    }


def read(path: Path) -> Baselines:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def updated(stored: Baselines, name: str, measured: dict[str, dict[str, Any]]) -> Baselines:
    """The baselines with what was measured on platform `name`; whatever else they hold stays."""
    return {**stored, name: {**stored.get(name, {}), **measured}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long_context", action="store_true", help="the long workload instead of the two short ones")
    parser.add_argument("--output", metavar="PATH", type=Path, default=BASELINES, help=f"default {BASELINES.name}")
    options = parser.parse_args()
    name = platform_name()
    names = ["long_context"] if options.long_context else ["short", "chat"]
    llm = open_llm()
    stored = read(options.output)
    measured = {workload: measure(llm, workload) for workload in names}
    print(name)
    for workload, now in measured.items():
        before = stored.get(name, {}).get(workload)
        change = "new" if before is None else "as before" if now == before else f"was {before['decode_ppl']!r}"
        print(f"  {workload}: decode_ppl {now['decode_ppl']!r} over {now['output_tokens']} tokens ({change})")
    text = json.dumps(updated(stored, name, measured), indent=2, sort_keys=True)
    options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
