"""The plain step loop: schedule -> forward -> sample -> process, with nothing in flight between steps."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.cache import Cache
from deepinfer.config import EngineConfig
from deepinfer.engine import random_streams
from deepinfer.engine.admission import check_request, check_token_ids
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.outputs import RequestOutput, SequenceDelta
from deepinfer.engine.penalties import TokenHistory
from deepinfer.engine.process import accept_token, end
from deepinfer.engine.prompt_logprobs import collect
from deepinfer.engine.request import Request, RequestState, Status, TextStream
from deepinfer.engine.request import Sequence as Seq
from deepinfer.engine.sampler import SampleRow, sample
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import ScheduledChunk, Scheduler
from deepinfer.engine.stop import FinishReason, OutputText
from deepinfer.model import Chunk


class StepModel(Protocol):
    """What the loop needs of a model."""

    def forward(self, chunks: Sequence[Chunk], cache: Cache) -> Tensor: ...


class Engine:
    """Requests in, tokens out. Not thread-safe: one owner calls add_request, abort and step in turn.

    refused_ids: token ids that no prompt may hold, with the reason.
    detokenizer: makes the text stream of a sequence (argument: skip_special_tokens), or None for ids only, in which
    case stop strings are refused. clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: StepModel,
        cache: Cache,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        refused_ids: Mapping[int, str] | None = None,
        detokenizer: Callable[[bool], TextStream] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = cache
        self.scheduler = Scheduler(config, cache)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._model = model
        self._vocab_size = vocab_size
        self._refused_ids = dict(refused_ids or {})
        self._detokenizer = detokenizer
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._finished: dict[str, RequestOutput] = {}
        self._num_requests = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._states)

    def is_unfinished(self, request_id: str) -> bool:
        """True while the request waits or runs."""
        return request_id in self._states

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """The door alone: raises InvalidRequestError, or returns how many tokens the request may generate."""
        if params.stop and self._detokenizer is None:
            raise InvalidRequestError("stop", "stop strings need a tokenizer, and this engine has none")
        self.check_ids("prompt_token_ids", prompt_token_ids)
        return check_request(len(prompt_token_ids), params, self.config, self._vocab_size, self.eos_token_ids)

    def check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError unless there are ids and the model knows them all."""
        check_token_ids(field, token_ids, self._vocab_size, self._refused_ids)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        arrival: float | None = None,
    ) -> None:
        """Queues a request; raises InvalidRequestError and changes nothing if it can never run."""
        if request_id in self._states or request_id in self._finished:
            raise InvalidRequestError("request_id", f"{request_id!r} is already in use")
        max_tokens = self.check(prompt_token_ids, params)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            max_tokens=max_tokens,
            arrival=self._clock() if arrival is None else arrival,
            number=self._num_requests,
            prompt=prompt,
        )
        self._num_requests += 1
        state = RequestState(request, prompt_logprobs=None if params.prompt_logprobs is None else [None])
        seed = self._admission_seed(request)
        for index in range(params.n):
            state.sequences.append(
                Seq(
                    state=state,
                    index=index,
                    seed=random_streams.child_seed(seed, index),
                    token_ids=list(prompt_token_ids),
                    detokenizer=None if self._detokenizer is None else self._detokenizer(params.skip_special_tokens),
                    text=OutputText(tuple(params.stop), params.include_stop_str_in_output),
                    status=Status.FORKING,
                )
            )
        self._states[request_id] = state
        self.scheduler.add(state.sequences[0])

    def abort(self, request_id: str) -> bool:
        """Ends a request in whatever state it is and frees what it holds; False if it is not running. Idempotent."""
        state = self._states.get(request_id)
        if state is None:
            return False
        self._end_all(state, FinishReason.ABORT)
        return True

    def discard(self, request_id: str) -> None:
        """Ends a request if it runs, and forgets its output if nobody took it. Idempotent."""
        self.abort(request_id)
        self._finished.pop(request_id, None)

    def abort_all(self) -> None:
        for request_id in list(self._states):
            self.abort(request_id)

    def pop_output(self, request_id: str) -> RequestOutput:
        """Hands a finished request over; KeyError if it has not finished or was handed over before."""
        return self._finished.pop(request_id)

    @torch.inference_mode()
    def step(self) -> list[SequenceDelta]:
        """Runs one step and says what it added. If it fails, everything under way is ended with reason "abort", all
        slots and blocks are free again, and EngineStepError is raised with the cause chained."""
        deltas = self._expire()
        try:
            chunks = self.scheduler.schedule()
            if chunks:
                self._note_start(chunks)
                logits = self._forward(chunks)
                deltas += self._advance(chunks, logits)
            elif self._states:
                raise RuntimeError("sequences are waiting and none could be scheduled")
        except Exception as error:
            self.abort_all()
            raise EngineStepError(f"a step failed: {error}") from error
        return deltas

    def _forward(self, chunks: list[ScheduledChunk]) -> Tensor:
        batch = [
            Chunk(
                slot=chunk.sequence.slot,  # type: ignore[arg-type]  # a scheduled sequence holds a slot
                start=chunk.start,
                token_ids=chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens],
                num_logits=chunk.num_logits,
            )
            for chunk in chunks
        ]
        return self._model.forward(batch, self.cache)

    def _advance(self, chunks: list[ScheduledChunk], logits: Tensor) -> list[SequenceDelta]:
        """Books what the forward pass computed, then chooses and accepts the next tokens."""
        due: list[Seq] = []
        rows: list[int] = []
        row = 0  # of the chunk's first logits
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.start + chunk.num_tokens
            if sequence.scores_prompt:
                collect(sequence, chunk, logits[row : row + chunk.num_logits])
            row += chunk.num_logits
            if not chunk.samples:
                continue
            sequence.status = Status.DECODE
            children = [s for s in sequence.state.sequences if s.status is Status.FORKING]
            ready = [sequence, *self.scheduler.fork(sequence, children)]
            due += ready
            rows += [row - 1] * len(ready)
        if rows != list(range(logits.shape[0])):
            logits = logits[rows]
        sampled = sample(logits, [self._sample_row(sequence, logits) for sequence in due])
        now = self._clock()
        deltas = []
        for i, sequence in enumerate(due):
            if sampled.valid[i]:
                top = sampled.top[i]
                deltas.append(
                    accept_token(sequence, sampled.token_ids[i], sampled.logprobs[i], top, now, self.eos_token_ids)
                )
            else:
                deltas.append(end(sequence, FinishReason.ERROR))
            if sequence.finish_reason is not None:
                self._retire(sequence)
        return deltas

    def _sample_row(self, sequence: Seq, logits: Tensor) -> SampleRow:
        params = sequence.request.params
        if params.penalised and sequence.history is None:
            sequence.history = TokenHistory.of(
                sequence.request.prompt_token_ids, sequence.output_ids, logits.shape[-1], logits.device
            )
        forbidden: tuple[int, ...] = ()
        if sequence.num_output < params.min_tokens:
            forbidden = tuple(params.stop_token_ids) + (() if params.ignore_eos else tuple(self.eos_token_ids))
        return SampleRow(params, sequence.seed, sequence.num_tokens - 1, sequence.history, forbidden)

    def _admission_seed(self, request: Request) -> int:
        if request.params.seq_seed is not None:
            return request.params.seq_seed
        if self.config.seed is None:
            return random_streams.random_seed()
        return random_streams.derive_seed(self.config.seed, random_streams.Stream.REQUEST, request.number)

    def _note_start(self, chunks: list[ScheduledChunk]) -> None:
        now = self._clock()
        for chunk in chunks:
            if chunk.sequence.state.first_scheduled is None:
                chunk.sequence.state.first_scheduled = now

    def _expire(self) -> list[SequenceDelta]:
        """Ends the requests whose deadline has passed, with what they have."""
        deltas: list[SequenceDelta] = []
        now = self._clock()
        for state in list(self._states.values()):
            deadline = state.request.params.deadline
            if deadline is not None and now - state.request.arrival >= deadline:
                deltas += self._end_all(state, FinishReason.DEADLINE)
        return deltas

    def _end_all(self, state: RequestState, reason: FinishReason) -> list[SequenceDelta]:
        deltas = []
        for sequence in state.sequences:
            if sequence.status is not Status.FINISHED:
                deltas.append(end(sequence, reason))
                self._retire(sequence)
        return deltas

    def _retire(self, sequence: Seq) -> None:
        """Frees a sequence that has its finish reason; the last one hands its request to `pop_output`."""
        self.scheduler.finish(sequence)
        state = sequence.state
        if state.finished:
            del self._states[state.request.request_id]
            self._finished[state.request.request_id] = state.output()
