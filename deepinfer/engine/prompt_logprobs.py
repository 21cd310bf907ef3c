"""Log-probabilities of the prompt's own tokens, gathered chunk by chunk as the prompt is computed."""

import torch
from torch import Tensor

from deepinfer.engine.request import Sequence
from deepinfer.engine.sampler import top_logprobs
from deepinfer.engine.scheduler import ScheduledChunk


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
