"""What the two approximations cost: the loss of the tokens after a truncated prefill, after a replay, and after both.

Texts are this repository's own: its documents and the sources of `deepinfer`, cut into pieces of one prompt and the
tokens that follow it. Every piece runs in full once; the same following tokens are then scored

    truncated   the prompt prefilled with the last layers on its last K rows (spec/engine.md 3.8);
    replayed    the prompt's blocks found in the cache and one window of it computed again (3.2), the rest of the prompt
                and the following tokens computed after that;
    both        what a server does on a hit.

Reported per kind of text and for all of it: nats per token, the perplexity and its relative change against the full
run, the divergence (KL, nats) of the first following token's distribution, and how often the likeliest token stays.

    .venv/bin/python examples/yoco/perplexity.py [--json results/yoco_perplexity.json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from sequences import Bounds, cold_slot, feed, hit_slot
from torch import Tensor
from tqdm import tqdm

from deepinfer.cache.blocks import BLOCK_TOKENS, blocks_for
from deepinfer.cache.storage import CacheStorage
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.hub import resolve_model
from deepinfer.model.truncation import least_keep_tokens, truncation_problem

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "documents": ("README.md", "CONTRIBUTING.md", "docs/*.md", "training/README.md", "models/nano/README.md"),
    "sources": ("deepinfer/**/*.py",),
}
MODES = ("full", "truncated", "replayed", "both")


@dataclass(frozen=True)
class Piece:
    kind: str
    token_ids: list[int]  # prompt and following tokens


@dataclass
class Scores:
    """Of one mode over some pieces."""

    nats: float = 0.0  # sum over following tokens
    tokens: int = 0
    first_kl: float = 0.0  # sum over pieces
    same_best: int = 0  # following tokens whose likeliest continuation is the full run's
    pieces: int = 0

    def add(self, log_probs: Tensor, full: Tensor, targets: Tensor) -> None:
        """log_probs and full float32 [T, vocab], targets int64 [T]."""
        self.nats -= float(log_probs.gather(1, targets.unsqueeze(1)).double().sum())
        self.tokens += len(targets)
        self.first_kl += float((full[0].double().exp() * (full[0] - log_probs[0]).double()).sum())
        self.same_best += int((log_probs.argmax(1) == full.argmax(1)).sum())
        self.pieces += 1

    def report(self, full: Scores) -> dict[str, float]:
        loss, base = self.nats / self.tokens, full.nats / full.tokens
        return {
            "nats_per_token": round(loss, 5),
            "perplexity": round(math.exp(loss), 4),
            "relative_change": round(math.expm1(loss - base), 6),
            "first_token_kl": round(self.first_kl / self.pieces, 6),
            "same_best_token": round(self.same_best / self.tokens, 4),
        }


def read_pieces(tokenizer: Tokenizer, prompt: int, after: int, most: int) -> tuple[list[Piece], str]:
    """Up to `most` pieces per kind of text, spread over it, and a digest of the texts."""
    pieces, digest = [], hashlib.sha256()
    for kind, patterns in TEXTS.items():
        files = sorted({file for pattern in patterns for file in ROOT.glob(pattern)})
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
        digest.update(text.encode())
        ids, size = tokenizer.encode_text(text), prompt + after
        starts = range(0, len(ids) - size + 1, max(size, (len(ids) - size) // max(most - 1, 1)))
        pieces += [Piece(kind, ids[start : start + size]) for start in list(starts)[:most]]
    return pieces, digest.hexdigest()[:16]


def scored(model: DeepseekV41, piece: Piece, prompt: int, keep: int) -> dict[str, Tensor]:
    """Log-probabilities float32 [T, vocab] that each mode gives the T following tokens."""
    ids = piece.token_ids
    after, needed = len(ids) - prompt, blocks_for(len(ids))
    storage = CacheStorage.for_model(model, max_num_seqs=2, num_blocks=2 * needed)
    window, kept = model.config.sliding_window, prompt - keep
    hit = (prompt - least_keep_tokens(model.config)) // BLOCK_TOKENS * BLOCK_TOKENS
    start, own = hit - window, range(needed + 1, 2 * needed + 1)
    shared = cold_slot(storage, 0, len(ids))
    logits = {"full": feed(model, storage, 0, ids, [prompt], num_logits=after + 1)}
    cold_slot(storage, 1, len(ids), own[0])
    logits["truncated"] = feed(model, storage, 1, ids, [prompt], num_logits=after + 1, bounds=Bounds(keep_from=kept))
    for name, keep_from in (("replayed", 0), ("both", kept)):
        hit_slot(storage, 1, ids, hit, start, own[: needed - hit // BLOCK_TOKENS], shared)
        bounds = Bounds(start, hit, keep_from)
        logits[name] = feed(model, storage, 1, ids, [prompt], num_logits=after + 1, bounds=bounds)
    return {name: torch.log_softmax(rows[:-1].float(), dim=-1) for name, rows in logits.items()}


def measure(model: DeepseekV41, pieces: list[Piece], prompt: int, keep: int) -> dict[str, dict[str, Scores]]:
    scores = {kind: {mode: Scores() for mode in MODES} for kind in (*TEXTS, "all")}
    for piece in tqdm(pieces, unit="piece", disable=None):
        rows = scored(model, piece, prompt, keep)
        targets = torch.tensor(piece.token_ids[prompt:])
        for mode in MODES:
            for kind in (piece.kind, "all"):
                scores[kind][mode].add(rows[mode], rows["full"], targets)
    return {kind: of_kind for kind, of_kind in scores.items() if of_kind["full"].pieces}


def main() -> int:
    parser = argparse.ArgumentParser(description="Loss after a truncated prefill and after a bounded replay.")
    parser.add_argument("--model", default=None, help="nano (the default), or a directory in the Hugging Face layout")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of every prompt")
    parser.add_argument("--after", type=int, default=128, help="following tokens that are scored")
    parser.add_argument("--pieces", type=int, default=12, help="at most so many per kind of text")
    parser.add_argument("--keep", type=int, default=None, help="rows that truncation keeps; the window + 12 by default")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the figures as JSON: to FILE, or printed")
    options = parser.parse_args()
    path = resolve_model(options.model)
    model, tokenizer = load_model(path), Tokenizer.from_directory(path)
    config = model.config
    keep = options.keep or config.sliding_window + 12
    if (problem := truncation_problem(config, keep)) is not None:
        parser.error(problem)
    shortest = least_keep_tokens(config) + BLOCK_TOKENS * (1 + -(-config.sliding_window // BLOCK_TOKENS))
    if not shortest <= options.prompt <= config.max_position_embeddings - options.after or options.after < 1:
        most = config.max_position_embeddings - options.after
        parser.error(f"--prompt: must be from {shortest} (the shortest that hits and replays) to {most}")
    pieces, digest = read_pieces(tokenizer, options.prompt, options.after, options.pieces)
    if not pieces:
        parser.error("--prompt: the texts are shorter than one piece")
    scores = measure(model, pieces, options.prompt, keep)
    report = {
        "model": path.name,
        "numerics": "float32",
        "prompt_tokens": options.prompt,
        "scored_tokens_per_piece": options.after,
        "keep_tokens": keep,
        "replay_tokens": config.sliding_window,
        "texts_sha256": digest,
        "kinds": {
            kind: {"pieces": of_kind["full"].pieces, "tokens": of_kind["full"].tokens}
            | {mode: of_kind[mode].report(of_kind["full"]) for mode in MODES}
            for kind, of_kind in scores.items()
        },
    }
    if options.json == "-":
        print(json.dumps(report, indent=2))
        return 0
    if options.json is not None:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{len(pieces)} pieces, {options.prompt} prompt tokens, {options.after} scored tokens each, K = {keep}")
    print(f"{'texts':<10} {'mode':<10} {'perplexity':>10} {'change':>9} {'first KL':>9} {'same best':>9}")
    for kind, of_kind in scores.items():
        for mode in MODES:
            figures = of_kind[mode].report(of_kind["full"])
            print(
                f"{kind:<10} {mode:<10} {figures['perplexity']:>10.3f} {figures['relative_change']:>+9.3%} "
                f"{figures['first_token_kl']:>9.5f} {figures['same_best_token']:>9.1%}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
