"""What a caller gets back."""

from dataclasses import dataclass, field

from deepinfer.metrics.drafts import DraftStats


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
    """Drafts verified in each round, one entry per step that decoded it, 0 where no drafts were at hand; empty where
    nothing is drafted."""
    accept_tok: list[int] = field(default_factory=list)
    """Of them, those that became output. Every round gives one token more, the model's own, but for a last one that a
    draft ended."""
    num_tokens: int = 0
    """Tokens that were generated; those of `token_id`, unless its front end kept none."""
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
    replay_tokens: int = 0
    """Tokens that were in the prefix cache and were computed again to fill the windows."""
    preemptions: int = 0
    """How often a completion gave its blocks up and continued later."""
    drafts: DraftStats = field(default_factory=DraftStats)
    """Drafting over all completions of the request: lengths, acceptance by place, calibration."""


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
    """Prompt tokens that the prefix cache spared: neither computed nor replayed."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    """What went wrong, if processing the request's own output raised (finish_reason "error")."""

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
    token_logprobs: list[float] = field(default_factory=list)
    """As in CompletionOutput, of these tokens."""
    logprobs: list[dict[int, float]] | None = None
    """As in CompletionOutput, of these tokens."""
    cached_tokens: int = 0
    """As in RequestOutput: known before the first token."""

    def extend(self, later: "SequenceDelta") -> None:
        """Adds what came right after it. Its lists grow in place."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason
        self.token_logprobs += later.token_logprobs
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs += later.logprobs

    def first(self, count: int) -> "SequenceDelta":
        """Takes the first `count` of more tokens out of it. Only of one without text: that has no places to be cut."""
        assert not self.text and count < len(self.token_ids)
        taken = SequenceDelta(
            request_id=self.request_id,
            index=self.index,
            text="",
            token_ids=self.token_ids[:count],
            finish_reason=None,
            token_logprobs=self.token_logprobs[:count],
            logprobs=None if self.logprobs is None else self.logprobs[:count],
            cached_tokens=self.cached_tokens,
        )
        for entries in (self.token_ids, self.token_logprobs, self.logprobs):
            if entries is not None:
                del entries[:count]
        return taken
