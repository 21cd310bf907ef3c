"""Blocks to learn from, and the loss: cross-entropy, total variation and confidence, weighted by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.draft import DraftModel

CE, TV, CONFIDENCE = 0.1, 0.9, 1.0
SLOT_DECAY = 4.0  # weight of slot i is exp(-(i - 1) / 4)


@dataclass
class Blocks:
    """Anchors of B rows and what stands behind them; slot i (from 0) predicts the token at anchor + 1 + i."""

    anchors: Tensor  # [B, A] int64 row positions
    tokens: Tensor  # [B, A, k + 1] int64: the anchor and the k tokens behind it
    valid: Tensor  # [B, A, k] bool: a prefix of each block


def choose_anchors(weights: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """weights [B, T] >= 0 of each position -> [B, count] positions without repetition, ascending.

    Drawn by Gumbel noise and top-k: nothing fails where a row has fewer positive weights than `count`; the blocks
    there are simply not valid.
    """
    u = torch.rand(weights.shape, device=weights.device, generator=generator)
    noise = -torch.log(-torch.log(u.clamp(1e-9, 1 - 1e-6)))
    weights = weights.clone()
    weights[:, 0] = 0  # the first token of a row has no context
    return (torch.log(weights + 1e-9) + noise).topk(count, dim=1).indices.sort(1).values


def cut_blocks(tokens: Tensor, targets: Tensor, anchors: Tensor, k: int) -> Blocks:
    """tokens [B, T], targets [B, T] (next tokens, -100 where none is to be predicted), anchors [B, A]."""
    t = tokens.shape[1]
    at = anchors[..., None] + torch.arange(k + 1, device=tokens.device)
    inside = at.clamp(max=t - 1).flatten(1)
    known = targets.gather(1, inside).view(at.shape)[..., :k] >= 0  # the label of slot i is the target of at + i
    valid = (known & (at[..., 1:] < t)).cumprod(-1).bool()
    return Blocks(anchors, tokens.gather(1, inside).view(at.shape), valid)


def target_rows(hidden: Tensor, anchors: Tensor, k: int) -> Tensor:
    """hidden [B, T, D] before the head -> [B * A * k, D]: what gives the target's law of every slot."""
    b, t = hidden.shape[:2]
    at = (anchors[..., None] + torch.arange(k, device=anchors.device)).clamp(max=t - 1)
    rows = (torch.arange(b, device=anchors.device)[:, None, None] * t + at).flatten()
    return hidden.flatten(0, 1)[rows]


@dataclass
class Slots:
    """Per slot, [n] each: losses with a gradient and what they rest on."""

    ce: Tensor
    tv: Tensor  # L1 distance of the two laws, 0 .. 2
    confidence: Tensor  # logits
    accept: Tensor  # 1 - tv / 2: exact probability that rejection sampling at temperature 1 accepts
    agree: Tensor  # bool: both laws have the same most likely token


def compare(z: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of draft and target [n, V] float32, labels [n] -> cross-entropy, L1 distance, same argmax."""
    log_q = F.log_softmax(z, -1)
    ce = -log_q.gather(1, labels[:, None]).squeeze(1)
    return ce, (torch.softmax(target, -1) - log_q.exp()).abs().sum(-1), z.argmax(-1) == target.argmax(-1)


def compare_slots(
    draft: DraftModel, hidden: Tensor, target_hidden: Tensor, head: Tensor, previous: Tensor, labels: Tensor
) -> Slots:
    """hidden, target_hidden [n, D], head [V, D] float32, previous and labels [n]."""
    bias, e = draft.markov(previous)
    z = draft.base_logits(hidden, head) + bias
    with torch.no_grad():
        target = target_hidden.float() @ head.t()
    ce, tv, agree = draft.run.call("compare", compare, z, target, labels)
    return Slots(ce, tv, draft.confidence_logits(hidden, e), (1 - 0.5 * tv.detach()).clamp(0, 1), agree)


def total_loss(slots: Slots, valid: Tensor, ce_weight: float = CE) -> Tensor:
    """valid [.., k] -> scalar; the sum of the slots' weights over the whole batch is the denominator."""
    k = valid.shape[-1]
    decay = torch.exp(-torch.arange(k, device=valid.device) / SLOT_DECAY)
    w = (valid * decay).flatten()
    doubt = F.binary_cross_entropy_with_logits(slots.confidence, slots.accept, reduction="none")
    return (w * (ce_weight * slots.ce + TV * slots.tv + CONFIDENCE * doubt)).sum() / w.sum().clamp(min=1e-6)
