"""What lies between two steps of a decoding sequence: the drafts behind its newest token, and how sure they are.

Drafts stand in the runner's table of tokens, at the places where they stand for good if they are kept. A step verifies
some of them beside the newest token and keeps what passes (speculation/verify.py); then it may draft again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.engine.plan import StepPlan
from deepinfer.engine.sampling_state import DRAWN, RESIDUAL, SamplingState
from deepinfer.engine.target import StepTarget
from deepinfer.kernels.random_streams import accept_uniforms
from deepinfer.speculation.calibration import Calibration
from deepinfer.speculation.constraint import Masks
from deepinfer.speculation.propose import Drafter, DraftLaw, Rule, draft_logprobs
from deepinfer.speculation.selection import select_lengths
from deepinfer.speculation.verify import Verdict, verify

Whole = npt.NDArray[np.int64]


class TruncatingStorage(Protocol):
    """What drafts need of the cache's tensors."""

    def lengths(self, slots: Whole) -> Whole: ...
    def truncate(self, slots: Whole, lengths: Whole) -> None: ...


class VerifyRows(NamedTuple):
    """The rows that a step draws from: of each draw the row behind its newest token, then those behind its drafts."""

    slots: Whole  # [draws]
    positions: Whole  # [draws] of the newest token
    lengths: Whole  # [draws] drafts

    @property
    def firsts(self) -> Whole:
        """Number of each draw's first row."""
        counts = self.lengths + 1
        return counts.cumsum() - counts


class Speculator:
    """State of `max_num_seqs` slots, `drafts` (k) tokens each.

    tokens: the runner's table, int32 [slots, at least k more than a sequence may have]. max_model_len: where no
    sequence goes beyond.
    """

    def __init__(
        self,
        drafter: Drafter,
        storage: TruncatingStorage,
        sampling: SamplingState,
        tokens: Tensor,
        *,
        drafts: int,
        max_model_len: int,
        calibration: Calibration | None = None,
    ) -> None:
        self.k = drafts
        self._drafter, self._storage, self._sampling, self._tokens = drafter, storage, sampling, tokens
        self._max_model_len = max_model_len
        self._calibration = calibration or Calibration()
        slots = tokens.shape[0]
        self._there = np.zeros(slots, np.int64)  # drafts behind the newest token: k, or none
        self._survivals = torch.zeros(slots, drafts, device=tokens.device)
        # Of the last proposal, which is the one that all drafts are from: logits of the rows with the residual rule.
        self._logits: Tensor | None = None
        self._logits_row = np.zeros(slots, np.int64)

    def forget(self, slots: Whole | list[int]) -> None:
        """No drafts are there: these slots change hands, or have drawn without them."""
        self._there[slots] = 0

    # -- before the forward pass ----------------------------------------------------------------------------------

    def starts(self, plan: StepPlan) -> Whole:
        """Positions of the newest tokens of the step's decodes, [decodes]."""
        return self._storage.lengths(plan.slots[: plan.num_decodes])

    def lengths(self, plan: StepPlan, starts: Whole) -> Whole:
        """Drafts that the step verifies, [decodes]."""
        slots = plan.slots[: plan.num_decodes]
        # With l drafts kept and one token more a sequence has start + 1 + l + 1. One that has ended while this step was
        # planned may have no room at all.
        room = np.minimum(self._sampling.limit[slots], self._max_model_len) - starts - 2
        caps = np.minimum(np.minimum(plan.draft_caps, self._there[slots]), room).clip(min=0)
        if plan.draft_budget is None or plan.draft_budget >= caps.sum():
            return caps
        place = self._sampling.place
        chosen = select_lengths(self._survivals.index_select(0, place(slots)), place(caps), plan.draft_budget)
        return chosen.cpu().numpy()

    # -- after it -------------------------------------------------------------------------------------------------

    def verify(
        self, logits: Tensor, inputs: Tensor, rows: VerifyRows, masks: Masks | None = None
    ) -> tuple[Verdict, Whole]:
        """-> the verdict on every draw, and accepted drafts [draws] on the host. What was rejected is gone.

        logits float32 [rows, vocab], raw; inputs int64: the tokens of the rows with drafts, which come first. masks: of
        the rows that are constrained.
        """
        counts, place = rows.lengths + 1, self._sampling.place
        slots = np.repeat(rows.slots, counts)
        depths = np.arange(len(slots)) - np.repeat(rows.firsts, counts)
        positions = np.repeat(rows.positions, counts) + depths
        target = StepTarget(logits, slots, positions, self._sampling, inputs=inputs, depths=depths, masks=masks)
        longest = int(rows.lengths.max())
        drafts = self._at(rows.slots, rows.positions[:, None] + 1 + np.arange(longest)).long()
        verdict = verify(
            target, place(rows.firsts), place(rows.lengths), drafts, **self._residual_rule(rows, longest, drafts.device)
        )
        accepted = verdict.accepted.cpu().numpy()
        short = np.flatnonzero(accepted < rows.lengths)
        if short.size:
            self._storage.truncate(rows.slots[short], rows.positions[short] + accepted[short] + 1)
        self._there[rows.slots] = 0
        return verdict, accepted

    def propose(self, slots: Whole, anchors: Tensor) -> np.ndarray:
        """Drafts behind these newest tokens (int64 [R]) -> their survivals, float32 [R, k]."""
        state, own = self._sampling, self._sampling.place(slots)
        flags = state.flags[slots]
        rules = np.where(flags & RESIDUAL, Rule.RESIDUAL, np.where(flags & DRAWN, Rule.COUPLED, Rule.GREEDY))
        law = DraftLaw(rules.astype(np.uint8), state.temperature[own], (state.seed_low[own], state.seed_high[own]))
        proposal = self._drafter.propose(slots, anchors, law)
        ends = self._storage.lengths(slots)  # the newest token stands there
        self._tokens.view(-1)[self._places(slots, ends[:, None] + 1 + np.arange(self.k))] = proposal.token_ids.int()
        survivals = self._calibration.survivals(proposal.confidence, state.place(rules))
        self._survivals[own] = survivals
        self._there[:] = 0
        self._there[slots] = self.k
        self._logits = proposal.logits
        residual = slots[rules == Rule.RESIDUAL]
        self._logits_row[residual] = np.arange(residual.size)
        return survivals.cpu().numpy()

    def _residual_rule(self, rows: VerifyRows, longest: int, device: torch.device) -> dict[str, Tensor]:
        """Arguments of `verify` for the requests whose drafts are accepted by chance, `longest` drafts of each; none
        where none has drafts."""
        state, place = self._sampling, self._sampling.place
        residual = (state.flags[rows.slots] & RESIDUAL != 0) & (rows.lengths > 0)
        which = np.flatnonzero(residual)
        if not which.size:
            return {}
        assert self._logits is not None
        slots = rows.slots[which]
        at, own = place(which), place(slots)
        raw = self._logits[:, :longest].index_select(0, place(self._logits_row[slots]))
        laws = draft_logprobs(raw, state.temperature[own])
        key = [word[own].repeat_interleave(longest) for word in (state.seed_low, state.seed_high)]
        positions = rows.positions[which, None] + np.arange(longest)
        chances = accept_uniforms((key[0], key[1]), place(positions.ravel())).view(-1, longest)
        if which.size < len(rows.slots):
            laws = laws.new_zeros(len(rows.slots), *laws.shape[1:]).index_copy_(0, at, laws)
            chances = chances.new_zeros(len(rows.slots), longest).index_copy_(0, at, chances)
        mask = torch.from_numpy(residual).to(device)
        return {"residual": mask, "draft_logprobs": laws, "uniforms": chances}

    def _at(self, slots: Whole, positions: Whole) -> Tensor:
        """Tokens [n, k] of the table at positions [n, k] of slots [n]."""
        return self._tokens.view(-1)[self._places(slots, positions)]

    def _places(self, slots: Whole, positions: Whole) -> Tensor:
        return self._sampling.place(slots[:, None] * self._tokens.shape[1] + positions)
