"""Fits what a checkpoint's confidence head is worth, with the engine that will use it, and writes
`dspark_calibration.json` beside the weights.

    python examples/calibrate_drafts.py --prompts calibration.jsonl --check benchmarks/prompts/drafting.jsonl

Prompts are JSON lines with "text" (complete, with the begin token's spelling) and "kind"; take such as will be served.
Every draft is verified (fixed length), so that nothing is missing from the statistics; the file that a checkpoint has
is ignored. --check: prompts that the error is reported on, before and after. --rounds keeps what was seen; the same
command finds it there and only fits again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from deepinfer import LLM, SamplingParams
from deepinfer.model.hub import resolve_model
from deepinfer.speculation.calibration import (
    CLASSES,
    FILE_NAME,
    Calibration,
    Lines,
    expected_calibration_error,
    fit_lines,
)

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Rounds = tuple[Floats, Whole]  # logits of the confidence head [n, k], drafts accepted of k verified [n]


def read_prompts(file: Path) -> dict[str, list[str]]:
    """Texts by kind."""
    kinds: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        kinds.setdefault(entry["kind"], []).append(entry["text"])
    return kinds


@contextmanager
def uncalibrated(model: Path) -> Iterator[Path]:
    """The same checkpoint without a calibration."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / model.name
        directory.mkdir()
        for file in model.iterdir():
            if file.name != FILE_NAME:
                (directory / file.name).symlink_to(file.resolve())
        yield directory


def logits_of(survivals: npt.NDArray[np.float32]) -> Floats:
    """What the head had said, from the products of its sigmoids. A product of float32 tells no more than +-16."""
    values = survivals.astype(np.float64)
    before = np.concatenate([np.ones((len(values), 1)), values[:, :-1]], 1)
    chance = np.clip(values / np.maximum(before, 1e-300), 1e-7, 1 - 1e-7)
    return np.log(chance) - np.log1p(-chance)


def collect(llm: LLM, texts: list[str], params: SamplingParams) -> Rounds:
    """Every round in which all drafts were verified, as the planner sees it: before a stop token cuts any off."""
    planner = llm.engine.scheduler.planner
    assert planner is not None
    seen: list[tuple[npt.NDArray[np.float32], Whole]] = []
    settle = planner.settle

    def watch(slots: Whole, num_verified: Whole, accepted: Whole, survivals: npt.NDArray[np.float32] | None) -> None:
        whole = num_verified == planner.k
        seen.append((planner.predicted(slots)[whole], accepted[whole]))
        settle(slots, num_verified, accepted, survivals)

    with patch.object(planner, "settle", watch):
        llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
    return logits_of(np.concatenate([survivals for survivals, _ in seen])), np.concatenate([kept for _, kept in seen])


def collect_all(model: Path, sets: dict[str, dict[str, list[str]]], tokens: int) -> dict[str, Rounds]:
    """By rule/set/kind."""
    found: dict[str, Rounds] = {}
    with uncalibrated(model) as directory:
        # Requests whose seed was asked for are judged by the coupled rule, others by the residual one.
        for seed, rules in ((0, CLASSES[:2]), (None, CLASSES[2:])):
            llm = LLM(directory, mtp_varlen=False, seed=seed, enable_prefix_caching=False, verbose=False)
            for rule in rules:
                params = SamplingParams(temperature=float(rule != "greedy"), max_tokens=tokens)
                for name, kinds in sets.items():
                    for kind, texts in kinds.items():
                        print(f"{rule}: {name} {kind} ...", file=sys.stderr)
                        found[f"{rule}/{name}/{kind}"] = collect(llm, texts, params)
    return found


# -- what comes of it -----------------------------------------------------------------------------------------------


def survivals(logits: Floats, lines: Lines | None) -> Floats:
    """As the engine computes them."""
    if lines is not None:
        logits = logits / np.array(lines.temperatures) + np.array(lines.biases)
    product: Floats = (1 / (1 + np.exp(-logits))).cumprod(1)
    return product


def errors(rounds: Rounds, lines: Lines | None) -> list[float]:
    """Calibration error over all drafts, then of each draft index."""
    logits, accepted = rounds
    predicted, kept = survivals(logits, lines), accepted[:, None] > np.arange(logits.shape[1])
    each = [expected_calibration_error(predicted[:, i], kept[:, i]) for i in range(logits.shape[1])]
    return [expected_calibration_error(predicted.ravel(), kept.ravel()), *each]


def together(found: dict[str, Rounds], rule: str, name: str) -> Rounds:
    """All kinds of a set."""
    parts = [rounds for key, rounds in found.items() if key.startswith(f"{rule}/{name}/")]
    return np.concatenate([logits for logits, _ in parts]), np.concatenate([accepted for _, accepted in parts])


def table(found: dict[str, Rounds], fitted: dict[str, Lines], name: str) -> Table:
    shown = Table(title=f"calibration error on the prompts of {name}", title_justify="left")
    each_draft = ("before, by draft", "after, by draft")
    for head in ("rule", "kind", "rounds", "tokens a round", "before", "after", *each_draft):
        shown.add_column(head)
    for rule, lines in fitted.items():
        kinds = {key.split("/")[2]: rounds for key, rounds in found.items() if key.startswith(f"{rule}/{name}/")}
        for kind, rounds in ({**kinds, "all": together(found, rule, name)} if kinds else {}).items():
            before, after = errors(rounds, None), errors(rounds, lines)
            each = [" ".join(f"{error:.3f}" for error in part[1:]) for part in (before, after)]
            length = f"{1 + rounds[1].mean():.2f}"
            shown.add_row(rule, kind, str(len(rounds[1])), length, f"{before[0]:.4f}", f"{after[0]:.4f}", *each)
    return shown


def save(file: Path, found: dict[str, Rounds]) -> None:
    logits = {f"{key}/logits": rounds[0] for key, rounds in found.items()}
    np.savez(file, **logits, **{f"{key}/accepted": rounds[1] for key, rounds in found.items()})  # type: ignore[arg-type]


def load(file: Path) -> dict[str, Rounds]:
    content = np.load(file)
    keys = dict.fromkeys(name.rpartition("/")[0] for name in content.files)
    return {key: (content[f"{key}/logits"], content[f"{key}/accepted"]) for key in keys}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="directory, hub id or nano (default)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines to fit with")
    parser.add_argument("--check", type=Path, help="JSON lines to report on; default those that are fitted with")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (default 96)")
    parser.add_argument("--rounds", type=Path, help="an .npz that keeps what was seen")
    parser.add_argument("--output", type=Path, help="directory for the file; default the model's")
    options = parser.parse_args(given)
    model = resolve_model(options.model)
    if options.rounds and options.rounds.is_file():
        found = load(options.rounds)
    else:
        sets = {"fit": read_prompts(options.prompts)}
        if options.check:
            sets["check"] = read_prompts(options.check)
        found = collect_all(model, sets, options.tokens)
        if options.rounds:
            save(options.rounds, found)
    fitted = {rule: fit_lines(*together(found, rule, "fit")) for rule in CLASSES}
    Calibration(fitted).save(options.output or model)
    Console(width=140).print(table(found, fitted, "check" if options.check else "fit"))


if __name__ == "__main__":
    main()
