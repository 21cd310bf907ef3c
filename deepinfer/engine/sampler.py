"""From the logits of a step to its tokens: one row per sampled token, all rows at once.

Order (spec/dspark.md section 10): float32 copy, logit bias, penalties, min_tokens mask, temperature, min-p, top-k,
top-p, draw. Temperature 0 takes the argmax of the processed logits, ties to the lowest id.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.engine.penalties import TokenHistory, apply_logit_bias, apply_penalties, forbid
from deepinfer.engine.random_streams import gumbel, split_seeds
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.truncation import ranked, truncate


@dataclass(slots=True)
class SampleRow:
    """What the sampler must know of one sequence whose next token is due."""

    params: SamplingParams
    seed: int  # 64 bits, the sequence's own
    position: int  # of the last known token: the one before the token that is drawn
    history: TokenHistory | None  # only with penalties
    forbidden: tuple[int, ...]  # ids that may not come yet (min_tokens)

    @property
    def processed(self) -> bool:
        """True if anything changes this row's logits before the temperature."""
        return bool(self.history is not None or self.forbidden or self.params.logit_bias)


class Sampled(NamedTuple):
    """Results of a step, on the host."""

    token_ids: list[int]
    logprobs: list[float]  # of the chosen tokens, natural log, from the raw logits
    top: list[dict[int, float] | None]  # best alternatives and the chosen token, from the raw logits; None if not asked
    valid: list[
        bool
    ]  # False: the row had no finite largest logit (NaN, or everything forbidden); its token means nothing


def sample(logits: Tensor, rows: list[SampleRow]) -> Sampled:
    """Draws one token per row. logits: float32 [len(rows), vocab], raw, not changed.

    A row's token depends on its own logits, parameters, seed and position alone.
    """
    if not rows:
        return Sampled([], [], [], [])
    z = _processed(logits, rows)
    chosen = torch.argmax(z, dim=-1)  # first of equal values: the lowest id
    best = z.gather(-1, chosen[:, None])[:, 0]  # NaN wins an argmax, so a NaN anywhere in the row shows here
    valid = torch.isfinite(best)
    _draw(z, rows, valid.tolist(), chosen)
    return Sampled(
        chosen.tolist(), _chosen_logprobs(logits, chosen), _top_logprobs(logits, chosen, rows), valid.tolist()
    )


def _processed(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Logits after bias, penalties and masks; the input itself when no row asks for any."""
    if not any(row.processed for row in rows):
        return logits
    z = logits.clone()
    index = range(len(rows))
    biased = [i for i in index if rows[i].params.logit_bias]
    apply_logit_bias(z, biased, [rows[i].params for i in biased])
    with_history = [(i, row.params, row.history) for i, row in enumerate(rows) if row.history is not None]
    apply_penalties(
        z, [i for i, _, _ in with_history], [p for _, p, _ in with_history], [h for _, _, h in with_history]
    )
    masked = [i for i in index if rows[i].forbidden]
    forbid(z, masked, [rows[i].forbidden for i in masked])
    return z


def _draw(z: Tensor, rows: list[SampleRow], valid: list[bool], chosen: Tensor) -> None:
    """Replaces `chosen` (int64 [rows], the argmax) in the rows that sample: argmax(z / T + Gumbel noise)."""
    drawing = [i for i, row in enumerate(rows) if valid[i] and not row.params.greedy]
    whole = [i for i in drawing if not rows[i].params.truncated]
    cut = [i for i in drawing if rows[i].params.truncated]
    for group in (whole, cut):
        if not group:
            continue
        at = torch.tensor(group, dtype=torch.int64, device=z.device)
        params = [rows[i].params for i in group]
        # Measured from the row's best logit, so that a tiny temperature cannot overflow it.
        tempered = (z[at] - z[at].amax(-1, keepdim=True)) / _column([p.temperature for p in params], z)[:, None]
        ids = None
        if group is cut:
            top_k = torch.tensor([min(p.top_k, z.shape[-1]) for p in params], dtype=torch.int64, device=z.device)
            tempered, ids = truncate(
                tempered, _column([p.min_p for p in params], z), top_k, _column([p.top_p for p in params], z)
            )
        key = split_seeds([rows[i].seed for i in group], z.device)
        positions = torch.tensor([rows[i].position for i in group], dtype=torch.int64, device=z.device)
        winner = torch.argmax(tempered.double() + gumbel(key, positions, ids, tempered.shape[-1]), dim=-1)
        chosen[at] = winner if ids is None else ids.gather(-1, winner[:, None])[:, 0]


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _chosen_logprobs(logits: Tensor, chosen: Tensor) -> list[float]:
    picked = logits.gather(-1, chosen[:, None])[:, 0]
    return (picked - torch.logsumexp(logits, dim=-1)).tolist()


def _top_logprobs(logits: Tensor, chosen: Tensor, rows: list[SampleRow]) -> list[dict[int, float] | None]:
    counts = [row.params.logprobs for row in rows]
    if all(count is None for count in counts):
        return [None] * len(rows)
    out: list[dict[int, float] | None] = [None] * len(rows)
    asked = [i for i, count in enumerate(counts) if count is not None]
    at = torch.tensor(asked, device=logits.device)
    for i, entry in zip(asked, top_logprobs(logits[at], chosen[at], [counts[i] or 0 for i in asked]), strict=True):
        out[i] = entry
    return out


def top_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[dict[int, float]]:
    """Per row: {id: natural-log probability} of the counts[row] most likely ids, best first, and of tokens[row].

    logits: float32 [rows, vocab], raw; tokens: int64 [rows]. Ties go to the lower id.
    """
    whole = torch.logsumexp(logits, dim=-1, keepdim=True)
    own = (logits.gather(-1, tokens[:, None]) - whole)[:, 0].tolist()
    widest = max(counts)
    if widest:
        values, ids = ranked(logits, widest)
        listed = list(zip(ids.tolist(), (values - whole).tolist(), strict=True))
    else:
        listed = [([], [])] * len(counts)
    out = []
    for (row_ids, row_values), token, value, count in zip(listed, tokens.tolist(), own, counts, strict=True):
        entry = dict(zip(row_ids[:count], row_values[:count], strict=True))
        entry.setdefault(token, value)
        out.append(entry)
    return out
