"""A request as its reader sees it: the text, probabilities and times of its completions, as tokens come."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, SequenceDelta
from deepinfer.engine.stop import FinishReason, OutputText
from deepinfer.metrics.drafts import DraftStats

COUNTED_ROUNDS = 256  # that wait to be counted together, where none is kept


class TextStream(Protocol):
    """Turns token ids into text as they come; the engine gets one per sequence from its owner (it knows no codec)."""

    def push(self, token_id: int) -> str:
        """Text that is complete now; never half a character."""

    def finish(self) -> str:
        """What is left, with U+FFFD for bytes that never became a character."""


@dataclass(eq=False, slots=True)
class Completion:
    """One of a request's n completions."""

    answer: Answer
    index: int
    detokenizer: TextStream | None
    """None: its reader takes ids alone, and text stays empty."""
    text: OutputText
    keep: bool = True
    """False: tokens and rounds are counted and forgotten; a reader that takes deltas needs them no more."""
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    draft_tok: list[int] = field(default_factory=list)
    accept_tok: list[int] = field(default_factory=list)
    predictions: list[list[float]] = field(default_factory=list)  # of each round, as in step_output.Rounds

    def accept(
        self, token_id: int, logprob: float, top: dict[int, float] | None, core_reason: FinishReason | None, now: float
    ) -> SequenceDelta:
        """Adds a token; finish_reason is set if it is the last one.

        core_reason: what the engine core says of the sequence after this token, from the ids alone. The tests go on in
        the order of spec/engine.md 4.8: stop or end token, then stop strings in the text, then everything else, so a
        stop string that the last allowed token completes counts as a stop. A stop or end token stays in token_ids and
        leaves no text unless include_stop_str_in_output.
        """
        params = self.answer.request.params
        self.num_tokens += 1
        if self.keep:
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            if top is not None:
                self.top_logprobs.append(top)
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now

        text = ""
        if core_reason is FinishReason.STOP:
            self.stop_reason = token_id if token_id in params.stop_token_ids else None
            if params.include_stop_str_in_output and self.detokenizer is not None:
                text, _ = self.text.push(self.detokenizer.push(token_id), may_stop=False)
        elif self.detokenizer is not None:
            may_stop = self.num_tokens > params.min_tokens  # after min_tokens tokens, as for a stop token
            text, stopped = self.text.push(self.detokenizer.push(token_id), may_stop)
            if stopped is not None:
                self.stop_reason = stopped
                self.finish_reason = FinishReason.STOP  # and nothing that was held back comes out
        if core_reason is not None and self.finish_reason is None:
            text += self._end(core_reason)
        return self._delta(text, [token_id], [logprob], None if top is None else [top])

    def verified(self, drafted: int, accepted: int, predictions: list[float]) -> None:
        """The tokens that came last were a round of drafts and the model's own."""
        self.draft_tok.append(drafted)
        self.accept_tok.append(accepted)
        self.predictions.append(predictions)
        if not self.keep and len(self.draft_tok) == COUNTED_ROUNDS:
            self.count_rounds(self.answer.drafts)
            for rounds in (self.draft_tok, self.accept_tok, self.predictions):
                rounds.clear()

    def count_rounds(self, drafts: DraftStats) -> None:
        """Adds those that are at hand."""
        if self.draft_tok:
            drafted, accepted = np.array([self.draft_tok, self.accept_tok], np.int64)
            drafts.observe(drafted, accepted, np.array(self.predictions, np.float32))

    def end(self, reason: FinishReason) -> SequenceDelta:
        """Ends it without another token; releases the text that was held back."""
        return self._delta(self._end(reason), [], [], None)

    def fail(self) -> SequenceDelta:
        """Ends it with reason "error" and touches nothing that may have raised."""
        self.finish_reason = FinishReason.ERROR
        return self._delta("", [], [], None)

    def output(self) -> CompletionOutput:
        params = self.answer.request.params
        return CompletionOutput(
            index=self.index,
            num_tokens=self.num_tokens,
            text=self.text.text,
            token_id=self.token_ids,
            token_logprobs=self.logprobs,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            logprobs=None if params.logprobs is None else self.top_logprobs,
            draft_tok=self.draft_tok,
            accept_tok=self.accept_tok,
            stop_reason=self.stop_reason,
        )

    def _end(self, reason: FinishReason) -> str:
        text = ""
        if self.detokenizer is not None:
            text, _ = self.text.push(self.detokenizer.finish(), may_stop=False)
        text += self.text.finish()
        self.finish_reason = reason  # last: if the text raises, the sequence has not ended yet
        return text

    def _delta(
        self, text: str, token_ids: list[int], logprobs: list[float], top: list[dict[int, float]] | None
    ) -> SequenceDelta:
        reason = None if self.finish_reason is None else str(self.finish_reason)
        answer = self.answer
        return SequenceDelta(
            answer.request.request_id, self.index, text, token_ids, reason, logprobs, top, answer.cached_tokens
        )


@dataclass(eq=False, slots=True)
class Answer:
    """A request's completions and what they share. Times in seconds on the front end's clock."""

    request: EngineRequest
    prompt: str | None
    arrival: float
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    queue: float | None = None
    cached_tokens: int = 0
    replay_tokens: int = 0
    preemptions: int = 0
    drafts: DraftStats = field(default_factory=DraftStats)  # rounds that are not kept
    error: str | None = None

    @property
    def keeps(self) -> bool:
        return self.completions[0].keep

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids.tolist() if self.keeps else [],
            outputs=[completion.output() for completion in self.completions],
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            metrics=self._metrics(),
            error=self.error,
        )

    def _metrics(self) -> RequestMetrics:
        firsts = [c.first_token_time for c in self.completions if c.first_token_time is not None]
        several = [c for c in self.completions if c.num_tokens > 1]
        gaps = sum(c.num_tokens - 1 for c in several)
        spans = sum((c.last_token_time or 0) - (c.first_token_time or 0) for c in several)
        return RequestMetrics(
            queue=self.queue,
            ttft=min(firsts) - self.arrival if firsts else None,
            tbt=spans / gaps if gaps else None,
            replay_tokens=self.replay_tokens,
            preemptions=self.preemptions,
            drafts=self._drafts(),
        )

    def _drafts(self) -> DraftStats:
        drafts = deepcopy(self.drafts)
        for completion in self.completions:
            completion.count_rounds(drafts)
        return drafts
