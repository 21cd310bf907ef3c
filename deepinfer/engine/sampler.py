"""From the logits of a step to its tokens: one row per sampled token, all rows at once.

Order (spec/dspark.md section 10): float32 copy, logit bias, penalties, min_tokens mask, temperature, min-p, top-k,
top-p, draw. Temperature 0 takes the argmax of the processed logits, ties to the lowest id.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.engine.penalties import add_biases, ban, penalise
from deepinfer.kernels.random_streams import gumbel
from deepinfer.engine.sampling_state import BIASED, CHANGED, DRAWN, LISTED, MASKED, PENALISED, TRUNCATED, SamplingState
from deepinfer.engine.truncation import ranked, truncate
from deepinfer.kernels.argmax import argmax

Whole = npt.NDArray[np.int64]


class Chosen(NamedTuple):
    """One token per row, on the device of the logits."""

    token_ids: Tensor  # int64 [rows]
    logprobs: Tensor  # float32 [rows], natural log, from the raw logits
    valid: Tensor  # bool [rows]; False: no finite largest logit (NaN, or everything banned), the token means nothing


def choose(logits: Tensor, slots: Whole, positions: Whole, state: SamplingState) -> Chosen:
    """Draws one token per row. logits float32 [rows, vocab], raw, not changed; slots [rows]: whose parameters hold;
    positions [rows]: of the last known token, the one before the token that is drawn.

    A row's token depends on its own logits, parameters, history, seed and position alone.
    """
    flags = state.flags[slots]
    wanted = int(np.bitwise_or.reduce(flags)) if flags.size else 0
    z = _changed(logits, slots, positions, state) if wanted & CHANGED else logits
    token_ids = argmax(z)  # the first of equal values: the lowest id
    best = z.gather(-1, token_ids[:, None])  # NaN wins an argmax, so a NaN anywhere in the row shows here
    valid = torch.isfinite(best)
    for kind in (DRAWN, DRAWN | TRUNCATED):  # rows that keep every token, then those that may drop some
        if wanted & kind == kind:
            rows = np.flatnonzero(flags & (DRAWN | TRUNCATED) == kind)
            at = state.place(rows)
            own = (z, best) if rows.size == len(z) else (z.index_select(0, at), best[at])
            token_ids[at] = _draw(*own, slots[rows], positions[rows], state, truncated=kind != DRAWN)
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, token_ids[:, None])
    return Chosen(token_ids, logprobs[:, 0], valid[:, 0])


def _changed(logits: Tensor, slots: Whole, positions: Whole, state: SamplingState) -> Tensor:
    """Logits after bias, penalties and masks; the input itself when no row needs any now."""
    flags = state.flags[slots]
    biased, penalised = np.flatnonzero(flags & BIASED), np.flatnonzero(flags & PENALISED)
    masked = np.flatnonzero((flags & MASKED != 0) & (positions + 1 < state.may_end[slots]))
    if not (biased.size or penalised.size or masked.size):
        return logits
    z = logits.clone()
    if biased.size:
        add_biases(z, state.place(biased), state.biases(slots[biased].tolist()))
    if penalised.size:
        own = state.place(slots[penalised])
        penalties = (state.repetition[own], state.frequency[own], state.presence[own])
        penalise(z, state.place(penalised), state.histories.gather(slots[penalised]), *penalties)
    if masked.size:
        ban(z, state.place(masked), state.forbidden(slots[masked].tolist()))
    return z


def _draw(z: Tensor, best: Tensor, slots: Whole, positions: Whole, state: SamplingState, *, truncated: bool) -> Tensor:
    """argmax(z / T + Gumbel noise) of rows that all truncate or all do not, int64 [rows].

    z float32 [rows, vocab]; best [rows, 1]: the largest of each row. Where that is no number the row becomes NaN, which
    no comparison lets pass: it gets some id, and the other rows do not notice.
    """
    own = state.place(slots)
    # Measured from the row's best logit, so that a tiny temperature cannot overflow it.
    tempered = (z - best).div_(state.temperature[own][:, None])
    ids = None
    if truncated:
        tempered, ids = truncate(tempered, state.min_p[own], state.top_k[own], state.top_p[own])
    key = (state.seed_low[own], state.seed_high[own])
    noise = gumbel(key, state.place(positions), ids, tempered.shape[-1])
    winner = argmax(tempered.double() + noise)
    return winner if ids is None else ids.gather(-1, winner[:, None])[:, 0]


def list_top(
    logits: Tensor, token_ids: Tensor, slots: Whole, state: SamplingState
) -> list[dict[int, float] | None] | None:
    """The most likely tokens and the chosen one, from the raw logits, for the rows that asked; None if none did.

    Arguments as those and the result of `choose`.
    """
    asked = np.flatnonzero(state.flags[slots] & LISTED)
    if not asked.size:
        return None
    at = state.place(asked)
    entries = top_logprobs(logits.index_select(0, at), token_ids[at], state.num_listed[slots[asked]].tolist())
    top: list[dict[int, float] | None] = [None] * len(slots)
    for row, entry in zip(asked.tolist(), entries, strict=True):
        top[row] = entry
    return top


def top_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[dict[int, float]]:
    """Per row: {id: natural-log probability} of the counts[row] most likely ids, best first, and of tokens[row].

    logits: float32 [rows, vocab], raw; tokens: int64 [rows]. Ties go to the lower id.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    widest = max(counts, default=0)
    if widest:
        ids = ranked(logits, widest)[1]
        listed = list(zip(ids.tolist(), logprobs.gather(-1, ids).tolist(), strict=True))
    else:
        listed = [([], [])] * len(counts)
    out = []
    for (row_ids, row_values), token, value, count in zip(listed, tokens.tolist(), own, counts, strict=True):
        entry = dict(zip(row_ids[:count], row_values[:count], strict=True))
        entry.setdefault(token, value)
        out.append(entry)
    return out
