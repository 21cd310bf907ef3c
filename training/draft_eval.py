"""What a trained draft model is worth: acceptance per slot and kind of text, and how well it knows it.

Three sources of tokens: held-out documents and chats; the backbone's greedy continuations of them, whose argmax chain
is known, so that the accepted length of greedy decoding is exact; its samples at temperature 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import regions
from training.corpus import blocks, documents
from training.data import PAD, next_targets
from training.draft import DraftModel
from training.draft_loss import choose_anchors, compare_slots, cut_blocks, target_rows
from training.model import Mode, NanoModel, document_start
from training.synth.chats import chat
from training.synth.render import Phrases
from training.synth.tools import tool_chat
from training.tokenizer import ASSISTANT, EOS

FRESH = 192  # tokens that the backbone writes behind each prompt


@dataclass
class Rows:
    """Rows of tokens and where anchors may stand."""

    tokens: Tensor  # [B, T] int64
    weights: Tensor  # [B, T] float32


class DraftEvaluator:
    """Measures with batches of `rows` x `length` tokens, the training's shape, so that compiled regions are reused."""

    def __init__(
        self,
        backbone: NanoModel,
        draft: DraftModel,
        tokenizer: Tokenizer,
        rows: int,
        length: int,
        anchors: int,
        mode: Mode,
    ):
        self.backbone, self.draft, self.tokenizer = backbone, draft, tokenizer
        self.rows, self.length, self.anchors, self.mode = rows, length, anchors, mode
        self.device = backbone.embed.device
        self.fresh = min(FRESH, length // 4)
        self.kept: list[dict[str, np.ndarray]] = []  # slots for calibration, see `measure`

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    # ------------------------------------------------------------------ rows

    def held_out(self, valid: Path, phrases: Phrases, seed: int = 5) -> dict[str, Rows]:
        """Rows of every kind of held-out text, and of chats in wordings that were not trained on."""
        streams: dict[str, list[int]] = {}
        for record in documents(valid):
            ids = [0, *(t for block in blocks(record["text"]) for t in self.encode(block)), 1]
            streams.setdefault(record["kind"].split("-")[0], []).extend(ids)
        rng, found = random.Random(seed), {}
        for kind, ids in streams.items():
            cuts = range(0, len(ids) - self.length + 1, self.length) or [0]
            starts = rng.sample(cuts, min(self.rows, len(cuts)))
            tokens = self.fill([ids[s : s + self.length] for s in starts])
            found[kind] = Rows(tokens, (tokens != PAD).float())
        for kind, make in (("tools", tool_chat), ("chat", chat)):
            made = [make(rng, phrases, "valid") for _ in range(self.rows)]
            tokens = self.fill([self.encode(m if isinstance(m, str) else m.text())[: self.length] for m in made])
            found[kind] = Rows(tokens, self.answers(tokens).float())
        return found

    def fill(self, rows: list[list[int]]) -> Tensor:
        """[rows, length], padded on the right and below."""
        full = torch.full((self.rows, self.length), PAD, dtype=torch.int64)
        for row, ids in zip(full, rows, strict=False):
            row[: len(ids)] = torch.tensor(ids)
        return full.to(self.device)

    def answers(self, tokens: Tensor) -> Tensor:
        """[B, T] bool: anchors inside an assistant's turn, where a serving engine drafts."""
        opening, closing = (self.tokenizer.token_to_id(t) for t in (ASSISTANT, EOS))
        at = torch.arange(tokens.shape[1], device=self.device)
        opened = torch.where(tokens == opening, at, -1).cummax(1).values
        closed = torch.where(tokens == closing, at, -1).cummax(1).values
        return (opened > closed) & (opened >= 0)

    def prompts(self, kind: str, tokens: Tensor) -> list[list[int]]:
        """Beginnings of rows: half a document, a chat up to its first answer."""
        opening, room = self.tokenizer.token_to_id(ASSISTANT), self.length - self.fresh
        found = []
        for ids in tokens.tolist():
            cut = len(ids) // 2
            if kind in ("tools", "chat") and opening in ids:
                cut = ids.index(opening) + 2  # with the token that opens or closes the reasoning
            found.append(ids[max(0, cut - room) : cut])
        return found

    @torch.no_grad()
    def continued(self, rows: dict[str, Rows], kinds: tuple[str, ...], greedy: bool, seed: int = 3) -> dict[str, Rows]:
        """The backbone's own continuations of an equal share of rows of each kind, whole rows recomputed per token."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        each = max(1, self.rows // len(kinds))
        prompts = [ids for kind in kinds for ids in self.prompts(kind, rows[kind].tokens[:each])]
        tokens = self.fill(prompts)
        lanes = torch.arange(len(prompts), device=self.device)
        at = torch.tensor([len(p) for p in prompts], device=self.device)
        begin, done = at.clone(), torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        for _ in range(self.fresh):
            logits = self.hidden(tokens)[0].view(*tokens.shape, -1)[lanes, at - 1].float() @ self.backbone.head.t()
            if greedy:
                token = logits.argmax(-1)
            else:
                token = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator).squeeze(1)
            tokens[lanes, at] = torch.where(done, tokens[lanes, at], token)
            at = torch.where(done, at, (at + 1).clamp(max=self.length - 1))
            done |= (token == 1) | (at == self.length - 1)
        position = torch.arange(self.length, device=self.device)
        weights = torch.zeros(tokens.shape, device=self.device)
        weights[: len(prompts)] = ((position >= begin[:, None]) & (position < at[:, None])).float()
        name = "greedy" if greedy else "sampled"
        result = {}
        for i, kind in enumerate(kinds):
            part = torch.zeros_like(weights)
            part[i * each : (i + 1) * each] = weights[i * each : (i + 1) * each]
            result[f"{name}-{kind}"] = Rows(tokens, part)
        return result

    # ------------------------------------------------------------------ measuring

    def hidden(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Backbone rows [N, D] before the head, and taps."""
        out = self.backbone(tokens, None, self.mode, taps=taps)
        return self.backbone.run.call("head_hidden", regions.head_hidden, *out.tail), out.taps

    @torch.no_grad()
    def measure(self, name: str, rows: Rows, mode: Mode, seed: int = 1) -> dict[str, object]:
        """Figures of one kind; keeps its slots for calibration."""
        c, k = self.draft.config, self.draft.config.dspark_block_size
        tokens = rows.tokens
        b, t = tokens.shape
        hidden, taps = self.hidden(tokens, tuple(c.dspark_target_layer_ids))
        generator = torch.Generator(device=self.device).manual_seed(seed)
        targets = next_targets(tokens)
        anchors = choose_anchors(rows.weights * (targets >= 0), self.anchors, generator)
        cut = cut_blocks(tokens, targets, anchors, k)
        live = (rows.weights.gather(1, anchors) > 0) & cut.valid[..., 0] & (anchors > 0)
        stacked = torch.stack(taps, 1).view(b, t, -1)
        law = target_rows(hidden.view(b, t, -1), anchors, k)
        previous, labels = cut.tokens[..., :k].flatten(), cut.tokens[..., 1:].flatten()
        with torch.enable_grad():  # as in training, so that nothing is compiled again
            h = self.draft(stacked, tokens, document_start(tokens), anchors, self.backbone.embed, mode).hidden
            slots = compare_slots(self.draft, h, law, self.backbone.head, previous, labels)
        h = h.detach()
        chain = self.chain(h.view(-1, k, h.shape[-1]), cut.tokens[..., 0].flatten()).view(b, -1, k)
        valid = (cut.valid & live[..., None]).flatten(0, 1)
        whole = valid[:, -1]  # blocks that do not touch an end
        figures = (slots.accept, slots.agree, slots.confidence.detach())
        accept, agree, confidence = (x.view(-1, k).float() for x in figures)
        right = (chain == cut.tokens[..., 1:]).view(-1, k) & valid
        prefix = right.cumprod(1).bool()
        before = torch.cat([valid[:, :1], prefix[:, :-1]], 1) & valid
        result: dict[str, object] = {
            "blocks": int(valid[:, 0].sum()),
            "accept": _means(accept, valid),
            "agree": _means(agree, valid),
            "tau": round(1 + accept[whole].cumprod(1).sum(1).mean().item(), 4),
            "ece": [_error(confidence[:, i].sigmoid()[valid[:, i]], accept[:, i][valid[:, i]]) for i in range(k)],
            # Drafts by argmax against the tokens that stand there: the greedy decoder's drafts where those are greedy.
            "chain": _means(right.float(), before),
            "chain_tau": round(1 + prefix[whole].float().sum(1).mean().item(), 4),
            "chain_ece": [
                _error(confidence[:, i].sigmoid()[before[:, i]], right[:, i].float()[before[:, i]]) for i in range(k)
            ],
        }
        keep = valid[:, 0].nonzero().flatten()[:3000]
        self.kept.append(
            {
                "kind": np.array([name] * len(keep)),
                **{
                    key: value[keep].cpu().numpy()
                    for key, value in (
                        ("confidence", confidence), ("accept", accept), ("agree", agree > 0), ("valid", valid),
                        ("chain", right), ("reached", before),
                    )
                },
            }
        )  # fmt: skip
        return result

    def chain(self, hidden: Tensor, token: Tensor) -> Tensor:
        """Greedy drafts [R, k] behind the anchors: each slot's Markov term is that of the draft before it."""
        drafts = []
        for i in range(hidden.shape[1]):
            token = (self.draft.base_logits(hidden[:, i], self.backbone.head) + self.draft.markov(token)[0]).argmax(-1)
            drafts.append(token)
        return torch.stack(drafts, 1)

    def slots(self) -> dict[str, np.ndarray]:
        """Everything kept by `measure`, one array per name."""
        return {key: np.concatenate([part[key] for part in self.kept]) for key in self.kept[0]} if self.kept else {}


def report_parts(
    evaluator: DraftEvaluator, valid: Path, phrases: Phrases, mode: Mode
) -> Iterator[dict[str, dict[str, object]]]:
    """Figures by kind, the most wanted first."""
    rows = evaluator.held_out(valid, phrases)
    for kind, found in rows.items():
        yield {kind: evaluator.measure(kind, found, mode)}
    for greedy in (True, False):
        made = evaluator.continued(rows, ("code", "tools", "prose", "doc"), greedy)
        for kind, found in made.items():
            yield {kind: evaluator.measure(kind, found, mode)}


def _means(values: Tensor, where: Tensor) -> list[float]:
    """Mean of each slot over the rows where it counts."""
    total = (values * where).sum(0) / where.sum(0).clamp(min=1)
    return [round(v, 4) for v in total.tolist()]


def _error(predicted: Tensor, happened: Tensor, bins: int = 10) -> float:
    """Expected calibration error: mean distance of the two over bins of equal width, weighted by their size."""
    if not len(predicted):
        return 0.0
    place = (predicted * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, device=predicted.device).index_add_(0, place, happened - predicted)
    return round((gap.abs().sum() / len(predicted)).item(), 4)
