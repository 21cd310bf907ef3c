"""Log-probabilities of the prompt's own tokens, gathered chunk by chunk as the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.engine.plan import PromptScore
from deepinfer.engine.sampler import top_logprobs

if TYPE_CHECKING:
    from deepinfer.engine.request import Sequence
    from deepinfer.engine.scheduler import ScheduledChunk


def score_prompts(logits: Tensor, scores: Listed[PromptScore]) -> list[list[dict[int, float]]]:
    """For each of `scores` its tokens' entries, as from `top_logprobs`. logits float32 [rows of the step, vocab], raw;
    the row at position p scores the prompt's token at p + 1."""
    entries = []
    for score in scores:
        tokens = torch.tensor(score.token_ids, dtype=torch.int64, device=logits.device)
        rows = logits[score.first_row : score.first_row + len(tokens)]
        entries.append(top_logprobs(rows, tokens, [score.num_top] * len(tokens)))
    return entries


# -- for engine/loop.py, until it goes


def collect(sequence: Sequence, chunk: ScheduledChunk, logits: Tensor) -> None:
    """Scores the prompt tokens that this chunk's rows predict and that were not scored before.

    logits: float32 [chunk.num_logits, vocab], raw. Row i stands at position start + num_tokens - num_logits + i and
    predicts the token one further; the row at the prompt's end predicts output and is left alone. After a preemption
    the prompt is computed again, and rows that were scored before it are passed over.
    """
    scored = sequence.state.prompt_logprobs
    assert scored is not None
    prompt = sequence.request.prompt_token_ids
    first_position = chunk.start + chunk.num_tokens - chunk.num_logits
    begin = len(scored)  # the next token to score; the row before it predicts it
    end = min(chunk.start + chunk.num_tokens + 1, len(prompt))
    if begin >= end:
        return
    rows = logits[begin - 1 - first_position : end - 1 - first_position]
    tokens = torch.tensor(prompt[begin:end], dtype=torch.int64, device=logits.device)
    count = sequence.request.params.prompt_logprobs or 0
    scored += top_logprobs(rows, tokens, [count] * len(rows))
