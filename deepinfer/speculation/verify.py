"""Draft -> verify -> accept -> correct: which drafts of a round are kept, and the token that follows them.

The target has computed, for each request, a row of logits behind its anchor x_0 and one behind each of its drafts
x_1 .. x_l. Row j is the law p of the token behind x_j, so row j - 1 judges draft x_j. Two rules (spec/dspark.md 3):

coupled     Every row draws its own token, as it would without drafts; a draft is kept if it is that token. What comes
            out is the very sequence that decoding without drafts gives, whatever was drafted. Greedy is this rule.
residual    A draft from the law q is kept with probability min(1, p/q); the first that is not is replaced by a token
            from max(p - q, 0) / Z. The tokens follow p exactly, and more drafts are kept than by the coupled rule, but
            which tokens come out depends on the drafts.

Either way one token more than the drafts kept comes out: the correction, or the bonus behind the last draft.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ALMOST_NOTHING = 1e-6  # a residual mass below this is the rounding of float32 log-probabilities: p and q are equal


class Target(Protocol):
    """The laws of the target model at a step's rows of logits, after every processor: bias, penalties (the drafts
    before a row count as said), masks, temperature, truncation. rows: int64 [n], numbers of such rows."""

    def draw(self, rows: Tensor) -> Tensor:
        """int64 [n]: the token that decoding without drafts takes there, by argmax or with the TARGET noise."""

    def finite(self, rows: Tensor) -> Tensor:
        """bool [n]: the row's largest logit is a finite number. Where not, the row's other answers mean nothing."""

    def logprobs(self, rows: Tensor, ids: Tensor) -> Tensor:
        """float32 [n]: log p of one token per row, ids int64 [n]; -inf where p is 0."""

    def draw_residual(self, rows: Tensor, draft_logprobs: Tensor) -> Tensor:
        """int64 [n]: from `residual_logprobs(log p, log q)` with the TARGET noise. draft_logprobs: log q [n, vocab]."""


class Verdict(NamedTuple):
    accepted: Tensor  # int64 [R] drafts kept
    token_ids: Tensor  # int64 [R, k + 1]: the drafts kept and one more; 0 behind them
    valid: Tensor  # bool [R]; False: the last token comes from a row that is not finite and means nothing


def verify(
    target: Target,
    first_rows: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    *,
    residual: Tensor | None = None,
    draft_logprobs: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> Verdict:
    """One round of R requests.

    first_rows int64 [R]: the row behind each anchor, those of its drafts follow; lengths int64 [R]: drafts to verify,
    0 .. k; drafts int64 [R, k], read where verified, and there of the vocabulary. residual bool [R]: whose rule it is,
    None = nobody's. For those, draft_logprobs float32 [R, k, vocab]: log of the law that each draft was drawn from,
    and uniforms float64 [R, k]: the ACCEPT stream at the position before each draft.
    """
    if residual is None or not drafts.numel():  # without drafts the rules are the same
        return _coupled(target, first_rows, lengths, drafts)
    assert draft_logprobs is not None and uniforms is not None
    judged = (first_rows, lengths, drafts)
    own, theirs = (~residual).nonzero()[:, 0], residual.nonzero()[:, 0]
    if not len(own):
        return _residual(target, *judged, draft_logprobs, uniforms)
    parts = [_coupled(target, *(each[own] for each in judged))]
    if len(theirs):
        parts.append(_residual(target, *(each[theirs] for each in (*judged, draft_logprobs, uniforms))))
    back = torch.argsort(torch.cat((own, theirs)))
    return Verdict(*(torch.cat(part)[back] for part in zip(*parts, strict=True)))


def _coupled(target: Target, first_rows: Tensor, lengths: Tensor, drafts: Tensor) -> Verdict:
    j = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    computed = j <= lengths[:, None]  # [R, k + 1]
    rows = first_rows[:, None] + j
    if bool(computed.all()):
        y, finite = target.draw(rows.flatten()).view(rows.shape), target.finite(rows.flatten()).view(rows.shape)
    else:
        rows = rows[computed]
        y = torch.full_like(computed, -1, dtype=torch.int64).masked_scatter_(computed, target.draw(rows))
        finite = torch.zeros_like(computed).masked_scatter_(computed, target.finite(rows))

    kept = (drafts == y[:, :-1]) & computed[:, 1:] & finite[:, :-1]  # x_j = y_j
    accepted = kept.long().cumprod(1).sum(1)
    return Verdict(accepted, y.masked_fill(j > accepted[:, None], 0), _at(finite, accepted))


def _residual(
    target: Target, first_rows: Tensor, lengths: Tensor, drafts: Tensor, log_q: Tensor, uniforms: Tensor
) -> Verdict:
    k = drafts.shape[1]
    j = torch.arange(k + 1, device=drafts.device)
    computed = j <= lengths[:, None]  # [R, k + 1]
    finite = torch.zeros_like(computed)
    finite.masked_scatter_(computed, target.finite((first_rows[:, None] + j)[computed]))
    verified = computed[:, 1:]  # [R, k]
    log_q_x = log_q.gather(-1, drafts.clamp(min=0)[:, :, None])[:, :, 0]
    log_p_x = target.logprobs((first_rows[:, None] + j[:k])[verified], drafts[verified])

    kept = verified & finite[:, :-1]
    # u < p(x) / q(x); a NaN is above no number.
    kept.masked_scatter_(verified, kept[verified] & (uniforms[verified].log() < log_p_x - log_q_x[verified]))
    accepted = kept.long().cumprod(1).sum(1)
    # Nobody drafted the bonus token: q = 0 there, and its residual is p itself.
    bonus = accepted == lengths
    log_q_next = log_q[torch.arange(len(log_q), device=log_q.device), accepted.clamp(max=k - 1)]
    y = target.draw_residual(first_rows + accepted, log_q_next.masked_fill(bonus[:, None], -torch.inf))

    token_ids = torch.zeros_like(computed, dtype=torch.int64)
    token_ids[:, :-1] = drafts.masked_fill(j[:k] >= accepted[:, None], 0)
    return Verdict(accepted, token_ids.scatter_(1, accepted[:, None], y[:, None]), _at(finite, accepted))


def residual_logprobs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log max(p - q, 0), unnormalised: two tensors [n, tokens] of log-probabilities -> one of that shape.

    Where p and q are equal up to rounding, so that nothing is left, log p. A NaN in log q leaves p as well.
    """
    left = torch.where(log_p > log_q, log_p + torch.log1p(-torch.exp(log_q - log_p)), -torch.inf)
    nothing = torch.exp(left).sum(-1, keepdim=True) < ALMOST_NOTHING  # Z
    return torch.where(nothing, log_p, left)


def _at(columns: Tensor, index: Tensor) -> Tensor:
    return columns.gather(1, index[:, None])[:, 0]
