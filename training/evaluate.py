"""Evaluation on the training device: held-out loss per kind and mode, look-ups, tool calls and short answers.

Everything runs as [rows, 4096] batches of the training size, so compiled regions are reused; short prompts share a row
as separate documents (attention and n-grams stop at BOS).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import regions
from training.corpus import blocks, documents
from training.data import next_targets
from training.model import Mode, NanoModel
from training.synth import facts, tasks
from training.synth.chats import json_chat
from training.synth.lookup import Haystack, probe
from training.synth.render import Chat, Phrases
from training.synth.tools import tool_chat, valid_call

LENGTH, SLOT = 4096, 1024


class Evaluator:
    """Measures a model with batches of `rows` x 4096 tokens."""

    def __init__(
        self, model: NanoModel, tokenizer: Tokenizer, device: torch.device, rows: int, dtype: torch.dtype, flex: bool
    ):
        self.model, self.tokenizer, self.device, self.rows = model, tokenizer, device, rows
        self.dtype, self.flex = dtype, flex

    def mode(self, sparse: bool, quant: bool) -> Mode:
        return Mode(self.dtype, self.flex, sparse, quant)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    # ------------------------------------------------------------------ loss

    def held_out(self, valid: Path) -> dict[str, tuple[np.ndarray, int]]:
        """Per kind: packed rows [n, 4096] of BOS + text + EOS documents and the bytes of text in them."""
        streams: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for record in documents(valid):
            kind = record["kind"]
            ids = [0, *(t for block in blocks(record["text"]) for t in self.encode(block)), 1]
            streams.setdefault(kind, []).extend(ids)
            sizes[kind] = sizes.get(kind, 0) + len(record["text"].encode())
        packed = {}
        for kind, ids in streams.items():
            padded = ids + [2] * (-len(ids) % LENGTH)
            packed[kind] = (np.array(padded, dtype=np.int64).reshape(-1, LENGTH), sizes[kind])
        return packed

    def losses(self, packed: dict[str, tuple[np.ndarray, int]], mode: Mode) -> dict[str, dict[str, float]]:
        """Nats per token and bits per byte of each kind; the first token of a row is free."""
        result = {}
        for kind, (rows, size) in packed.items():
            total, count = 0.0, 0
            for i in range(0, len(rows), self.rows):
                part = rows[i : i + self.rows]
                full = np.full((self.rows, LENGTH), 2, dtype=np.int64)
                full[: len(part)] = part
                tokens = torch.from_numpy(full).to(self.device)
                targets = next_targets(tokens)
                total += self.model(tokens, targets, mode).nll.detach().sum().item()
                count += int((targets >= 0).sum())
            result[kind] = {
                "nats_per_token": round(total / count, 4),
                "bits_per_byte": round(total / math.log(2) / size, 4),
                "bytes_per_token": round(size / count, 3),
                "tokens": count,
            }
        return result

    # ------------------------------------------------------------------ look-ups

    def lookups(
        self, hay: Haystack, mode: Mode, distances: tuple[int, ...], count: int, seed: int = 7
    ) -> dict[str, float]:
        """Share of probes whose whole greedy answer is right (the answer is fed; every argmax must agree with it)."""
        rng, result = random.Random(seed), {}
        for distance in distances:
            right = 0
            for first in range(0, count, self.rows):
                number = min(self.rows, count - first)
                samples = [probe(rng, distance, hay, self.encode) for _ in range(number)]
                full = torch.full((self.rows, LENGTH), 2, dtype=torch.int64)
                for row, (prompt, answer, _) in enumerate(samples):
                    ids = (prompt + answer)[-LENGTH:]
                    full[row, : len(ids)] = torch.tensor(ids)
                guess = self.argmax(full.to(self.device), mode).cpu()
                for row, (prompt, answer, _) in enumerate(samples):
                    end = min(LENGTH, len(prompt) + len(answer))
                    right += guess[row, end - len(answer) - 1 : end - 1].tolist() == answer
            result[str(distance)] = round(right / count, 4)
        return result

    def argmax(self, tokens: Tensor, mode: Mode) -> Tensor:
        """Most likely next token after every position, [B, T]."""
        hidden = regions.head_hidden(*self.model(tokens, None, mode).tail).detach()
        head = self.model.head.detach().to(hidden.dtype)
        best = [(part @ head.t()).argmax(-1) for part in hidden.split(16384)]
        return torch.cat(best).view(tokens.shape)

    # ------------------------------------------------------------------ generation

    def generate(self, prompts: list[str], mode: Mode, limit: int) -> list[str]:
        """Greedy answers up to EOS or `limit` tokens, recomputing whole rows; prompts share rows in slots."""
        per_row = LENGTH // SLOT
        answers: list[str] = []
        for first in range(0, len(prompts), self.rows * per_row):
            part = [self.encode(p)[-(SLOT - limit) :] for p in prompts[first : first + self.rows * per_row]]
            slots = torch.full((self.rows * per_row, SLOT), 2, dtype=torch.int64)
            for i, ids in enumerate(part):
                slots[i, : len(ids)] = torch.tensor(ids)
            slots, lanes = slots.to(self.device), torch.arange(len(part), device=self.device)
            at = torch.tensor([len(ids) for ids in part], device=self.device)
            done = torch.zeros(len(part), dtype=torch.bool, device=self.device)
            for _ in range(limit):
                tail = self.model(slots.view(self.rows, LENGTH), None, mode).tail
                hidden = regions.head_hidden(*tail).detach().view(len(slots), SLOT, -1)[lanes, at - 1]
                token = (hidden @ self.model.head.detach().to(hidden.dtype).t()).argmax(-1)
                slots[lanes, at] = torch.where(done, slots[lanes, at], token)
                at = torch.where(done, at, at + 1)
                done |= token == 1
                if bool(done.all()):
                    break
            for i, ids in enumerate(part):
                out = slots[i, len(ids) : at[i]].tolist()
                text = self.tokenizer.decode([t for t in out if t != 1], skip_special_tokens=False)
                answers.append(text + ("" if out and out[-1] == 1 else " [no end]"))
        return answers

    def tasks(self, phrases: Phrases, mode: Mode, seed: int = 11) -> tuple[dict[str, float], list[dict[str, str]]]:
        """Scores on held-out wordings, and some examples."""
        rng = random.Random(seed)
        jobs: list[tuple[str, str, object]] = []
        for _ in range(112):
            chat = tool_chat(rng, phrases, "valid", calls_only=True)
            name = chat.turns[1][2].split('invoke name="')[1].split('"')[0]
            call = chat.turns.pop()
            jobs.append(("tool", chat.prompt(), (chat.tools, name, call[2].strip())))
        for _ in range(48):
            question, _, answer = facts.ask_fact(rng, "valid")
            jobs.append(("fact", Chat(phrases).user(question).prompt(), answer))
        for _ in range(48):
            question, _, answer = tasks.arithmetic(rng, "valid")
            jobs.append(("arithmetic", Chat(phrases).user(question).prompt(), answer))
        for _ in range(48):
            chat = json_chat(rng, phrases, "valid")
            answer = chat.turns.pop()[2]
            jobs.append(("json", chat.prompt(), answer))
        answers = self.generate([prompt for _, prompt, _ in jobs], mode, 160)
        scores: dict[str, list[bool]] = {}
        examples = []
        for (kind, prompt, wanted), full in zip(jobs, answers, strict=True):
            answer = full.split("</think>")[-1]
            if kind == "tool":
                declared, name, call = wanted
                scores.setdefault("tool_call_valid", []).append(valid_call(answer.strip("\n"), declared))
                scores.setdefault("tool_name_right", []).append(f'invoke name="{name}"' in answer)
                scores.setdefault("tool_call_exact", []).append(answer.strip("\n") == call)
            elif kind == "json":
                scores.setdefault("json_valid", []).append(_is_json(answer))
                scores.setdefault("json_exact", []).append(answer == wanted)
            else:
                scores.setdefault(kind, []).append(answer == wanted)
            scores.setdefault("ends", []).append(not full.endswith("[no end]"))
            if len(examples) < 400 and rng.random() < 0.15:
                examples.append({"kind": kind, "prompt": prompt[-300:], "answer": full})
        return {name: round(sum(values) / len(values), 4) for name, values in scores.items()}, examples

    def samples(self, mode: Mode) -> list[dict[str, str]]:
        """Greedy continuations of fixed prompts."""
        bos, user, cue = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜></think>"
        prompts = [
            f"{bos}def fibonacci(n):\n",
            f"{bos}The history of the city",
            f"{bos}It was a cold winter evening, and",
            f"{bos}import numpy as np\n\n",
            f"{bos}# Installation\n\n",
            f"{bos}class Stack:\n    def __init__(self):\n",
            f"{bos}{user}What is the capital of France?{cue}",
            f"{bos}{user}Hello, who are you?{cue}",
            f"{bos}{user}What is 12 + 30?{cue}",
            f"{bos}{user}Write a Python function that checks if a number is prime.{cue}",
        ]  # fmt: skip
        answers = self.generate(prompts, mode, 96)
        return [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]


def report_parts(evaluator: Evaluator, valid: Path, phrases: Path) -> Iterator[dict[str, object]]:
    """The figures of the model card, the most wanted first."""
    packed = evaluator.held_out(valid)
    hay = Haystack([rows.reshape(-1) for kind, (rows, _) in packed.items() if kind in ("prose", "doc")])
    full, sparse, final = evaluator.mode(False, False), evaluator.mode(True, False), evaluator.mode(True, True)
    yield {"loss_sparse_quantised": evaluator.losses(packed, final)}
    yield {"loss_sparse": evaluator.losses(packed, sparse)}
    yield {"loss_dense": evaluator.losses(packed, full)}
    yield {"lookup": evaluator.lookups(hay, final, (100, 500, 1000, 2000, 3000, 3500), 64)}
    scores, examples = evaluator.tasks(Phrases.load(phrases), final)
    yield {"tasks": scores, "examples": examples}
    yield {"samples": evaluator.samples(final)}
    yield {"lookup_dense": evaluator.lookups(hay, full, (1000, 3500), 64)}


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
