"""A decode round as operations of the device alone: the host says which slots, and reads the tokens a step later.

The runner (runner.py) asks the device between two steps: how many drafts were kept, where each sequence stands. Here
that stands in columns on the device, so a round can follow the round before at once, and be recorded in a CUDA graph:

    fill      rows of every slot: its newest token and the drafts that are verified (kernels/triton/round_rows.py)
    forward   the model's pass over these rows, whoever runs it
    settle    tokens drawn, drafts judged by the coupled rule, lengths and tokens booked (kernels/triton/verify.py)
    propose   drafts for the next round
    report    to page-locked memory, with an event; the host reads it while the next round runs

The tokens are those of the runner, bit for bit on the same logits but for what `kernels/triton/sampling.py` says of
noise. `serves` says which slots it can serve; a step with any other keeps the runner's path.

Ends are the host's to find: a sequence that has ended goes on until the host no longer names its slot, as in the
overlapped loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.engine.plan import StepResult
from deepinfer.engine.sampling_state import CHANGED, DRAWN, LISTED, RESIDUAL, TRUNCATED, SamplingState
from deepinfer.kernels.streams import Event
from deepinfer.kernels.triton.round_rows import Rows, fill_rows
from deepinfer.kernels.triton.sampling import sample
from deepinfer.kernels.triton.sampling_rows import RowLaws
from deepinfer.kernels.triton.verify import Report, keep_drafts, settle_coupled
from deepinfer.speculation.calibration import Calibration
from deepinfer.speculation.propose import Rule

Whole = npt.NDArray[np.int64]
NO_BUDGET = -1


def serves(flags: npt.NDArray[np.uint8], drafts: int) -> bool:
    """Whether a round can serve slots with these flags (sampling_state.py), up to `drafts` of each verified.

    Not served: what changes logits before the temperature (penalties, biases, a least length, grammars: they need the
    host's lists, or its masks between two steps), listed alternatives, and drafts judged by the residual rule, which
    keeps a whole law per draft.
    """
    return not bool((flags & (CHANGED | LISTED | (RESIDUAL if drafts else 0))).any())


class RoundColumns:
    """What a round knows of its slots, by slot; one more than there are sequences, the null slot of padding: greedy.

    int64 [slots + 1]: lengths (position of the newest token), there (drafts behind it), limits (tokens that a sequence
    may have). float32 [slots + 1, k]: survivals. And what its tokens are drawn with, as RowLaws has it.
    """

    def __init__(self, slots: int, drafts: int, device: torch.device | str) -> None:
        self._numbers = torch.zeros(6, slots + 1, dtype=torch.int64, device=device)
        self.lengths, self.there, self.limits, self.top_k, self.seed_low, self.seed_high = self._numbers
        self._shares = torch.zeros(3, slots + 1, device=device)
        self.temperature, self.top_p, self.log_min_p = self._shares
        self.top_p.fill_(1.0)
        self.log_min_p.fill_(-torch.inf)
        self.survivals = torch.zeros(slots + 1, drafts, device=device)

    def enter(self, state: SamplingState, slots: Whole, lengths: Whole) -> None:
        """These sequences go on in rounds: parameters as in `state`, newest tokens at `lengths`, no drafts yet. Between
        two rounds, whenever the host changed a slot."""
        own, flags = state.place(slots), state.flags[slots]
        counts = np.stack((lengths, np.zeros_like(lengths), state.limit[slots]))
        self._numbers[:3, own] = state.place(counts)
        self._numbers[3:, own] = torch.stack((state.top_k[own], state.seed_low[own], state.seed_high[own]))
        drawn = state.place(flags & DRAWN != 0)
        shares = (torch.where(drawn, state.temperature[own], 0.0), state.top_p[own], torch.log(state.min_p[own]))
        self._shares[:, own] = torch.stack(shares)

    def laws(self, slots: Tensor, positions: Tensor) -> RowLaws:
        """How rows of these slots draw, int64 [rows] both."""
        parameters = self.temperature, self.top_k, self.top_p, self.log_min_p, self.seed_low, self.seed_high
        return RowLaws(slots, positions, *parameters)


class DraftsOfRound(NamedTuple):
    token_ids: Tensor  # int64 [C, k]
    confidence: Tensor  # float32 [C, k]: logit that a draft is accepted if those before it are


class RoundDrafter(Protocol):
    """Drafts without the host: propose.Drafter by the greedy and the coupled rule, all of it on the device."""

    def propose(self, slots: Tensor, anchors: Tensor, laws: RowLaws) -> DraftsOfRound:
        """Behind the newest tokens (int64 [C]) of these slots (int64 [C], the null slot where there is none).
        laws.positions: where those tokens stand."""


class Round(NamedTuple):
    """What the host says of a round. It names no token and no length."""

    slots: Whole  # [decodes]
    caps: Whole  # [decodes] drafts of each at most
    budget: int | None = None  # drafts in all; None = no bound
    drawn: bool = True  # False: every slot is greedy, which saves launches (as `truncated` in sampling.sample)
    truncated: bool = True
    propose: bool = False

    @classmethod
    def of(cls, flags: npt.NDArray[np.uint8], slots: Whole, caps: Whole, budget: int | None, propose: bool) -> Round:
        """flags [decodes]: of these slots."""
        drawn, truncated = bool((flags & DRAWN).any()), bool((flags & TRUNCATED).any())
        return cls(slots, caps, budget, drawn, truncated, propose)

    @property
    def most_rows(self) -> int:
        """Rows that it may take."""
        drafts = int(self.caps.sum())
        return len(self.slots) + (drafts if self.budget is None else min(drafts, self.budget))


class Mark:
    """A moment in the order of the device's stream: what was asked for before it is done then, what comes later not
    begun. On a CPU, where everything runs as it is asked for, now."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: Event | None = None
        if device.type == "cuda":
            self._event = Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_after(self, earlier: Mark) -> float:
        """Both have come."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return 1e-3 * earlier._event.elapsed_time(self._event)


class PendingResult:
    """A round's report on its way to the host."""

    def __init__(self, report: Report, draws: int, start: Mark, end: Mark, drafted: bool, asked: bool) -> None:
        self.start, self.end = start, end
        self._report, self._draws, self._drafted, self._asked = report, draws, drafted, asked

    def result(self) -> StepResult:
        """Waits for the round. Good once: the memory is used again some rounds later."""
        self.end.wait()
        report, draws = self._report, self._draws
        counts = report.counts[:draws].numpy().astype(np.int64)
        kept = np.arange(report.token_ids.shape[1]) < counts[:, None]
        return StepResult(
            token_ids=report.token_ids[:draws].numpy()[kept].astype(np.int64),
            logprobs=report.logprobs[:draws].numpy()[kept],
            valid=report.valid[:draws].numpy() != 0,
            counts=counts if self._drafted else None,
            num_verified=report.verified[:draws].numpy().astype(np.int64) if self._drafted else None,
            survivals=report.survivals[:draws].numpy().copy() if self._asked else None,
            device_seconds=self.end.seconds_after(self.start),
        )


class DeviceRound:
    """Rounds over `columns` and the runner's table of tokens, int32 [slots, at least k more than a sequence has].

    drafter: None where nothing is drafted. depth: rounds whose results may be unread.
    """

    def __init__(
        self,
        columns: RoundColumns,
        tokens: Tensor,
        *,
        max_model_len: int,
        drafter: RoundDrafter | None = None,
        calibration: Calibration | None = None,
        depth: int = 3,
    ) -> None:
        self.columns, self.tokens = columns, tokens
        self.drafts = columns.survivals.shape[1]
        self._drafter, self._longest, self._depth = drafter, max_model_len, depth
        self._calibration = calibration or Calibration()
        self._orders: dict[int, Tensor] = {}  # int64 [1 + 2 * chunks] on the device, by number of chunks
        self._reports: dict[int, Report] = {}
        self._hosts: dict[int, list[tuple[Tensor, Report]]] = {}  # page-locked: an order and a report, by turns
        self._ends: dict[int, list[Mark | None]] = {}
        self._start = Mark(tokens.device)  # of the round that began last
        self._number = 0

    def run(self, order: Round, rows: Rows, forward: Callable[[], Tensor]) -> PendingResult:
        """One round, launch by launch. rows: buffers with at least as many rows as the order may take and as many
        chunks as it has slots; forward: reads them -> logits float32 [rows, vocab]."""
        self.begin(order, rows)
        self.fill(rows)
        logits = forward()
        self.finish(rows, logits, drawn=order.drawn, truncated=order.truncated, propose=order.propose)
        return self.collect(order, rows)

    # -- outside of a graph: copies between host and device --------------------------------------------------------

    def begin(self, order: Round, rows: Rows) -> None:
        """The order goes to the device: one asynchronous copy. ValueError: it may take more rows or chunks than there
        are."""
        draws, chunks = len(order.slots), rows.chunks
        if draws > chunks or order.most_rows > rows.rows:
            raise ValueError(
                f"a round of {draws} slots and up to {order.most_rows} rows in {chunks} chunks and {rows.rows} rows"
            )
        self._prepare(chunks)
        turn = self._number % self._depth
        if (end := self._ends[chunks][turn]) is not None:
            end.wait()  # the round that used this memory has ended: `depth` rounds ago
        self._start = Mark(self.tokens.device)
        host = self._hosts[chunks][turn][0].numpy()
        host[0] = NO_BUDGET if order.budget is None else order.budget
        host[1 : 1 + draws], host[1 + draws : 1 + chunks] = order.slots, rows.null_slot
        host[1 + chunks : 1 + chunks + draws], host[1 + chunks + draws :] = order.caps, 0
        self._orders[chunks].copy_(self._hosts[chunks][turn][0], non_blocking=True)

    def collect(self, order: Round, rows: Rows) -> PendingResult:
        """The round's report goes to the host: one asynchronous copy and an event."""
        chunks, turn = rows.chunks, self._number % self._depth
        self._number += 1
        report = self._hosts[chunks][turn][1]
        report.buffer.copy_(self._reports[chunks].buffer, non_blocking=True)
        end = self._ends[chunks][turn] = Mark(self.tokens.device)
        drafted = self.drafts > 0
        return PendingResult(report, len(order.slots), self._start, end, drafted, drafted and order.propose)

    def _prepare(self, chunks: int) -> None:
        if chunks in self._orders:
            return
        device = self.tokens.device
        pinned = device.type == "cuda"
        self._orders[chunks] = torch.zeros(1 + 2 * chunks, dtype=torch.int64, device=device)
        self._reports[chunks] = Report.empty(chunks, self.drafts, device)
        self._ends[chunks] = [None] * self._depth
        self._hosts[chunks] = [
            (
                torch.zeros(1 + 2 * chunks, dtype=torch.int64, pin_memory=pinned),
                Report.empty(chunks, self.drafts, "cpu", pinned),
            )
            for _ in range(self._depth)
        ]

    # -- inside a graph, or launch by launch: addresses and sizes are the rows' ------------------------------------

    def fill(self, rows: Rows) -> None:
        """The rows of the order."""
        c = self.columns
        fill_rows(
            rows, self._orders[rows.chunks], c.lengths, c.there, c.limits, c.survivals, self.tokens, self._longest
        )

    def finish(self, rows: Rows, logits: Tensor, *, drawn: bool, truncated: bool, propose: bool) -> None:
        """From logits float32 [rows, vocab] to the next round's columns, tokens and drafts, and the report."""
        c, report = self.columns, self._reports[rows.chunks]
        chosen = sample(logits, c.laws(rows.slots, rows.positions), drawn=drawn, truncated=truncated)
        anchors = settle_coupled(
            rows.token_ids, *chosen, rows.chunk_slots, rows.chunk_rows, c.lengths, c.there, self.tokens, report,
            rows.null_slot,
        )  # fmt: skip
        if not propose or self._drafter is None:
            return
        slots = rows.chunk_slots
        laws = c.laws(slots, c.lengths[slots])._replace(drawn=drawn)
        proposal = self._drafter.propose(slots, anchors, laws)
        rules = (c.temperature[slots] > 0).long() * int(Rule.COUPLED)
        chances = self._calibration.survivals(proposal.confidence, rules)
        keep_drafts(
            proposal.token_ids, chances, slots, c.lengths, c.there, c.survivals, self.tokens, report, rows.null_slot
        )
