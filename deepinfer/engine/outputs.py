"""What a caller gets back."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_id: list[int]
    """Every generated token, the stop token included."""
    token_logprobs: list[float]
    """Natural log of the probability of each token of `token_id`, from the raw logits (before bias and temperature)."""
    finish_reason: str | None
    """"stop", "length", "abort", "deadline" or "error"; None while it runs."""
    logprobs: list[dict[int, float]] | None = None
    """With SamplingParams.logprobs: per token, the most likely ids and the token itself, from the raw logits."""
    draft_tok: list[int] = field(default_factory=list)
    """Drafted tokens per step; empty until drafting exists."""
    accept_tok: list[int] = field(default_factory=list)
    """Accepted drafts per step; sum(accept_tok) <= sum(draft_tok)."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, None for the model's own end token."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds; None where the event never came."""

    queue: float | None = None
    """Submission to first scheduled step."""
    ttft: float | None = None
    """Submission to first token."""
    tbt: float | None = None
    """Mean time between tokens after the first, over all completions of the request."""


@dataclass(slots=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """With SamplingParams.prompt_logprobs: one entry per prompt token, None for the first (nothing predicts it)."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache; 0 until it exists."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(slots=True)
class SequenceDelta:
    """What one step added to one sequence: the unit of streaming."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
