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
    from deepinfer.speculation.constraint import Constraint

NO_LIMIT = 1 << 62


class Admission(NamedTuple):
    """A sequence takes a slot: its known tokens and how its tokens are chosen. Also after a preemption."""

    slot: int
    token_ids: np.ndarray  # int32 [known tokens]: prompt, and output if it was preempted
    prompt_len: int
    params: SamplingParams
    seed: int  # 64 bits, the sequence's own
    limit: int = NO_LIMIT  # prompt and output tokens at most: drafts beyond it are of no use
    reproducible: bool = True  # its seed was asked for: drafts never change its tokens (speculation/verify.py)
    constraint: Constraint | None = None  # which tokens may follow


class Fork(NamedTuple):
    """A completion that starts with its parent's computed prompt. Applied after the forward pass, before sampling."""

    parent: int  # slots
    child: int
    seed: int
    edits: tuple[Edit, ...]  # copies of the open block and of the slot's state


class PromptScore(NamedTuple):
    """Prompt tokens to score: logits rows first_row, first_row + 1, ... predict them, counted as `draw_rows` are."""

    sequence: Sequence
    first_row: int
    token_ids: np.ndarray  # int64 [n]: the prompt's own tokens
    num_top: int  # most likely alternatives to report


@dataclass(slots=True)
class StepPlan:
    """Arrays are int64. Chunks come in row order, decodes first; a slot has at most one.

    How many drafts of the step before were accepted, and so where a decode starts, only the device knows: `starts` and
    `lengths` of decodes are what they are at most, and rows of logits are counted from the first one after the decodes.
    """

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
    draw_rows: np.ndarray  # [draws] the row of logits it is sampled from, after those of the decodes; of decodes 0
    draw_epochs: np.ndarray  # [draws] host only: the slot's epoch then; another one now means the result is stale
    forks: list[Fork] = field(default_factory=list)
    scores: list[PromptScore] = field(default_factory=list)
    chunk_epochs: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [chunks] host only
    num_decodes: int = 0  # the first chunks, and the first draws: one token each and drafts
    draft_caps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [decodes] drafts to verify at most
    draft_budget: int | None = None  # drafts to verify in the whole step, the likeliest; None = no bound but the caps
    propose: bool = False  # draft tokens for the next step behind every draw
    num_replayed: int = 0  # host only: tokens below the end of a hit, computed again

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def draw_positions(self) -> np.ndarray:
        """Positions [draws] of the newest token before each draw; of decodes, what they are at most."""
        decodes = self.num_decodes
        rows_end = np.cumsum(self.num_logits[decodes:])
        rows = self.draw_rows[decodes:]
        chunk = np.searchsorted(rows_end, rows, side="right")
        others = ((self.starts + self.lengths)[decodes:] - rows_end)[chunk] + rows
        return np.concatenate((self.starts[:decodes], others))


@dataclass(slots=True)
class StepResult:
    """What came back. If `error` is set the other fields mean nothing."""

    token_ids: np.ndarray  # int64 [tokens], draw by draw
    logprobs: np.ndarray  # float32 [tokens], natural log, from the raw logits
    valid: np.ndarray  # bool [draws]; False: no finite largest logit, the draw's last token means nothing
    stuck: np.ndarray | None = None  # bool [draws]; True: that is so because its constraint lets nothing follow
    top: list[dict[int, float] | None] | None = None  # [tokens], None if no row asked
    counts: np.ndarray | None = None  # int64 [draws] tokens of each draw, >= 1: accepted drafts + 1; None = 1 each
    num_verified: np.ndarray | None = None  # int64 [draws] drafts that were verified; None = none
    survivals: np.ndarray | None = None  # float32 [draws, k]: that a draft for the next step and all before it are kept
    scores: list[list[dict[int, float]]] = field(default_factory=list)  # as plan.scores
    device_seconds: float = 0.0  # from the step's start on the device to its end
    prepare_seconds: float = 0.0  # of them, until the forward pass: edits, new sequences, the batch
    idle_seconds: float = 0.0  # before its start, while the device had nothing to do
    num_failed: int = 0  # set when it is settled: sequences that ended for a draw that meant nothing
    num_stuck: int = 0  # of them, those whose constraint let nothing follow
    error: BaseException | None = None
