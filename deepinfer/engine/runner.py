"""The device's side of a step: from a plan, which names slots and positions, to the tokens drawn.

The runner keeps every slot's tokens in a table of its own and reads from it what it computes, so a step can be planned
before the tokens it starts from are known. Steps run one after the other, each in a fixed order: edits, admissions,
forward pass, forks, scores, draws. It runs in whatever thread calls it (engine/device_thread.py: one of its own).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.cache.edits import Edit
from deepinfer.engine.plan import Admission, StepPlan, StepResult
from deepinfer.engine.prompt_logprobs import score_prompts
from deepinfer.engine.sampler import choose, list_top
from deepinfer.engine.sampling_state import SamplingState
from deepinfer.model.batch import Batch

Whole = npt.NDArray[np.int64]


class Storage(Protocol):
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


class ModelRunner(Runner):
    """Runs the plans of one engine: up to `max_num_seqs` sequences of up to `max_model_len` tokens. clock: seconds."""

    def __init__(
        self,
        model: StepModel,
        storage: Storage,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.storage = storage
        self.sampling = SamplingState(max_num_seqs, vocab_size, eos_token_ids=eos_token_ids, device=model.device)
        # What an earlier owner of a slot left behind its own last token stays: no plan reads a position before the
        # step that writes it.
        self.tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=model.device)
        self._clock = clock

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Carries the plan out; one without chunks changes what its edits say and draws nothing.

        ValueError, before anything is changed: a slot or position outside the table. Whatever else is raised leaves
        the plan half done: no sequence that it names can go on.
        """
        begin = self._clock()
        rows = self._draw_rows(plan)
        positions = self._draw_positions(plan, rows)
        self._check(plan, positions)
        self.storage.apply(plan.edits)
        self._admit(plan.admissions)
        if plan.slots.size:
            batch = self._batch(plan)
            prepared = self._clock() - begin
            logits = self.model.forward(batch, self.storage)
            self._fork(plan)
            scores = score_prompts(logits[plan.num_decodes :], plan.scores)
            result = self._draw(plan, rows, positions, logits)
            result.scores = scores
            result.prepare_seconds = prepared
        else:
            result = _no_draws()
        result.device_seconds = self._clock() - begin
        return result

    # -- before the forward pass ----------------------------------------------------------------------------------

    @staticmethod
    def _draw_rows(plan: StepPlan) -> Whole:
        """Rows [draws] of the step's logits that the tokens are drawn from."""
        decodes = plan.num_decodes
        return np.concatenate((np.arange(decodes), plan.draw_rows[decodes:] + decodes))

    @staticmethod
    def _draw_positions(plan: StepPlan, rows: Whole) -> Whole:
        """Positions [draws] of these rows; the tokens stand one further."""
        rows_end = np.cumsum(plan.num_logits)
        chunk = np.searchsorted(rows_end, rows, side="right")
        return (plan.starts + plan.lengths - rows_end)[chunk] + rows

    def _check(self, plan: StepPlan, positions: Whole) -> None:
        # The table is read and written by flat places: one beyond a row's end is another sequence's first token.
        num_slots, width = self.tokens.shape
        longest = max((len(admission.token_ids) for admission in plan.admissions), default=0)
        for ends in (plan.starts + plan.lengths, positions + 2):
            longest = max(longest, int(ends.max(initial=0)))
        if longest > width:
            raise ValueError(f"step {plan.number} reaches {longest} tokens of a sequence, max_model_len = {width}")
        for slots in (plan.slots, plan.draw_slots):
            if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
                raise ValueError(f"step {plan.number} names a slot outside 0 .. {num_slots - 1}")

    def _admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            ids = torch.tensor(admission.token_ids, dtype=torch.int32)
            self.tokens[admission.slot, : len(ids)] = ids
        self.sampling.admit(admissions)

    def _batch(self, plan: StepPlan) -> Batch:
        first_rows = np.cumsum(plan.lengths) - plan.lengths
        positions = np.arange(plan.num_tokens) + np.repeat(plan.starts - first_rows, plan.lengths)
        places = self._places(np.repeat(plan.slots, plan.lengths), positions)
        return Batch.from_arrays(
            slots=plan.slots,
            starts=plan.starts,
            lengths=plan.lengths,
            num_logits=plan.num_logits,
            token_ids=self.tokens.view(-1)[places].long(),
            window_floors=plan.window_floors,
            write_from=plan.write_from,
            keep_from=plan.keep_from,
            device=self.tokens.device,
        )

    def _places(self, slots: Whole, positions: Whole) -> Tensor:
        """Where tokens of these slots and positions stand in the flat table."""
        return self.sampling.place(slots * self.tokens.shape[1] + positions)

    # -- after the forward pass -----------------------------------------------------------------------------------

    def _fork(self, plan: StepPlan) -> None:
        for parent, child, seed, edits in plan.forks:
            self.storage.apply(edits)
            chunk = int(np.flatnonzero(plan.slots == parent)[0])  # a parent forks in the step that ends its prompt
            end = int(plan.starts[chunk] + plan.lengths[chunk])
            self.tokens[child, :end] = self.tokens[parent, :end]
            self.sampling.fork(parent, child, seed)

    def _draw(self, plan: StepPlan, rows: Whole, positions: Whole, logits: Tensor) -> StepResult:
        slots = plan.draw_slots
        if not slots.size:
            return _no_draws()
        if rows.size != len(logits) or (rows != np.arange(rows.size)).any():
            logits = logits.index_select(0, self.sampling.place(rows))
        chosen = choose(logits, slots, positions, self.sampling)
        self.tokens.view(-1)[self._places(slots, positions + 1)] = chosen.token_ids.int()
        self.sampling.append(slots, chosen.token_ids)
        return StepResult(
            token_ids=chosen.token_ids.cpu().numpy(),
            logprobs=chosen.logprobs.cpu().numpy(),
            valid=chosen.valid.cpu().numpy(),
            top=list_top(logits, chosen.token_ids, slots, self.sampling),
        )


def failed_result(error: BaseException, device_seconds: float = 0.0) -> StepResult:
    """The answer to a step that raised, or that was not run because an earlier one did."""
    result = _no_draws()
    result.error, result.device_seconds = error, device_seconds
    return result


def _no_draws() -> StepResult:
    return StepResult(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.bool_))
