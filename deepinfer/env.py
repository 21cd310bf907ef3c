"""Every environment variable of deepinfer. The only file that reads os.environ; docs/environment.md lists the same
table.

`read_environment()` parses all variables at once, at the edge (LLM or the command line); the rest of the code is given
values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer.config import VERIFY_ROWS


class EnvironmentVariableError(ValueError):
    """A variable whose value cannot be used. The message names every such variable and what it accepts."""


@dataclass(frozen=True)
class Variable:
    """One row of the table. `parse` turns the text into the value and raises ValueError saying what is accepted."""

    name: str
    field: str  # attribute of Environment
    accepts: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    used_by: str
    planned: bool = False  # read and checked, and without effect until what uses it is built


@dataclass(frozen=True)
class Environment:
    """Parsed values, one field per variable, and `unknown`: DEEPINFER_* names that are set but mean nothing
    (misspelt?)."""

    accelerator: str
    hf_model_dir: str | None
    nextn_decode: int
    mtp_varlen: bool
    batch_invariant: bool
    cuda_kernels: bool
    yoco_truncation_mode: str
    yoco_keep_tokens: int
    num_extra_experts: int
    moe_lb_stat_interval: int
    logging_interval_step: int
    profile: bool
    world_size: int
    rank: int
    api_key: str | None = field(default=None, repr=False)
    unknown: tuple[str, ...] = ()


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no"):
        return False
    raise ValueError("use 1 or 0")


def _count(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    accepted = f"use an integer >= {minimum}" if maximum is None else f"use an integer from {minimum} to {maximum}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(accepted) from None
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(accepted)
        return value

    return parse


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"use one of {', '.join(words)}")
        return word

    return parse


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "DEEPINFER_ACCELERATOR", "accelerator", "auto, cpu, cuda", _choice("auto", "cpu", "cuda"), "auto",
        "Device when `--device` is not given; `auto` takes CUDA if there is a device.", "LLM, all commands",
    ),
    Variable(
        "DEEPINFER_HF_MODEL_DIR", "hf_model_dir", "directory", str, None,
        "Directory of a checkpoint in the Hugging Face layout; replaces the bundled model as the default of `--model`.",
        "model/hub.py",
    ),
    Variable(
        "DEEPINFER_USE_NEXTN_DECODE", "nextn_decode", "integer 0 .. 5", _count(0, VERIFY_ROWS - 1), 5,
        "Tokens drafted and verified per step by DSpark, at most; 0 = no drafting. A checkpoint without draft stages "
        "drafts nothing, one with shorter blocks as many as a block has.", "LLM, engine",
    ),
    Variable(
        "DEEPINFER_ENABLE_MTP_VARLEN", "mtp_varlen", "0, 1", _switch, True,
        "Verify only the drafts that their confidence and the cost of a step, measured at start, let pay off; 0 = all. "
        "Tokens of requests with a seed do not depend on it, so reproducible sampling allows both.", "LLM, engine",
    ),
    Variable(
        "DEEPINFER_BATCH_INVARIANT", "batch_invariant", "0, 1", _switch, False,
        "A request gives the same bits alone and in any company, whatever its seed. 1 is refused where an operator "
        "cannot promise it: it needs float32 on a CPU with its kernels or bfloat16 on a Hopper GPU, and exact prefix "
        "hits.", "LLM, engine",
    ),
    Variable(
        "DEEPINFER_CUDA_KERNELS", "cuda_kernels", "0, 1", _switch, True,
        "On a Hopper GPU, the kernels in CUDA C++ where they serve; 0 = Triton's in their place, to compare them or to "
        "do without a CUDA compiler. Results differ by roundings.", "kernels/cuda",
    ),
    Variable(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "yoco_truncation_mode", "compact, off",
        _choice("compact", "off"), "off",
        "`compact` runs the layers after the last KV source on the last tokens of a prompt only: faster, not exact. "
        "Requests with `prompt_logprobs` and `LLM.logits` still compute everything.", "LLM, engine",
    ),
    Variable(
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "yoco_keep_tokens", "integer >= 134", _count(134), 140,
        "Tokens at a prompt's end that run through all layers in `compact` mode. 134 = 128 window + 6 rows of a verify "
        "step.", "LLM, engine",
    ),
    Variable(
        "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", "num_extra_experts", "integer >= 0", _count(0), 32,
        "Fewest redundant expert slots over all ranks, for expert load balancing.", "parallel/eplb.py", planned=True,
    ),
    Variable(
        "DEEPINFER_MOE_LB_STAT_INTERVAL", "moe_lb_stat_interval", "integer >= 0", _count(0), 0,
        "Steps between two records of the expert load; 0 = none.", "parallel/eplb.py, metrics", planned=True,
    ),
    Variable(
        "DEEPINFER_LOGGING_INTERVAL_STEP", "logging_interval_step", "integer >= 0", _count(0), 0,
        "Steps between two progress lines of the engine on stderr (tokens per second, cache use, hits); 0 = none.",
        "engine, metrics",
    ),
    Variable(
        "PROFILE", "profile", "0, 1", _switch, False,
        "Record a profiler trace of two prefill and three decode steps. Never derive a rate from such a run.",
        "examples/benchmark.py",
    ),
    Variable(
        "WORLD_SIZE", "world_size", "integer >= 1", _count(1), 1,
        "Number of engine processes; set by torchrun.", "parallel/groups.py",
    ),
    Variable(
        "RANK", "rank", "integer >= 0", _count(0), 0,
        "Number of this process, below WORLD_SIZE; set by torchrun.", "parallel/groups.py",
    ),
    Variable(
        "DEEPINFER_API_KEY", "api_key", "text", str.strip, None,
        "Key that `chat` and `bench` send to the server of `--server`, unless `--api-key` gives one.", "cli",
    ),
)  # fmt: skip


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Parse all variables of `environ` (default: os.environ). An empty text counts as unset.

    Raises EnvironmentVariableError naming every variable that cannot be used.
    """
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    problems = []
    for variable in VARIABLES:
        text = source.get(variable.name, "")
        values[variable.field] = variable.default
        if text.strip():
            try:
                values[variable.field] = variable.parse(text)
            except ValueError as error:
                problems.append(f"{variable.name}={text!r}: {error}, or unset it")
    if not problems and values["rank"] >= values["world_size"]:
        problems.append(f"RANK={values['rank']}: must be below WORLD_SIZE={values['world_size']}")
    if problems:
        raise EnvironmentVariableError("\n".join(problems))
    known = {variable.name for variable in VARIABLES}
    unknown = tuple(sorted(name for name in source if name.startswith("DEEPINFER_") and name not in known))
    return Environment(**values, unknown=unknown)


def markdown_table() -> str:
    """The table of docs/environment.md; a test keeps the page equal to it."""
    rows = ["| variable | accepts | default | meaning | used by |", "|---|---|---|---|---|"]
    for v in VARIABLES:
        default = (
            "unset" if v.default is None else str(int(v.default)) if isinstance(v.default, bool) else str(v.default)
        )
        meaning = f"Planned, no effect yet: {v.help}" if v.planned else v.help
        rows.append(f"| `{v.name}` | {v.accepts} | {default} | {meaning} | {v.used_by} |")
    return "\n".join(rows) + "\n"
