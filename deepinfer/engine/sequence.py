"""One completion under way, as the core sees it: token ids and where they are. Text is the front end's."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.cache.hashing import HashChain
from deepinfer.cache.prefix import COLD, PrefixHit

if TYPE_CHECKING:
    from deepinfer.engine.blocked import Condition
    from deepinfer.engine.grammars import Grammar
    from deepinfer.engine.messages import EngineRequest
    from deepinfer.engine.sampling_params import SamplingParams
    from deepinfer.speculation.constraint import Constraint


class Status(Enum):
    """Where a sequence is; the legal changes are the arrows.

    FORKING -> DECODE | WAITING;  WAITING -> PREFILL -> DECODE;  PREFILL, DECODE -> WAITING (preempted);
    any -> FINISHED
    """

    FORKING = auto()  # completion 1..n-1, waiting for the first one's prompt
    WAITING = auto()  # no slot, no blocks
    PREFILL = auto()  # slot and blocks; known tokens still to schedule, beyond the last one
    DECODE = auto()  # every known token is scheduled, and so is the draw of the next one
    FINISHED = auto()  # slot and blocks are given back


@dataclass(eq=False, slots=True)
class Sequence:
    """Counters that change in every step live in the SequenceTable, at `slot`; here is what changes rarely."""

    request: EngineRequest
    index: int  # which of the request's n completions
    seed: int
    arrival: float  # seconds on the engine's clock
    limit: int  # prompt and output tokens at most
    chain: HashChain  # of all full blocks of known tokens
    token_ids: np.ndarray  # int32: known tokens while it has no slot; the table's row has them while it does
    siblings: list[Sequence]  # all completions of the request, itself too
    conditions: list[Condition] = field(default_factory=list)  # what it still waits for
    grammar: Grammar | None = None  # what its output must be; compiled when no condition is left
    status: Status = Status.WAITING
    slot: int | None = None
    hit: PrefixHit = COLD  # what the cache gave at admission
    boundaries: set[int] = field(default_factory=set)  # where its prefill stops to save a window that others want
    ticket: int | None = None  # under which it lies in host memory, after a preemption
    offloaded: int = 0  # tokens whose state lies there
    preemptions: int = 0
    scored: int = 1  # prompt tokens whose log-probabilities are scheduled; nothing predicts the first
    refused_with: int = -1  # free blocks when its admission failed last: not tried again before there are more
    awaited: tuple[Sequence, int] | None = None  # a prefill that computes its prefix, and up to which position
    waits_for: str = "room"  # for the statistics, while it waits

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_known(self) -> int:
        """Known tokens of a sequence without a slot."""
        return len(self.token_ids)

    @property
    def order(self) -> tuple[int, int, int]:
        """Who runs first: priority, then arrival. The largest order is the youngest, which preemption takes."""
        return (self.request.params.priority, self.request.number, self.index)

    def new_constraint(self) -> Constraint | None:
        """Of a sequence without a slot: a constraint behind the output that it has already, None if it has none. Raises
        what the grammar raises."""
        if self.grammar is None:
            return None
        output = self.token_ids[len(self.request.prompt_token_ids) :]
        return self.grammar.prototype.result().start(output.tolist())

    @property
    def scores_prompt(self) -> bool:
        """True if its prompt's log-probabilities are wanted: it then reads no cache and every row runs every layer."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None
