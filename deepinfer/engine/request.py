"""A request as it came, and the sequences that answer it."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from deepinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer.engine.penalties import TokenHistory
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.stop import FinishReason, OutputText


class TextStream(Protocol):
    """Turns token ids into text as they come; the engine gets one per sequence from its owner (it knows no codec)."""

    def push(self, token_id: int) -> str:
        """Text that is complete now; never half a character."""

    def finish(self) -> str:
        """What is left, with U+FFFD for bytes that never became a character."""


class Status(Enum):
    """Where a sequence is; the legal changes are the arrows.

    FORKING -> DECODE | WAITING;  WAITING -> PREFILL -> DECODE;  PREFILL, DECODE -> WAITING (preempted);
    any -> FINISHED
    """

    FORKING = auto()  # completion 1..n-1, waiting for the first one's prompt
    WAITING = auto()  # no slot, no blocks
    PREFILL = auto()  # slot and blocks; known tokens still to compute, beyond the last one
    DECODE = auto()  # only its last token is still to compute
    FINISHED = auto()  # slot and blocks are given back


@dataclass(frozen=True)
class Request:
    """Immutable input, checked at the door."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, cut at the end of the context
    arrival: float  # seconds on the engine's clock
    number: int  # order of arrival
    prompt: str | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion under way. Counters as in spec/engine.md 1.1; with a plain loop nothing is in flight."""

    state: "RequestState"
    index: int  # which of the request's n completions
    seed: int
    token_ids: list[int]  # prompt and accepted output
    detokenizer: TextStream | None
    text: OutputText
    history: TokenHistory | None = None
    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose state is in the cache
    slot: int | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def request(self) -> Request:
        return self.state.request

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def order(self) -> tuple[int, int, int]:
        """Who runs first: priority, then arrival. The largest order is the youngest, which preemption takes."""
        return (self.request.params.priority, self.request.number, self.index)

    @property
    def scores_prompt(self) -> bool:
        """True while prompt tokens are still to score (prompt_logprobs). Only the first completion collects them."""
        collected = self.state.prompt_logprobs
        return self.index == 0 and collected is not None and len(collected) < len(self.request.prompt_token_ids)

    def output(self) -> CompletionOutput:
        params = self.request.params
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_id=self.output_ids,
            token_logprobs=list(self.logprobs),
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            logprobs=None if params.logprobs is None else list(self.top_logprobs),
            stop_reason=self.stop_reason,
        )


@dataclass(eq=False, slots=True)
class RequestState:
    """A request's sequences and what they share."""

    request: Request
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    first_scheduled: float | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[sequence.output() for sequence in self.sequences],
            prompt_logprobs=self.prompt_logprobs,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        arrival = self.request.arrival
        firsts = [s.first_token_time for s in self.sequences if s.first_token_time is not None]
        gaps = sum(s.num_output - 1 for s in self.sequences if s.num_output > 1)
        spans = sum((s.last_token_time or 0) - (s.first_token_time or 0) for s in self.sequences if s.num_output > 1)
        return RequestMetrics(
            queue=None if self.first_scheduled is None else self.first_scheduled - arrival,
            ttft=min(firsts) - arrival if firsts else None,
            tbt=spans / gaps if gaps else None,
        )
