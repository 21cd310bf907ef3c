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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.cache.edits import CopySlot, Edit, OpenSlot, Restore, SetLength
from deepinfer.config import VERIFY_ROWS
from deepinfer.engine.errors import OutOfMemoryStepError
from deepinfer.engine.plan import Admission, StepPlan, StepResult
from deepinfer.engine.prompt_logprobs import score_prompts
from deepinfer.engine.sampler import choose, list_top, logprobs_of
from deepinfer.engine.sampling_state import CONSTRAINED, SamplingState
from deepinfer.engine.slot_constraints import StepMasks
from deepinfer.engine.speculator import Speculator, TruncatingStorage, VerifyRows
from deepinfer.kernels.streams import OutOfMemory
from deepinfer.model.batch import Batch
from deepinfer.speculation.calibration import Calibration
from deepinfer.speculation.constraint import MaskFiller, Masks
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


class Runner(ABC):
    """Whatever computes plans: the model, or in a benchmark of the host something that only takes its time."""

    @abstractmethod
    def run(self, plan: StepPlan) -> StepResult:
        """Carries a plan out; raises what goes wrong."""

    def run_guarded(self, plan: StepPlan) -> StepResult:
        """`run`, with what it raises as the result's `error`."""
        begin = time.perf_counter()
        try:
            return self.run(plan)
        except Exception as error:
            return failed_result(error, time.perf_counter() - begin)


class _Chunks(NamedTuple):
    """Where a step's chunks really start and how long they are, [chunks] each: `starts`, `lengths` and `num_logits` of
    the plan where nothing is drafted."""

    starts: Whole
    lengths: Whole
    num_logits: Whole


class _Asked(NamedTuple):
    """The masks of a step, on their way. Of each draw, as many rows as it has drafts and one more."""

    constrained: npt.NDArray[np.bool_]  # [draws]
    counts: Whole  # [draws] rows of masks, 0 where nothing constrains
    masks: StepMasks


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
        # step that writes it.
        # With drafts a sequence that has ended still draws and drafts once, behind the longest one's end.
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
        self.rounds: Rounds | None = None  # set by whoever has padded steps (build.py)
        self._max_model_len = max_model_len
        self._threads, self._clock = threads, clock

    def run(self, plan: StepPlan) -> StepResult:
        """Carries the plan out; one without chunks changes what its edits say and draws nothing.

        ValueError, before anything is changed: a slot or position outside the table. Whatever else is raised leaves
        the plan half done: no sequence that it names can go on. OutOfMemoryStepError wherever the device had no memory
        left: for inputs, in the forward pass, in draws or drafts.
        """
        try:
            with torch.inference_mode(), self._threads():
                return self._run(plan)
        except (OutOfMemory, OutOfMemoryStepError) as error:
            cause = error.__cause__ if isinstance(error, OutOfMemoryStepError) else error
            for raised in (error, cause):  # what the frames of the step hold is what the next one needs
                traceback.clear_frames(raised.__traceback__ if raised else None)
            if isinstance(error, OutOfMemoryStepError):
                raise
            raise OutOfMemoryStepError(int(plan.lengths.sum())) from error

    def _run(self, plan: StepPlan) -> StepResult:
        begin = self._clock()
        positions = self._draw_positions(plan)
        self._check(plan, positions)
        self.storage.apply(plan.edits)
        self._admit(plan.admissions)
        if (result := self._round(plan)) is not None:
            result.prepare_seconds = 0.0
        elif plan.slots.size:
            chunks = self._chunks(plan)
            batch = self._batch(plan, chunks)
            asked = self._ask_constraints(plan, chunks)
            prepared = self._clock() - begin
            logits = self.model.forward(batch, self.storage)
            masks = None if asked is None else asked.masks.result()  # before the forks, which copy constraints
            self._fork(plan)
            decode_rows = int(chunks.num_logits[: plan.num_decodes].sum())
            scores = score_prompts(logits[decode_rows:], plan.scores)
            positions[: plan.num_decodes] = chunks.starts[: plan.num_decodes]
            if self.speculator is None:
                result = self._draw(plan, positions, logits, masks)
            else:
                drafts = np.zeros_like(plan.draw_slots)
                drafts[: plan.num_decodes] = chunks.lengths[: plan.num_decodes] - 1
                rows = VerifyRows(plan.draw_slots, positions, drafts)
                result = self._draw_with_drafts(plan, rows, logits, batch.token_ids, self.speculator, masks)
            if asked is not None and masks is not None and not result.valid.all():
                result.stuck = _stuck(asked, masks, result)
            result.scores = scores
            result.prepare_seconds = prepared
        else:
            result = _no_draws()
        result.device_seconds = self._clock() - begin
        return result

    def _round(self, plan: StepPlan) -> StepResult | None:
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
        return self.rounds.run(*found)

    # -- before the forward pass ----------------------------------------------------------------------------------

    @staticmethod
    def _draw_positions(plan: StepPlan) -> Whole:
        """Positions [draws] of the newest token before each draw; of decodes, what they are at most."""
        decodes = plan.num_decodes
        rows_end = np.cumsum(plan.num_logits[decodes:])
        rows = plan.draw_rows[decodes:]
        chunk = np.searchsorted(rows_end, rows, side="right")
        others = ((plan.starts + plan.lengths)[decodes:] - rows_end)[chunk] + rows
        return np.concatenate((plan.starts[:decodes], others))

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

    def _chunks(self, plan: StepPlan) -> _Chunks:
        decodes = plan.num_decodes
        if self.speculator is None or not decodes:
            return _Chunks(plan.starts, plan.lengths, plan.num_logits)
        starts, lengths, num_logits = plan.starts.copy(), plan.lengths.copy(), plan.num_logits.copy()
        starts[:decodes] = self.speculator.starts(plan)
        self._check_length(plan, int(starts[:decodes].max()) + 1)
        lengths[:decodes] = num_logits[:decodes] = 1 + self.speculator.lengths(plan, starts[:decodes])
        return _Chunks(starts, lengths, num_logits)

    def _batch(self, plan: StepPlan, chunks: _Chunks) -> Batch:
        starts, lengths = chunks.starts, chunks.lengths
        first_rows = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(starts - first_rows, lengths)
        places = self._places(np.repeat(plan.slots, lengths), positions)
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

    def _places(self, slots: Whole, positions: Whole) -> Tensor:
        """Where tokens of these slots and positions stand in the flat table."""
        return self.sampling.place(slots * self.tokens.shape[1] + positions)

    def _ask_constraints(self, plan: StepPlan, chunks: _Chunks) -> _Asked | None:
        """What may follow in the rows of constrained draws; None if there are none."""
        slots = plan.draw_slots.copy()
        for fork in plan.forks:  # a completion begins where its parent stands
            slots[slots == fork.child] = fork.parent
        constrained = self.sampling.flags[slots] & CONSTRAINED != 0
        if not constrained.any():
            return None
        decodes = plan.num_decodes
        counts = np.ones_like(slots)
        counts[:decodes] = chunks.lengths[:decodes]
        counts[~constrained] = 0
        drafts = np.maximum(counts[:decodes] - 1, 0)
        before = np.arange(drafts.sum()) - np.repeat(drafts.cumsum() - drafts, drafts)
        positions = np.repeat(chunks.starts[:decodes] + 1, drafts) + before
        token_ids = self.tokens.view(-1)[self._places(np.repeat(slots[:decodes], drafts), positions)].tolist()
        ends = np.zeros(len(slots) + 1, np.int64)
        ends[1 : decodes + 1] = drafts.cumsum()
        ends[decodes + 1 :] = ends[decodes]
        own = np.flatnonzero(constrained).tolist()
        paths = [token_ids[ends[i] : ends[i + 1]] for i in own]
        return _Asked(constrained, counts, self.sampling.constraints.begin(slots[own].tolist(), paths))

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

    def _draw(self, plan: StepPlan, positions: Whole, logits: Tensor, masks: Masks | None) -> StepResult:
        """One token per draw. masks: of the rows that are constrained."""
        slots = plan.draw_slots
        if not slots.size:
            return _no_draws()
        decodes = plan.num_decodes
        rows = np.concatenate((np.arange(decodes), plan.draw_rows[decodes:] + decodes))
        logits = self._select(logits, rows)
        chosen = choose(logits, slots, positions, self.sampling, masks)
        self.tokens.view(-1)[self._places(slots, positions + 1)] = chosen.token_ids.int()
        valid = chosen.valid.cpu().numpy()
        self.sampling.append(slots, chosen.token_ids, valid)
        return StepResult(
            token_ids=chosen.token_ids.cpu().numpy(),
            logprobs=chosen.logprobs.cpu().numpy(),
            valid=valid,
            top=list_top(logits, chosen.token_ids, slots, self.sampling),
        )

    def _draw_with_drafts(
        self,
        plan: StepPlan,
        rows: VerifyRows,
        logits: Tensor,
        inputs: Tensor,
        speculator: Speculator,
        masks: Masks | None,
    ) -> StepResult:
        """The drafts that are kept and one token more per draw, and drafts for the next step."""
        slots, lengths = rows.slots, rows.lengths
        if not lengths.any():  # as while drafts do not pay
            result = self._draw(plan, rows.positions, logits, masks)
            result.counts, result.num_verified = np.ones_like(slots), lengths
            speculator.forget(slots)
            if plan.propose and slots.size:
                result.survivals = speculator.propose(slots, self.sampling.place(result.token_ids))
            return result
        firsts, decodes = rows.firsts, plan.num_decodes
        decode_rows = decodes + int(lengths.sum())
        logits = self._select(logits, np.concatenate((np.arange(decode_rows), plan.draw_rows[decodes:] + decode_rows)))
        verdict, accepted = speculator.verify(logits, inputs, rows, masks)

        counts = accepted + 1
        ends = counts.cumsum()
        emitted = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # how many of its draw came before
        draws = np.repeat(np.arange(len(slots)), counts)
        width = verdict.token_ids.shape[1]
        token_ids = verdict.token_ids.view(-1)[self.sampling.place(draws * width + emitted)]
        newest = token_ids if len(token_ids) == len(slots) else token_ids[self.sampling.place(ends - 1)]
        # Drafts that are kept stand in the table already.
        self.tokens.view(-1)[self._places(slots, rows.positions + counts)] = newest.int()
        valid = verdict.valid.cpu().numpy()
        kept = np.ones(len(token_ids), np.bool_)
        kept[ends - 1] = valid
        owners = slots[draws]
        self.sampling.append(owners, token_ids, kept)

        logits = self._select(logits, np.repeat(firsts, counts) + emitted)
        result = StepResult(
            token_ids=token_ids.cpu().numpy(),
            logprobs=logprobs_of(logits, token_ids).cpu().numpy(),
            valid=valid,
            top=list_top(logits, token_ids, owners, self.sampling),
            counts=counts,
            num_verified=lengths,
        )
        if plan.propose:
            result.survivals = speculator.propose(slots, newest)
        return result

    def _select(self, logits: Tensor, rows: Whole) -> Tensor:
        if rows.size == len(logits) and (rows == np.arange(rows.size)).all():
            return logits
        return logits.index_select(0, self.sampling.place(rows))


def _stuck(asked: _Asked, masks: Masks, result: StepResult) -> npt.NDArray[np.bool_]:
    """Draws without a valid token because nothing may follow, bool [draws]."""
    last = asked.counts.cumsum() - asked.counts + (0 if result.counts is None else result.counts - 1)
    stuck = asked.constrained & ~result.valid
    stuck[stuck] = ~masks[last[stuck]].any(-1)
    return stuck


def failed_result(error: BaseException, device_seconds: float = 0.0) -> StepResult:
    """The answer to a step that raised, or that was not run because an earlier one did."""
    result = _no_draws()
    result.error, result.device_seconds = error, device_seconds
    return result


def _no_draws() -> StepResult:
    return StepResult(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.bool_))
