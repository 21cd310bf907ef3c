"""Trains nano within a wall-clock budget: five phases, learning rate and phase borders driven by elapsed time.

    python -m training.train --data DIR --out DIR --seconds 1590

Resumable: a checkpoint (weights, optimiser, elapsed seconds) is written every few minutes and read again with --resume.
A number in the file OUT/seconds replaces the budget of a running training.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from training.config import nano
from training.data import Feed, Mixer
from training.evaluate import LENGTH, Evaluator, report_parts
from training.export import export_model, write_json
from training.model import Mode, NanoModel
from training.optim import Optimizer, balance_experts, rate_factor
from training.tokenizer import load_tokenizer, token_map

TEXT = {"prose": 0.28, "doc": 0.23, "code": 0.29, "zh": 0.03, "zh-en": 0.005}
EARLY = TEXT | {"chat": 0.08, "look1024": 0.16}
MIDDLE = TEXT | {"chat": 0.08, "look4096": 0.17}
LATE = TEXT | {"chat": 0.14, "look4096": 0.17}
FINAL = {"prose": 0.18, "doc": 0.13, "code": 0.19, "zh": 0.02, "chat": 0.29, "look4096": 0.19}
WARM_STEPS = 60


@dataclass(frozen=True)
class Phase:
    """One stretch of training, up to the fraction `until` of the budget."""

    name: str
    until: float
    length: int
    sparse: bool
    quant: bool
    teach_rows: int
    shares: dict[str, float]


PHASES = (
    Phase("short", 0.35, 1024, False, False, 0, EARLY),
    Phase("short-taught", 0.39, 1024, False, False, 64, EARLY),
    Phase("long", 0.71, 4096, False, False, 64, MIDDLE),
    Phase("sparse-quant", 0.91, 4096, True, True, 64, LATE),
    Phase("chat", 1.01, 4096, True, True, 64, FINAL),
)


class Guard:
    """Takes the run back to its last good state when the loss jumps, with a lower learning rate from then on."""

    def __init__(self, model: NanoModel, optimizer: Optimizer, jump: float = 1.12, every: int = 4):
        self.model, self.optimizer, self.jump, self.every = model, optimizer, jump, every
        self.losses: list[torch.Tensor] = []
        self.scale = 1.0
        self.phase, self.best, self.checks = "", float("inf"), 0
        self.kept: dict | None = None

    def check(self, phase: str) -> bool:
        """Looks at the mean loss since the last call; True if it rolled back."""
        mean = torch.stack(self.losses).mean().item() if self.losses else float("inf")
        self.losses = []
        if phase != self.phase:  # another mixture: losses do not compare
            self.phase, self.best, self.checks, self.kept = phase, float("inf"), 0, None
        self.checks += 1
        if self.kept is not None and not mean < self.best * self.jump:
            self.model.load_state_dict(self.kept["model"])
            self.optimizer.load_state_dict(copy.deepcopy(self.kept["optimizer"]))
            self.scale *= 0.7
            return True
        self.best = mean if self.best == float("inf") else min(self.best, 0.5 * (self.best + mean))
        if self.checks % self.every == 0 or self.kept is None:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            self.kept = copy.deepcopy(state)
        return False


@torch.no_grad()
def mixing_bound(model: NanoModel) -> float:
    """Bound on the mixing logits of mHC: beyond some tens, something has gone wrong."""
    hc = model.config.hc_mult
    norms = model.hc_fn[:, :, 2 * hc :].norm(dim=-1) * model.hc_fn.shape[-1] ** 0.5
    return (model.hc_base[:, :, 2 * hc :].abs() + norms * model.hc_scale[:, :, 2:].abs()).max().item()


class Trainer:
    """Model, optimiser, data and clock."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device)
        torch.set_float32_matmul_precision("high")
        tokenizer = self.tokenizer = load_tokenizer(args.tokenizer)
        config = nano(args.tokenizer)
        self.model = NanoModel(config, token_map(tokenizer), compiled=args.compile)
        self.model.initialise(args.seed)
        self.model.to(self.device)
        self.optimizer = Optimizer(self.model, args.muon_rate)
        self.mixer = Mixer({}, self.device)
        self.feed = Feed(args.data, self.mixer)
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.step, self.tokens, self.before, self.seconds = 0, 0, 0.0, args.seconds
        if args.resume and (self.out / "state.pt").exists():
            self.load()
        self.began = time.time() if args.began == 0 else args.began
        self.refresh()

    # ------------------------------------------------------------------ data and state

    def refresh(self) -> None:
        """Takes up streams whose encoding has finished since the last look, and a new budget."""
        if (self.out / "seconds").exists():
            self.seconds = float((self.out / "seconds").read_text())
        self.feed.refresh()

    def wait(self, kinds: list[str]) -> None:
        """Compiles the first phase on made-up tokens, then waits until the streams of `kinds` exist."""
        phase = PHASES[0]
        rows = self.args.batch_tokens // phase.length
        tokens = torch.randint(3, 8000, (rows, phase.length), device=self.device)
        self.model(tokens, tokens, Mode(self.args.dtype, self.args.flex)).nll.mean().backward()
        self.model.zero_grad(set_to_none=True)
        self.log(warm=True)
        while not all(kind in self.mixer.streams for kind in kinds):
            time.sleep(0.5)
            self.refresh()

    def elapsed(self) -> float:
        return self.before + time.time() - self.began

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed(),
        }
        torch.save(state, self.out / "state.tmp")
        (self.out / "state.tmp").rename(self.out / "state.pt")
        export_model(self.model, self.out / "export-last")

    def load(self) -> None:
        state = torch.load(self.out / "state.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.before = state["step"], state["tokens"], state["elapsed"]

    def log(self, **values: object) -> None:
        line = json.dumps({"time": round(self.elapsed(), 1), "step": self.step, **values})
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")

    # ------------------------------------------------------------------ loop

    def run(self) -> None:
        """Trains until the budget is used, then exports."""
        args = self.args
        names = [p.name for p in PHASES]
        current, mark, marked, saved = None, time.time(), self.tokens, time.time()
        totals: dict[str, list[float]] = {}
        answers: dict[str, list[float]] = {}
        guard = Guard(self.model, self.optimizer)
        generator = torch.Generator(device=self.device).manual_seed(args.seed + self.step)
        while True:
            progress = self.elapsed() / self.seconds
            if progress >= 1 or (args.steps and self.step >= args.steps):
                break
            phase = next(p for p in PHASES if progress < p.until) if not args.phase else PHASES[names.index(args.phase)]
            if phase is not current:
                if current is not None:
                    export_model(self.model, self.out / f"export-{current.name}")
                self.refresh()
                sizes = {kind: len(s.data) for kind, s in self.mixer.streams.items()}
                self.log(phase=phase.name, streams=sizes)
                current = phase
            length = min(phase.length, args.max_length)
            batch = self.mixer.batch(phase.shares, max(1, args.batch_tokens // length), length)
            mode = Mode(args.dtype, args.flex, phase.sparse, phase.quant, min(phase.teach_rows, length))
            out = self.model(batch.tokens, batch.targets, mode, generator)
            loss = (out.nll * batch.weights).sum() / batch.weights.sum()
            (loss + 0.1 * out.index_loss).backward()
            if not mode.teach_rows:
                for name, p in self.model.named_parameters():
                    if name.startswith("idx_"):
                        p.grad = None
            factor = rate_factor(progress) * guard.scale * min(1.0, (self.step + 1) / WARM_STEPS)
            guard.losses.append(loss.detach())
            self.optimizer.step(factor)
            balance_experts(self.model, out.loads, 1e-3 * min(1.0, 2 * factor))
            self.step += 1
            self.tokens += batch.tokens.numel()
            report = self.step % args.log_every == 0
            if report or self.step < 4:
                nll, asked = out.nll.detach(), batch.weights > 1
                rows = (nll.sum(1) / (batch.targets >= 0).sum(1)).tolist()
                parts = ((nll * asked).sum(1) / asked.sum(1)).tolist()
                for kind, value, part in zip(batch.kinds, rows, parts, strict=True):
                    totals.setdefault(kind, []).append(value)
                    if part == part:  # rows without an answer give NaN
                        answers.setdefault(kind, []).append(part)
                now = time.time()
                self.log(
                    loss={k: round(sum(v) / len(v), 4) for k, v in totals.items()},
                    answers={k: round(sum(v) / len(v), 4) for k, v in answers.items()},
                    mix=round(mixing_bound(self.model), 1),
                    index=round(out.index_loss.item(), 4),
                    load=round((out.loads.max(1).values / out.loads.float().mean(1)).mean().item(), 2),
                    rate=round(factor, 3),
                    tokens=self.tokens,
                    per_second=int((self.tokens - marked) / (now - mark)),
                )
                totals, answers, mark, marked = {}, {}, now, self.tokens
                self.refresh()
                if guard.check(phase.name):
                    self.log(rolled_back=True, scale=guard.scale)
                if now - saved > args.save_every:
                    self.save()
                    saved = now
        self.save()
        export_model(self.model, self.out / "export")
        self.metrics = {
            "tokens": self.tokens,
            "steps": self.step,
            "seconds": round(self.elapsed(), 1),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "epochs": {
                kind: round(stream.taken / max(1, len(stream.data)), 2) for kind, stream in self.mixer.streams.items()
            },
        }
        self.log(done=True, **self.metrics)

    def evaluate(self) -> None:
        """Evaluates on held-out data and writes metrics.json, part by part."""
        rows = self.args.batch_tokens // LENGTH
        evaluator = Evaluator(self.model, self.tokenizer, self.device, rows, self.args.dtype, self.args.flex)
        began = time.time()
        for part in report_parts(evaluator, Path(self.args.valid), Path(self.args.phrases)):
            self.metrics |= part
            self.metrics["evaluation_seconds"] = round(time.time() - began, 1)
            write_json(self.out / "metrics.json", self.metrics)
            self.log(evaluated=list(part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of .u16 token streams")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokenizer", default="models/nano")
    parser.add_argument("--seconds", type=float, default=1590)
    parser.add_argument("--began", type=float, default=0, help="unix time the budget counts from; default now")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps (tests)")
    parser.add_argument("--phase", default="", help="stay in one phase (tests)")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--muon-rate", type=float, default=0.015)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=float, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wait", default="", help="kinds of text to wait for, separated by commas")
    parser.add_argument("--valid", default="", help="held-out shard; evaluates at the end")
    parser.add_argument("--phrases", default="", help="see training.synth.render; needed with --valid")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.dtype, args.flex, args.compile = (torch.bfloat16 if cuda else torch.float32), cuda, cuda and args.compile
    torch._dynamo.config.recompile_limit = 64  # regions are compiled per length, ratio and mode
    trainer = Trainer(args)
    if args.wait:
        trainer.wait(args.wait.split(","))
    trainer.run()
    if args.valid:
        trainer.evaluate()


if __name__ == "__main__":
    main()
