"""Changes to the logits that come before the temperature: bias, penalties, and the ban on ending too early.

All work on a float32 copy of the raw logits; the order is that of spec/dspark.md section 10 (bias and penalties do
not commute: the repetition penalty looks at the sign of the biased logit).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class TokenHistory:
    """What one sequence has seen and said, kept only if its parameters ask for penalties.

    One int32 row of vocabulary size each (0.5 MB at 129,280 ids), so that a step stacks rows and loops over nothing.
    """

    in_prompt: Tensor  # bool [vocab]
    output_counts: Tensor  # int32 [vocab]

    @classmethod
    def of(
        cls, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int, device: torch.device | str
    ) -> "TokenHistory":
        in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        in_prompt[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        said = torch.tensor(output_ids, dtype=torch.int64, device=device)
        return cls(in_prompt, torch.bincount(said, minlength=vocab_size).int())

    def add(self, token_id: int) -> None:
        self.output_counts[token_id] += 1


def apply_logit_bias(logits: Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    """Adds each row's biases in place. logits: float32 [all rows, vocab]; rows: row of each of `params`."""
    where = [(row, token) for row, p in zip(rows, params, strict=True) for token in p.logit_bias]
    if where:
        values = [bias for p in params for bias in p.logit_bias.values()]
        index = torch.tensor(where, dtype=torch.int64, device=logits.device)
        logits[index[:, 0], index[:, 1]] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def apply_penalties(
    logits: Tensor, rows: list[int], params: list[SamplingParams], histories: list[TokenHistory]
) -> None:
    """Repetition, then presence and frequency penalties, in place.

    Repetition (Keskar et al. 2019, CTRL) counts prompt and output: positive logits are divided, negative multiplied.
    Presence and frequency count the output only, as the OpenAI protocol defines them.
    """
    if not rows:
        return
    at = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    z = logits[at]  # [r, vocab]
    counts = torch.stack([h.output_counts for h in histories])
    said = counts > 0
    seen = said | torch.stack([h.in_prompt for h in histories])

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=z.dtype, device=z.device)[:, None]

    repetition = column([p.repetition_penalty for p in params])
    z = torch.where(seen, torch.where(z > 0, z / repetition, z * repetition), z)
    z -= column([p.frequency_penalty for p in params]) * counts
    z -= column([p.presence_penalty for p in params]) * said
    logits[at] = z


def forbid(logits: Tensor, rows: list[int], token_ids: list[tuple[int, ...]]) -> None:
    """Sets the listed ids of each row to -inf in place: end and stop tokens before min_tokens."""
    where = [(row, token) for row, ids in zip(rows, token_ids, strict=True) for token in ids]
    if where:
        index = torch.tensor(where, dtype=torch.int64, device=logits.device)
        logits[index[:, 0], index[:, 1]] = -torch.inf
