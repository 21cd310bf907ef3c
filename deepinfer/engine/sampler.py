"""From the logits of a step to its tokens: one row per sampled token, all rows at once. Their laws: target.py."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.engine.sampling_state import DRAWN, LISTED, SamplingState
from deepinfer.engine.target import StepTarget, drawn_by_kernel
from deepinfer.engine.truncation import ranked
from deepinfer.kernels.select import gpu_twins, log_probabilities
from deepinfer.speculation.constraint import Masks

Whole = npt.NDArray[np.int64]


class Chosen(NamedTuple):
    """One token per row, on the device of the logits."""

    token_ids: Tensor  # int64 [rows]
    logprobs: Tensor  # float32 [rows], natural log, from the raw logits
    valid: Tensor  # bool [rows]; False: no finite largest logit (NaN, or everything banned), the token means nothing


def choose(logits: Tensor, slots: Whole, positions: Whole, state: SamplingState, masks: Masks | None = None) -> Chosen:
    """Draws one token per row. logits float32 [rows, vocab], raw, not changed; slots [rows]: whose parameters hold;
    positions [rows]: of the last known token, the one before the token that is drawn; masks: of the rows that are
    constrained.

    A row's token depends on its own logits, parameters, history, seed and position alone.
    """
    target = StepTarget(logits, slots, positions, state, masks=masks)
    token_ids = target.draw()
    return Chosen(token_ids, logprobs_of(logits, token_ids, slots, positions, state), target.finite())


def logprobs_of(logits: Tensor, token_ids: Tensor, slots: Whole, positions: Whole, state: SamplingState) -> Tensor:
    """Natural log of each row's probability of its token, float32 [rows]. Arguments as those of `choose`.

    A round takes the sum of a row in the order in which it draws from it. So on a GPU a token that a round would have
    drawn has the bits that it would have there, but where the same number stands in a list, too.
    """
    plain = log_probabilities(logits, token_ids[:, None])[:, 0]
    flags = state.flags[slots]
    if not (flags & DRAWN).any() or not gpu_twins(logits.device, torch.bfloat16):
        return plain
    drawn, logprobs = drawn_by_kernel(logits, slots, positions, state)
    return torch.where((drawn == token_ids) & state.place(flags & LISTED == 0), logprobs, plain)


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
    ids, widest = tokens[:, None], max(counts, default=0)
    if widest:
        ids = torch.cat((ids, ranked(logits, widest)[1]), dim=1)
    rows = zip(ids.tolist(), log_probabilities(logits, ids).tolist(), counts, strict=True)
    out = []
    for (token, *row_ids), (value, *row_values), count in rows:
        entry = dict(zip(row_ids[:count], row_values[:count], strict=True))
        entry.setdefault(token, value)
        out.append(entry)
    return out
