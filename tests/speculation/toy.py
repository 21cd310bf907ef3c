"""A language of few tokens whose law is known exactly, and speculative decoding of many sequences of it side by side.

Row r of every tensor is a sequence with a seed of its own, so 200,000 draws are one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.random_streams import accept_uniforms, gumbel
from deepinfer.speculation.propose import DraftLaw, Rule, draft_logprobs, draw_drafts
from deepinfer.speculation.verify import Verdict, residual_logprobs, verify

Key = tuple[Tensor, Tensor]
# (positions [N] of the tokens before, tokens before [N]) -> logits [N, vocab]
Language = Callable[[Tensor, Tensor], Tensor]
LengthRule = Callable[[Tensor, Tensor, Tensor], Tensor]


class RowTarget:
    """The laws of rows of logits as they are, at temperature 1."""

    def __init__(self, logits: Tensor, key: Key, positions: Tensor) -> None:
        self.logits, self.key, self.positions = logits, key, positions

    def noise(self, rows: Tensor) -> Tensor:
        key = (self.key[0][rows], self.key[1][rows])
        return gumbel(key, self.positions[rows], None, self.logits.shape[1])

    def draw(self, rows: Tensor) -> Tensor:
        return (self.logits[rows].double() + self.noise(rows)).argmax(-1)

    def finite(self, rows: Tensor) -> Tensor:
        return torch.isfinite(self.logits[rows].amax(-1))

    def logprobs(self, rows: Tensor, ids: Tensor) -> Tensor:
        return torch.log_softmax(self.logits[rows], -1).gather(1, ids[:, None])[:, 0]

    def draw_residual(self, rows: Tensor, draft_logprobs: Tensor) -> Tensor:
        left = residual_logprobs(torch.log_softmax(self.logits[rows], -1), draft_logprobs)
        return (left.double() + self.noise(rows)).argmax(-1)


class GreedyTarget(RowTarget):
    def draw(self, rows: Tensor) -> Tensor:
        return self.logits[rows].argmax(-1)


def random_key(rows: int, seed: int) -> Key:
    words = torch.randint(1 << 32, (2, rows), generator=torch.Generator().manual_seed(seed))
    return words[0], words[1]


def table(logits: Tensor) -> Language:
    """logits [positions, vocab, vocab]: by position, taken in turn, and by the token before."""
    return lambda positions, before: logits[positions % len(logits), before]


def random_language(vocab: int, seed: int, spread: float = 1.2) -> Tensor:
    return spread * torch.randn(4, vocab, vocab, generator=torch.Generator().manual_seed(seed))


@dataclass
class Toy:
    """N sequences, all with token 0 at position 0."""

    target: Language
    draft: Language
    key: Key
    k: int = 3
    rule: Rule = Rule.RESIDUAL
    draft_temperature: float = 1.0
    make_target: type[RowTarget] = RowTarget
    soft_draft: bool = True  # False, the mistake: drafts by argmax, judged as if drawn

    def draft_block(self, key: Key, positions: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts [N, k] and the raw logits [N, k, vocab] they are drawn from."""
        rows = len(anchors)
        law = DraftLaw(np.full(rows, self.rule, np.uint8), torch.full((rows,), self.draft_temperature), key)
        before, drafts, logits = anchors, [], []
        for i in range(self.k):
            z = self.draft(positions + i, before)
            before = draw_drafts(z, law, positions + i, i + 1) if self.soft_draft else z.argmax(-1)
            drafts.append(before)
            logits.append(z)
        return torch.stack(drafts, 1), torch.stack(logits, 1)

    def round(
        self, key: Key, positions: Tensor, anchors: Tensor, drafts: Tensor, logits: Tensor, lengths: Tensor
    ) -> Verdict:
        rows, k = drafts.shape
        j = torch.arange(k + 1)
        computed = j <= lengths[:, None]  # only these rows are in the step
        places = positions[:, None] + j
        path = torch.cat((anchors[:, None], drafts), 1)
        per_row = torch.arange(rows)[:, None].expand(-1, k + 1)[computed]
        z = self.target(places[computed], path[computed])
        target = self.make_target(z, (key[0][per_row], key[1][per_row]), places[computed])
        first_rows = (lengths + 1).cumsum(0) - (lengths + 1)
        if self.rule != Rule.RESIDUAL:
            return verify(target, first_rows, lengths, drafts)
        own = (key[0].repeat_interleave(k), key[1].repeat_interleave(k))
        return verify(
            target,
            first_rows,
            lengths,
            drafts,
            residual=torch.ones(rows, dtype=torch.bool),
            draft_logprobs=draft_logprobs(logits, torch.full((rows,), self.draft_temperature)),
            uniforms=accept_uniforms(own, places[:, :-1].flatten()).view(rows, k),
        )

    def run(self, tokens: int, choose_lengths: LengthRule, group: int = 1) -> tuple[Tensor, Tensor]:
        """The first `tokens` of every sequence, int64 [N, tokens], and the drafts accepted in the first round, [N].
        choose_lengths(rows, anchors, drafts) -> int64 [rows], called once per round with the sequences that are still
        short, always whole groups of neighbours."""
        every = len(self.key[0])
        out = torch.zeros(every, tokens + self.k + 1, dtype=torch.int64)
        count, first = torch.zeros(every, dtype=torch.int64), None
        anchors = torch.zeros(every, dtype=torch.int64)
        rows = torch.arange(every)
        while len(rows):
            key, at = (self.key[0][rows], self.key[1][rows]), count[rows]
            drafts, logits = self.draft_block(key, at, anchors[rows])
            verdict = self.round(key, at, anchors[rows], drafts, logits, choose_lengths(rows, anchors[rows], drafts))
            first = verdict.accepted if first is None else first
            # A sequence that has enough writes behind its end: nobody reads that.
            places = (at[:, None] + torch.arange(self.k + 1)).clamp(max=tokens + self.k)
            out.view(-1)[rows[:, None] * out.shape[1] + places] = verdict.token_ids
            anchors[rows] = verdict.token_ids.gather(1, verdict.accepted[:, None])[:, 0]
            count[rows] = at + verdict.accepted + 1
            short = (count < tokens).view(-1, group).any(1).repeat_interleave(group)
            rows = short.nonzero()[:, 0]
        assert first is not None
        return out[:, :tokens], first


def plain_decode(target: Language, key: Key, tokens: int, make_target: type[RowTarget] = RowTarget) -> Tensor:
    """Decoding without drafts."""
    rows = len(key[0])
    before, out = torch.zeros(rows, dtype=torch.int64), []
    for position in range(tokens):
        positions = torch.full((rows,), position)
        before = make_target(target(positions, before), key, positions).draw(torch.arange(rows))
        out.append(before)
    return torch.stack(out, 1)


def joint_law(target: Language, vocab: int, tokens: int) -> Tensor:
    """Probabilities of all vocab**tokens beginnings, float64, the first token counting most."""
    law = torch.ones(1, dtype=torch.float64)
    before = torch.zeros(1, dtype=torch.int64)
    for position in range(tokens):
        p = torch.softmax(target(torch.full_like(before, position), before).double(), -1)
        law = (law[:, None] * p).flatten()
        before = torch.arange(vocab).repeat(len(p))
    return law


def p_value(tokens: Tensor, law: Tensor, vocab: int) -> float:
    """Of a chi-square test that rows of `tokens` [N, t] follow `law` [vocab**t]. A row that the law forbids: 0."""
    weights = vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)
    counts = torch.bincount((tokens * weights).sum(1), minlength=len(law)).double()
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    expected = law[possible] * len(tokens)
    assert expected.min() > 5, "too few draws for a chi-square test of the rarest beginning"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2.0, statistic / 2))
