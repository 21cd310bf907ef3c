"""Trains nano's draft stages and confidence head on the frozen backbone, within a wall-clock budget.

    python -m training.train_draft --data DIR --out DIR --seconds 780

Writes OUT/draft.safetensors (the `mtp.*` tensors as they stand in a checkpoint, see draft_export), OUT/state.pt
(float32 weights, for --init) and OUT/log.jsonl now and then; with --valid, OUT/metrics.json and OUT/slots.npz at the
end. A number in the file OUT/seconds replaces the budget of a running training.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from training import regions
from training.config import NanoConfig
from training.data import Batch, Feed, Mixer
from training.draft import DraftModel
from training.draft_eval import DraftEvaluator, report_parts
from training.draft_export import draft_tensors, with_stages
from training.draft_loss import CE, Slots, choose_anchors, compare_slots, cut_blocks, target_rows, total_loss
from training.export import load_export, write_json
from training.model import Mode, NanoModel, document_start
from training.optim import Optimizer, balance_experts
from training.synth.render import Phrases
from training.tokenizer import load_tokenizer, token_map

SHARES = {"prose": 0.20, "doc": 0.13, "code": 0.29, "zh": 0.02, "chat": 0.33, "look1024": 0.03}
WARM_UP = 0.04
QUANT_FROM = 0.65  # share of the time after which weights are rounded to the checkpoint's grid
CE_UNTIL = 0.05  # share of the time in which cross-entropy fades from 1 to its small weight


def rate_factor(progress: float) -> float:
    """Warm-up, then a cosine to nearly zero, as a function of the fraction of the time budget."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.02)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


class DraftTrainer:
    """Frozen backbone, draft model, optimiser, data and clock."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device)
        torch.set_float32_matmul_precision("high")
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.launched, self.began = args.began or time.time(), 0.0
        self.step, self.tokens, self.skipped, self.seconds = 0, 0, 0, args.seconds
        self.tokenizer = load_tokenizer(args.model)
        config = NanoConfig.load(args.model)
        self.backbone = NanoModel(config, token_map(self.tokenizer), compiled=args.compile)
        load_export(self.backbone, args.model)
        self.draft = DraftModel(with_stages(config, args.stages), compiled=args.compile)
        self.draft.initialise(self.backbone, args.seed)
        if args.init:
            self.draft.load_state_dict(torch.load(args.init, map_location="cpu", weights_only=True))
        self.backbone.to(self.device)
        self.draft.to(self.device)
        self.mode = Mode(args.dtype, args.flex, sparse=True)  # the float32 engine's numerics but for bf16 sums
        self.backbone.freeze(self.mode)
        self.optimizer = Optimizer(self.draft, args.muon_rate)
        self.generator = torch.Generator(device=self.device).manual_seed(args.seed)
        self.mixer = Mixer({}, self.device)
        self.feed = Feed(args.data, self.mixer)
        self.refresh()

    # ------------------------------------------------------------------ data, clock, files

    def refresh(self) -> None:
        """Takes up streams that have appeared since the last look, and a new budget."""
        if (self.out / "seconds").exists():
            self.seconds = float((self.out / "seconds").read_text())
        for kind, size in self.feed.refresh().items():
            self.log(stream=kind, size=size)

    def progress(self) -> float:
        """Fraction of the time between the first step and the end of the budget."""
        end = self.launched + self.seconds
        return (time.time() - self.began) / max(1e-3, end - self.began)

    def log(self, **values: object) -> None:
        line = json.dumps({"time": round(time.time() - self.launched, 1), "step": self.step, **values})
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        for name, write in (
            ("draft.safetensors", lambda path: save_file(draft_tensors(self.draft), path, metadata={"format": "pt"})),
            ("state.pt", lambda path: torch.save(self.draft.state_dict(), path)),
        ):
            path = self.out / f"{name}.tmp"
            write(path)
            path.rename(self.out / name)

    # ------------------------------------------------------------------ one step

    def batch(self) -> Batch:
        return self.mixer.batch(SHARES, self.args.rows, self.args.length)

    @torch.no_grad()
    def features(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Taps [B, T, m * D] and the rows before the head [B, T, D]."""
        out = self.backbone(tokens, None, self.mode, taps=self.draft.config.dspark_target_layer_ids)
        hidden = self.backbone.run.call("head_hidden", regions.head_hidden, *out.tail)
        return torch.stack(out.taps, 1).view(*tokens.shape, -1), hidden.view(*tokens.shape, -1)

    def learn(self, batch: Batch, mode: Mode, ce_weight: float) -> tuple[Tensor, Slots, Tensor, Tensor]:
        """Loss, slots, their validity [R, k] and expert loads of one batch."""
        k = self.draft.config.dspark_block_size
        taps, hidden = self.features(batch.tokens)
        # Answers count three times among the targets; squared, so that chats are drafted mostly where it matters.
        anchors = choose_anchors(batch.weights.square(), self.args.anchors, self.generator)
        cut = cut_blocks(batch.tokens, batch.targets, anchors, k)
        start = document_start(batch.tokens)
        drafted = self.draft(taps, batch.tokens, start, anchors, self.backbone.embed, mode)
        law = target_rows(hidden, anchors, k)
        previous, labels = cut.tokens[..., :k].flatten(), cut.tokens[..., 1:].flatten()
        slots = compare_slots(self.draft, drafted.hidden, law, self.backbone.head, previous, labels)
        valid = cut.valid.flatten(0, 1)
        return total_loss(slots, valid, ce_weight), slots, valid, drafted.loads

    def warm(self) -> None:
        """Compiles everything on one batch; what does not compile runs plainly from then on."""
        batch = self.batch()
        for name, act in (
            ("backbone", lambda: self.features(batch.tokens)),
            ("draft", lambda: self.learn(batch, Mode(self.args.dtype), CE)[0].backward()),
        ):
            began = time.time()
            try:
                act()
            except Exception:  # a GPU run must not end because one region does not compile
                self.log(failed=name, error=traceback.format_exc()[-3000:])
                model = self.backbone if name == "backbone" else self.draft
                if not model.run.compiled:
                    raise
                model.run.compiled = False
                if name == "backbone":  # FlexAttention without compilation is slower than dense masks
                    self.mode = Mode(self.args.dtype, False, sparse=True)
                act()
            self.synchronise()
            self.log(warm=name, took=round(time.time() - began, 1))
        for p in self.draft.parameters():
            p.grad = None

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self) -> None:
        """Trains until the budget is used, then saves."""
        args = self.args
        self.warm()
        self.began = mark = saved = time.time()
        marked, quant = self.step, False
        sums, live = torch.zeros(4, 5, device=self.device), torch.zeros(5, device=self.device)
        k = self.draft.config.dspark_block_size
        bad = torch.zeros((), device=self.device)
        while True:
            progress = self.progress()
            if progress >= 1 or (args.steps and self.step >= args.steps):
                break
            if progress >= QUANT_FROM and not quant:
                quant = True
                self.log(quant=True)
            batch = self.batch()
            ce_weight = CE + (1 - CE) * max(0.0, 1 - progress / CE_UNTIL)
            loss, slots, valid, loads = self.learn(batch, Mode(args.dtype, quant=quant), ce_weight)
            loss.backward()
            gradients = [p.grad for p in self.draft.parameters() if p.grad is not None]
            norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), args.clip)
            # Without a host sync: a step that is not finite has all gradients set to zero.
            fine = torch.isfinite(norm) & torch.isfinite(loss.detach())
            for g in gradients:
                g.copy_(torch.where(fine, g, 0.0))
            bad += ~fine
            factor = rate_factor(progress)
            self.optimizer.step(factor)
            balance_experts(self.draft, loads, 1e-3 * min(1.0, 2 * factor))
            self.step += 1
            self.tokens += batch.tokens.numel()
            with torch.no_grad():
                doubt = (slots.confidence.sigmoid() - slots.accept).abs()
                parts = (slots.ce, doubt, slots.accept, slots.agree.float())
                for row, part in zip(sums, parts, strict=True):
                    row[:k] += torch.where(valid, part.detach().view(-1, k), 0.0).sum(0)
                live[:k] += valid.sum(0)
            if self.step % args.log_every == 0 or self.step in (5, 20):
                mean = (sums / live.clamp(min=1)).tolist()
                now = time.time()
                self.log(
                    loss=round(loss.item(), 4),
                    ce=[round(v, 3) for v in mean[0]],
                    doubt=[round(v, 3) for v in mean[1]],  # mean distance of confidence and acceptance
                    accept=[round(v, 4) for v in mean[2]],
                    agree=[round(v, 4) for v in mean[3]],
                    tau=round(1 + float(np.cumprod(mean[2]).sum()), 3),
                    norm=round(norm.item(), 3),
                    load=[round(v, 2) for v in (loads.max(1).values / loads.float().mean(1)).tolist()],
                    rate=round(factor, 4),
                    blocks=int(live[0].item()),
                    bad=int(bad.item()),
                    per_second=int((self.step - marked) * batch.tokens.numel() / (now - mark)),
                    steps_per_second=round((self.step - marked) / (now - mark), 2),
                    memory=round(torch.cuda.max_memory_allocated() / 2**30, 1) if self.device.type == "cuda" else 0,
                )
                sums.zero_()
                live.zero_()
                mark, marked = now, self.step
                self.refresh()
                if now - saved > args.save_every:
                    self.save()
                    saved = now
        self.save()
        self.metrics: dict[str, object] = {
            "steps": self.step,
            "tokens": self.tokens,
            "blocks": self.step * args.rows * args.anchors,
            "seconds": round(time.time() - self.launched, 1),
            "seconds_after_compilation": round(time.time() - self.began, 1),
            "parameters": sum(p.numel() for p in self.draft.parameters()),
            "bytes": sum(t.nbytes for t in draft_tensors(self.draft).values()),
            "skipped_steps": int(bad.item()),
            "passes": {kind: round(s.taken / max(1, len(s.data)), 2) for kind, s in self.mixer.streams.items()},
        }
        write_json(self.out / "metrics.json", self.metrics)
        self.log(done=True, **self.metrics)

    def evaluate(self) -> None:
        """Measures on held-out data with the exported weights; writes metrics.json part by part, then slots.npz."""
        args, began = self.args, time.time()
        evaluator = DraftEvaluator(
            self.backbone, self.draft, self.tokenizer, args.rows, args.length, args.anchors, self.mode
        )
        kinds: dict[str, object] = {}
        phrases = Phrases.load(args.phrases)
        for part in report_parts(evaluator, Path(args.valid), phrases, Mode(args.dtype, quant=True)):
            kinds |= part
            self.metrics |= {"held_out": kinds, "evaluation_seconds": round(time.time() - began, 1)}
            write_json(self.out / "metrics.json", self.metrics)
            self.log(evaluated=part)
            np.savez_compressed(self.out / "slots.tmp.npz", **evaluator.slots())
            (self.out / "slots.tmp.npz").rename(self.out / "slots.npz")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of .u16 token streams")
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="models/nano", help="checkpoint with the finished backbone")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--init", default="", help="state.pt of an earlier run to start from")
    parser.add_argument("--seconds", type=float, default=780)
    parser.add_argument("--began", type=float, default=0, help="unix time the budget counts from; default now")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps (tests)")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=96, help="blocks per row")
    parser.add_argument("--muon-rate", type=float, default=0.012)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=float, default=90)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--valid", default="", help="held-out shard; evaluates at the end")
    parser.add_argument("--phrases", default="", help="see training.synth.render; needed with --valid")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    args.dtype, args.flex, args.compile = (torch.bfloat16 if cuda else torch.float32), cuda, cuda and args.compile
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch._dynamo.config.recompile_limit = 64  # regions serve the backbone's rows and the draft's
    trainer = DraftTrainer(args)
    trainer.run()
    if args.valid:
        trainer.evaluate()


if __name__ == "__main__":
    main()
