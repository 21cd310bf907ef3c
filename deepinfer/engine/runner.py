"""The device's side of a step: from a plan, which names slots and positions, to the tokens drawn.

The runner keeps every slot's tokens in a table of its own and reads from it what it computes, so a step can be planned
before the tokens it starts from are known. Steps run one after the other, each in a fixed order: edits, admissions,
forward pass, forks, scores, draws, drafts; what grammars let follow is worked out beside the forward pass. It runs in
whatever thread calls it (engine/device_thread.py: one of its own).
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.cache.edits import CopySlot, Edit, OpenSlot, Restore, SetLength
from deepinfer.config import VERIFY_ROWS
from deepinfer.engine.draws import Chunks, StepDraws, no_draws, stuck
from deepinfer.engine.errors import OutOfMemoryStepError
from deepinfer.engine.plan import Admission, StepPlan, StepResult
from deepinfer.engine.prompt_logprobs import score_prompts
from deepinfer.engine.sampling_state import SamplingState
from deepinfer.engine.speculator import Speculator, TruncatingStorage
from deepinfer.kernels.streams import OutOfMemory
from deepinfer.model.batch import Batch
from deepinfer.speculation.calibration import Calibration
from deepinfer.speculation.constraint import MaskFiller
from deepinfer.speculation.propose import Drafter

if TYPE_CHECKING:
    from deepinfer.engine.rounds import Rounds

Whole = npt.NDArray[np.int64]


class Storage(TruncatingStorage, Protocol):
    """What the runner needs of the cache's tensors; the model needs the rest."""

    def apply(self, edits: Iterable[Edit]) -> None: ...


class StepModel(Protocol):
    """What the runner needs of a model."""

    device: torch.device

    def forward(self, batch: Batch, storage: Any) -> Tensor: ...


class PendingStep(Protocol):
    """A step that the device has before it."""

    def end(self) -> StepResult:
        """Waits for it. Once, and of several in the order in which they began; raises what goes wrong."""


class Runner(ABC):
    """Whatever computes plans: the model, or in a benchmark of the host something that only takes its time."""

    @abstractmethod
    def run(self, plan: StepPlan) -> StepResult:
        """Carries a plan out; raises what goes wrong."""

    def begin(self, plan: StepPlan, *, behind: bool) -> StepResult | PendingStep | None:
        """Carries a plan out as far as that needs no answer of the device.

        behind: a step that has begun has not ended. None then, and nothing has happened, where the plan cannot begin
        before that is over.
        """
        return None if behind else self.run(plan)

    def run_guarded(self, plan: StepPlan) -> StepResult:
        """`run`, with what it raises as the result's `error`."""
        begin = time.perf_counter()
        try:
            return self.run(plan)
        except Exception as error:
            return failed_result(error, time.perf_counter() - begin)

    def begin_guarded(self, plan: StepPlan, *, behind: bool) -> StepResult | PendingStep | None:
        """The same of `begin`."""
        begin = time.perf_counter()
        try:
            return self.begin(plan, behind=behind)
        except Exception as error:
            return failed_result(error, time.perf_counter() - begin)


def end_guarded(step: PendingStep) -> StepResult:
    """The same of its end."""
    try:
        return step.end()
    except Exception as error:
        return failed_result(error)


class ModelRunner(Runner):
    """Runs the plans of one engine: up to `max_num_seqs` sequences of up to `max_model_len` tokens. clock: seconds.

    drafter: drafts `drafts` tokens behind every token drawn, for the steps whose plans say so. threads: entered around
    each step, forward pass, draws and drafts alike; says whose threads they are (kernels/cpu/threads.py). Torch's, once
    woken by the draws of one step, would be in the way of the next one's kernels. filler: fills the masks of sequences
    with constraints; None = on the spot, one after the other.
    """

    def __init__(
        self,
        model: StepModel,
        storage: Storage,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        drafter: Drafter | None = None,
        drafts: int = 0,
        calibration: Calibration | None = None,
        threads: Callable[[], AbstractContextManager[None]] = nullcontext,
        filler: MaskFiller | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.storage = storage
        self.sampling = SamplingState(
            max_num_seqs, vocab_size, eos_token_ids=eos_token_ids, device=model.device, filler=filler
        )
        # What an earlier owner of a slot left behind its own last token stays: no plan reads a position before the
        # step that writes it. With drafts a sequence that has ended still draws and drafts, behind the longest's end.
        width = max_model_len + (VERIFY_ROWS if drafter else 0)
        self.tokens = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=model.device)
        self.speculator: Speculator | None = None
        if drafter is not None:
            self.speculator = Speculator(
                drafter,
                storage,
                self.sampling,
                self.tokens,
                drafts=drafts,
                max_model_len=max_model_len,
                calibration=calibration,
            )
        self._draws = StepDraws(self.tokens, self.sampling, self.speculator)
        self.rounds: Rounds | None = None  # set by whoever has padded steps (build.py)
        self._max_model_len = max_model_len
        self._threads, self._clock = threads, clock

    def run(self, plan: StepPlan) -> StepResult:
        """Carries the plan out; one without chunks changes what its edits say and draws nothing.

        ValueError, before anything is changed: a slot or position outside the table. Whatever else is raised leaves
        the plan half done: no sequence that it names can go on. OutOfMemoryStepError wherever the device had no memory
        left: for inputs, in the forward pass, in draws or drafts.
        """
        step = self.begin(plan, behind=False)
        assert step is not None
        return step if isinstance(step, StepResult) else step.end()

    def begin(self, plan: StepPlan, *, behind: bool) -> StepResult | PendingStep | None:
        """Raises as `run`. A plan that is a round of the device is all that can be pending, and go behind another."""
        with self._guarded(plan), torch.inference_mode(), self._threads():
            if behind and (self.rounds is None or not self.rounds.follows(plan)):
                return None
            return self._begin(plan, behind)

    @contextmanager
    def _guarded(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except (OutOfMemory, OutOfMemoryStepError) as error:
            cause = error.__cause__ if isinstance(error, OutOfMemoryStepError) else error
            for raised in (error, cause):  # what the frames of the step hold is what the next one needs
                traceback.clear_frames(raised.__traceback__ if raised else None)
            if isinstance(error, OutOfMemoryStepError):
                raise
            raise OutOfMemoryStepError(int(plan.lengths.sum())) from error

    def _begin(self, plan: StepPlan, behind: bool) -> StepResult | PendingStep:
        begin = self._clock()
        positions = plan.draw_positions()
        self._check(plan, positions)
        self.storage.apply(plan.edits)
        self._admit(plan.admissions)
        if (step := self._round(plan, behind)) is not None:
            return step
        result = self._compute(plan, positions, begin) if plan.slots.size else no_draws()
        result.device_seconds = self._clock() - begin
        return result

    def _compute(self, plan: StepPlan, positions: Whole, begin: float) -> StepResult:
        chunks = self._chunks(plan)
        batch = self._batch(plan, chunks)
        asked = self._draws.ask_constraints(plan, chunks)
        prepared = self._clock() - begin
        logits = self.model.forward(batch, self.storage)
        masks = None if asked is None else asked.masks.result()  # before the forks, which copy constraints
        self._fork(plan)
        decode_rows = int(chunks.num_logits[: plan.num_decodes].sum())
        scores = score_prompts(logits[decode_rows:], plan.scores)
        positions[: plan.num_decodes] = chunks.starts[: plan.num_decodes]
        result = self._draws.draw(plan, chunks, positions, logits, batch.token_ids, masks)
        if asked is not None and masks is not None and not result.valid.all():
            result.stuck = stuck(asked, masks, result)
        result.scores, result.prepare_seconds = scores, prepared
        return result

    def _round(self, plan: StepPlan, behind: bool) -> PendingStep | None:
        """The plan as a round of the device, None where it is none."""
        if self.rounds is None:
            return None
        moved = [order.slot for order in plan.edits if isinstance(order, OpenSlot | SetLength | Restore)]
        copied = [order.target for order in plan.edits if isinstance(order, CopySlot)]
        self.rounds.leave([*moved, *copied, *(admission.slot for admission in plan.admissions)])
        found = self.rounds.step_of(plan)
        if found is None:
            self.rounds.leave(np.concatenate((plan.slots, plan.draw_slots)))
            return None
        if self.speculator is not None:
            self.speculator.forget(plan.slots)
        return self.rounds.begin(*found, behind=behind)

    # -- before the forward pass ----------------------------------------------------------------------------------

    def _check(self, plan: StepPlan, positions: Whole) -> None:
        # The table is read and written by flat places: one beyond a row's end is another sequence's first token.
        num_slots = len(self.tokens)
        longest = max((len(admission.token_ids) for admission in plan.admissions), default=0)
        bounds = plan.num_decodes if self.speculator else 0  # where they really are shows later (_chunks)
        for ends in ((plan.starts + plan.lengths)[bounds:], positions[bounds:] + 2):
            longest = max(longest, int(ends.max(initial=0)))
        self._check_length(plan, longest)
        for slots in (plan.slots, plan.draw_slots):
            if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
                raise ValueError(f"step {plan.number} names a slot outside 0 .. {num_slots - 1}")

    def _check_length(self, plan: StepPlan, tokens: int) -> None:
        if tokens > self._max_model_len:
            raise ValueError(
                f"step {plan.number} reaches {tokens} tokens of a sequence, max_model_len = {self._max_model_len}"
            )

    def _admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            ids = torch.tensor(admission.token_ids, dtype=torch.int32)
            self.tokens[admission.slot, : len(ids)] = ids
        self.sampling.admit(admissions)
        if self.speculator is not None:
            self.speculator.forget([admission.slot for admission in admissions])

    def _chunks(self, plan: StepPlan) -> Chunks:
        decodes = plan.num_decodes
        if self.speculator is None or not decodes:
            return Chunks(plan.starts, plan.lengths, plan.num_logits)
        starts, lengths, num_logits = plan.starts.copy(), plan.lengths.copy(), plan.num_logits.copy()
        starts[:decodes] = self.speculator.starts(plan)
        self._check_length(plan, int(starts[:decodes].max()) + 1)
        lengths[:decodes] = num_logits[:decodes] = 1 + self.speculator.lengths(plan, starts[:decodes])
        return Chunks(starts, lengths, num_logits)

    def _batch(self, plan: StepPlan, chunks: Chunks) -> Batch:
        starts, lengths = chunks.starts, chunks.lengths
        first_rows = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(starts - first_rows, lengths)
        places = self._draws.places(np.repeat(plan.slots, lengths), positions)
        return Batch.from_arrays(
            slots=plan.slots,
            starts=starts,
            lengths=lengths,
            num_logits=chunks.num_logits,
            token_ids=self.tokens.view(-1)[places].long(),
            window_floors=plan.window_floors,
            write_from=plan.write_from,
            keep_from=plan.keep_from,
            device=self.tokens.device,
        )

    # -- after the forward pass -----------------------------------------------------------------------------------

    def _fork(self, plan: StepPlan) -> None:
        for parent, child, seed, edits in plan.forks:
            self.storage.apply(edits)
            chunk = int(np.flatnonzero(plan.slots == parent)[0])  # a parent forks in the step that ends its prompt
            end = int(plan.starts[chunk] + plan.lengths[chunk])
            self.tokens[child, :end] = self.tokens[parent, :end]
            self.sampling.fork(parent, child, seed)
            if self.speculator is not None:
                self.speculator.forget([child])


def failed_result(error: BaseException, device_seconds: float = 0.0) -> StepResult:
    """The answer to a step that raised, or that was not run because an earlier one did."""
    result = no_draws()
    result.error, result.device_seconds = error, device_seconds
    return result
