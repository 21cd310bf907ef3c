"""One step as the host hands it to the device: what to change, what to compute, which rows to sample; and the answer.

A plan names slots and positions, never token values: a decode row's token may still be on its way when its step is
scheduled, and the runner reads it from its own table of tokens (spec/engine.md 5.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deepinfer.cache.edits import Edit
from deepinfer.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.engine.sequence import Sequence


class Admission(NamedTuple):
    """A sequence takes a slot: its known tokens and how its tokens are chosen. Also after a preemption."""

    slot: int
    token_ids: np.ndarray  # int32 [known tokens]: prompt, and output if it was preempted
    prompt_len: int
    params: SamplingParams
    seed: int  # 64 bits, the sequence's own


class Fork(NamedTuple):
    """A completion that starts with its parent's computed prompt. Applied after the forward pass, before sampling."""

    parent: int  # slots
    child: int
    seed: int
    edits: tuple[Edit, ...]  # copies of the open block and of the slot's state


class PromptScore(NamedTuple):
    """Prompt tokens to score: logits rows first_row, first_row + 1, ... predict them."""

    sequence: Sequence
    first_row: int
    token_ids: np.ndarray  # int64 [n]: the prompt's own tokens
    num_top: int  # most likely alternatives to report


@dataclass(slots=True)
class StepPlan:
    """Arrays are int64. Chunks come in row order, decodes first; a slot has at most one."""

    number: int
    edits: list[Edit]
    admissions: list[Admission]  # after the edits
    slots: np.ndarray  # [chunks]
    starts: np.ndarray  # [chunks] position of the first token
    lengths: np.ndarray  # [chunks]
    num_logits: np.ndarray  # [chunks] how many of the last rows give logits
    window_floors: np.ndarray  # [chunks] lowest position that a window may show (start of a replay), 0 = no bound
    write_from: np.ndarray  # [chunks] entries of positions below this one are in the cache: not written again
    keep_from: np.ndarray  # [chunks] layers after the last KV source run on positions from here on, 0 = all
    draw_slots: np.ndarray  # [draws] whose next token is sampled
    draw_rows: np.ndarray  # [draws] the row of logits it is sampled from
    draw_epochs: np.ndarray  # [draws] host only: the slot's epoch then; another one now means the result is stale
    forks: list[Fork] = field(default_factory=list)
    scores: list[PromptScore] = field(default_factory=list)
    chunk_epochs: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [chunks] host only
    num_decodes: int = 0  # host only: the first chunks, of one token each
    num_replayed: int = 0  # host only: tokens below the end of a hit, computed again

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(slots=True)
class StepResult:
    """What came back. If `error` is set the other fields mean nothing."""

    token_ids: np.ndarray  # int64 [draws]
    logprobs: np.ndarray  # float32 [draws], natural log, from the raw logits
    valid: np.ndarray  # bool [draws]; False: no finite largest logit, the token means nothing
    top: list[dict[int, float] | None] | None = None  # [draws], None if no row asked
    scores: list[list[dict[int, float]]] = field(default_factory=list)  # as plan.scores
    device_seconds: float = 0.0  # from the step's start on the device to its end
    prepare_seconds: float = 0.0  # of them, until the forward pass: edits, new sequences, the batch
    idle_seconds: float = 0.0  # before its start, while the device had nothing to do
    error: BaseException | None = None
