"""Log-probabilities of the prompt's own tokens, gathered chunk by chunk as the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.engine.plan import PromptScore
from deepinfer.engine.sampler import top_logprobs


def score_prompts(logits: Tensor, scores: Sequence[PromptScore]) -> list[list[dict[int, float]]]:
    """For each of `scores` its tokens' entries, as from `top_logprobs`. logits float32 [rows of the step, vocab], raw;
    the row at position p scores the prompt's token at p + 1."""
    entries = []
    for score in scores:
        tokens = torch.tensor(score.token_ids, dtype=torch.int64, device=logits.device)
        rows = logits[score.first_row : score.first_row + len(tokens)]
        entries.append(top_logprobs(rows, tokens, [score.num_top] * len(tokens)))
    return entries
