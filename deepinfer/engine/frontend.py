"""From what the engine core says to what a caller reads: text, stop strings, probabilities, times.

It stands where the caller is: in the engine's own process for `LLM`, in the client's for an engine process. The core
ends a sequence on ids and lengths, the front end on text, several steps later perhaps; whatever the core still says of
a sequence that ended here is passed over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import repeat

from deepinfer.engine.answer import Answer, Completion, TextStream
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.outputs import RequestOutput, SequenceDelta
from deepinfer.engine.step_output import FINISH_CODES, NO_TOKEN, PromptScores, Rounds, SequenceEvent, StepOutput
from deepinfer.engine.stop import FinishReason, OutputText

logger = logging.getLogger(__name__)

Abort = tuple[int, int | None]  # number of a request, index of a completion or None for all of them


class OutputProcessor:
    """Requests under way at the front end. Not thread-safe.

    detokenizer: makes the text stream of a sequence (argument: skip_special_tokens), or None for ids only. clock:
    seconds, monotonic; the times of RequestMetrics are taken on it. keep: outputs hold the tokens; False: their numbers
    and times alone, for readers that have taken the deltas, so that long answers take no memory here.
    """

    def __init__(
        self,
        detokenizer: Callable[[bool], TextStream] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        keep: bool = True,
    ) -> None:
        self._detokenizer = detokenizer
        self._keep = keep
        self._clock = clock
        self._answers: dict[int, Answer] = {}  # by number
        self._numbers: dict[str, int] = {}  # of unfinished requests, by request_id
        self._finished: dict[str, RequestOutput] = {}

    @property
    def reads_text(self) -> bool:
        """False if there is no tokenizer: stop strings cannot be found then."""
        return self._detokenizer is not None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._answers)

    def is_unfinished(self, request_id: str) -> bool:
        """True while the request waits or runs."""
        return request_id in self._numbers

    def is_known(self, request_id: str) -> bool:
        """True while the request waits or runs, or its output waits to be taken."""
        return request_id in self._numbers or request_id in self._finished

    def number_of(self, request_id: str) -> int | None:
        """The number of an unfinished request."""
        return self._numbers.get(request_id)

    def unfinished(self) -> list[str]:
        """Ids of the requests that wait or run, in order of submission."""
        return list(self._numbers)

    def add(self, request: EngineRequest, prompt: str | None = None, arrival: float | None = None) -> None:
        """Follows a request from here on. arrival: when it was submitted, on this clock; None = now.

        ValueError if its request_id or number is in use.
        """
        if self.is_known(request.request_id) or request.number in self._answers:
            raise ValueError(f"request {request.request_id!r} or its number {request.number} is already in use")
        params = request.params
        answer = Answer(request, prompt, self._clock() if arrival is None else arrival)
        if params.prompt_logprobs is not None:
            answer.prompt_logprobs = [None]  # nothing predicts the first token
        for index in range(params.n):
            stream = None if self._detokenizer is None else self._detokenizer(params.skip_special_tokens)
            text = OutputText(tuple(params.stop), params.include_stop_str_in_output)
            answer.completions.append(Completion(answer, index, stream, text, self._keep))
        self._answers[request.number] = answer
        self._numbers[request.request_id] = request.number

    def process(self, output: StepOutput) -> tuple[list[SequenceDelta], list[Abort]]:
        """Books a step -> (what it added, one delta per sequence; what the core must abort, because it ended here).

        An exception while one request's tokens are processed ends that request, reason "error"; it is logged and its
        text stands in RequestOutput.error. No other request notices.
        """
        for event in output.events:
            self._note(event)
        for scores in output.prompt_scores:
            self._score(scores)
        now = self._clock()
        deltas: dict[tuple[int, int], SequenceDelta] = {}
        aborts: list[Abort] = []
        ended: dict[int, Answer] = {}
        rows = zip(
            output.numbers.tolist(),
            output.indices.tolist(),
            output.token_ids.tolist(),
            output.logprobs.tolist(),
            output.finish.tolist(),
            repeat(None) if output.top is None else output.top,
            strict=False,  # one of them may be endless
        )
        for number, index, token_id, logprob, code, top in rows:
            answer = self._answers.get(number)
            if answer is None:
                continue
            completion = answer.completions[index]
            if completion.finish_reason is not None:
                continue
            reason = FINISH_CODES[code]
            try:
                if token_id != NO_TOKEN:
                    delta = completion.accept(token_id, logprob, top, reason, now)
                else:
                    delta = completion.end(reason or FinishReason.ERROR)
            except Exception as error:
                for failed in self._fail(answer, error):
                    _merge(deltas, number, failed)
                aborts.append((number, None))
                continue
            _merge(deltas, number, delta)
            if completion.finish_reason is not None:
                if reason is None:  # the core does not know yet
                    aborts.append((number, index))
                ended[number] = answer
        if output.rounds is not None:
            self._note_rounds(output.rounds, deltas)
        for number, answer in ended.items():
            if number in self._answers:
                self._retire(answer)
        return list(deltas.values()), aborts

    def end(self, request_id: str, reason: FinishReason, index: int | None = None) -> list[SequenceDelta]:
        """Ends a request here, or one completion of it, with what it has; the caller tells the core. Nothing happens to
        what is unknown or has ended."""
        number = self._numbers.get(request_id)
        if number is None:
            return []
        answer = self._answers[number]
        deltas = []
        try:
            for completion in answer.completions:
                if completion.finish_reason is None and index in (None, completion.index):
                    deltas.append(completion.end(reason))
        except Exception as error:
            return [*deltas, *self._fail(answer, error)]
        self._retire(answer)
        return deltas

    def pop_output(self, request_id: str) -> RequestOutput:
        """Hands a finished request over; KeyError if it has not finished or was handed over before."""
        return self._finished.pop(request_id)

    def forget(self, request_id: str) -> None:
        """Drops the output of a finished request if nobody took it. Idempotent."""
        self._finished.pop(request_id, None)

    def _note(self, event: SequenceEvent) -> None:
        answer = self._answers.get(event.number)
        if answer is None:
            return
        if event.kind == "preempted":
            answer.preemptions += 1
        elif event.kind == "admitted":
            answer.replay_tokens += event.replay_tokens
            if answer.queue is None:  # later ones: after a preemption, or completions that found no room at first
                answer.queue = event.queue_seconds
                answer.cached_tokens = event.cached_tokens

    def _note_rounds(self, rounds: Rounds, deltas: dict[tuple[int, int], SequenceDelta]) -> None:
        """A round belongs to the tokens of its step; what came behind a stop string was no output."""
        rows = zip(
            rounds.numbers.tolist(),
            rounds.indices.tolist(),
            rounds.drafted.tolist(),
            rounds.accepted.tolist(),
            rounds.predictions.tolist(),
            strict=True,
        )
        for number, index, drafted, accepted, predictions in rows:
            answer, delta = self._answers.get(number), deltas.get((number, index))
            if answer is not None and delta is not None:
                accepted = min(accepted, len(delta.token_ids))
                answer.completions[index].verified(drafted, accepted, predictions)

    def _score(self, scores: PromptScores) -> None:
        answer = self._answers.get(scores.number)
        if answer is not None and answer.prompt_logprobs is not None:
            answer.prompt_logprobs += scores.entries

    def _fail(self, answer: Answer, error: Exception) -> list[SequenceDelta]:
        """Ends what is left of a request whose own processing raised."""
        logger.error("request %r ended: its output could not be processed", answer.request.request_id, exc_info=error)
        answer.error = f"{type(error).__name__}: {error}"
        deltas = [completion.fail() for completion in answer.completions if completion.finish_reason is None]
        self._retire(answer)
        return deltas

    def _retire(self, answer: Answer) -> None:
        """Hands a request to `pop_output` once its last completion has ended."""
        if answer.finished:
            del self._answers[answer.request.number]
            del self._numbers[answer.request.request_id]
            self._finished[answer.request.request_id] = answer.output()


def _merge(deltas: dict[tuple[int, int], SequenceDelta], number: int, delta: SequenceDelta) -> None:
    """Joins what one step adds to one sequence token by token."""
    first = deltas.setdefault((number, delta.index), delta)
    if first is not delta:
        first.extend(delta)
