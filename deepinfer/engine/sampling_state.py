"""How the tokens of every slot are chosen: one column per parameter, indexed by slot.

A step reads the columns of the slots it samples with a few indexing operations, whatever the number of rows. What only
some requests ask for (penalties, logit bias, a least length) is kept per slot and touched for those slots alone.

Flags and positions live on the host, where they pick the operations to run without asking the device; values that
enter the arithmetic live on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.engine.penalties import TokenHistories
from deepinfer.engine.plan import Admission
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.slot_constraints import SlotConstraints
from deepinfer.kernels.philox import MASK
from deepinfer.speculation.constraint import MaskFiller

# What a slot's parameters ask for beyond the largest logit. 0 = greedy and plain.
DRAWN = 1  # noise decides (temperature > 0)
TRUNCATED = 2  # min_p, top_k or top_p may drop tokens; only together with DRAWN
PENALISED = 4  # its history changes the logits
BIASED = 8
MASKED = 16  # may not end before `may_end`
LISTED = 32  # reports its most likely tokens
CONSTRAINED = 64  # a constraint says what may follow
RESIDUAL = 128  # drafts may change its tokens, not their law; only together with DRAWN
CHANGED = PENALISED | BIASED | MASKED | CONSTRAINED  # logits differ from the raw ones before the temperature

T = TypeVar("T")
Flags = npt.NDArray[np.uint8]


class SamplingState:
    """Parameters, seeds and histories of `num_slots` slots.

    Columns on the device, [slots]: temperature, top_p, min_p and the three penalties float32; top_k (0 = off) and the
    two 32-bit words of the seed int64. On the host: `flags`, `may_end` (known tokens from which a sequence may end,
    prompt + min_tokens), `limit` (tokens that it may have) and `num_listed` (most likely tokens to report).
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        eos_token_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        filler: MaskFiller | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._numbers = torch.zeros(6, num_slots, dtype=torch.float32, device=self.device)
        self.temperature, self.top_p, self.min_p, self.repetition, self.frequency, self.presence = self._numbers
        self._words = torch.zeros(3, num_slots, dtype=torch.int64, device=self.device)
        self.top_k, self.seed_low, self.seed_high = self._words
        self.flags: Flags = np.zeros(num_slots, np.uint8)
        self.may_end = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.num_listed = np.zeros(num_slots, np.int64)
        self.histories = TokenHistories(num_slots, vocab_size, self.device)
        self.constraints = SlotConstraints(vocab_size, filler)
        self._eos_token_ids = tuple(eos_token_ids)
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}  # slot -> ids int64, values float32
        self._forbidden: dict[int, Tensor] = {}  # slot -> ids int64 that would end it

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Sequences take their slots; nothing of the slots' earlier owners is left."""
        if not admissions:
            return
        slots = torch.tensor([a.slot for a in admissions], device=self.device)
        numbers = torch.tensor([_numbers(a.params) for a in admissions], dtype=torch.float32, device=self.device)
        self._numbers[:, slots] = numbers.T
        words = [(min(a.params.top_k, self.vocab_size), a.seed & MASK, a.seed >> 32) for a in admissions]
        self._words[:, slots] = torch.tensor(words, dtype=torch.int64, device=self.device).T
        for admission in admissions:
            slot, params = admission.slot, admission.params
            self.flags[slot] = _flags(admission)
            self.may_end[slot] = admission.prompt_len + params.min_tokens
            self.limit[slot] = admission.limit
            self.num_listed[slot] = params.logprobs or 0
            self._set_rare(admission)

    def _set_rare(self, admission: Admission) -> None:
        """What is kept per slot only where it is used."""
        slot, params = admission.slot, admission.params
        self._biases.pop(slot, None)
        self._forbidden.pop(slot, None)
        self.constraints.close(slot)
        self.histories.close(slot)
        ends = tuple(params.stop_token_ids) + (() if params.ignore_eos else self._eos_token_ids)
        if admission.constraint is not None:
            self.constraints.open(slot, admission.constraint, ends)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=self.device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self.device)
            self._biases[slot] = ids, values
        if params.min_tokens:
            self._forbidden[slot] = torch.tensor(ends, dtype=torch.int64, device=self.device)
        if params.penalised:
            prompt, output = np.split(admission.token_ids, [admission.prompt_len])
            self.histories.open(slot, prompt, output)

    def fork(self, parent: int, child: int, seed: int) -> None:
        """The child chooses its tokens as its parent does, with a seed of its own."""
        self._numbers[:, child] = self._numbers[:, parent]
        self.top_k[child] = self.top_k[parent]
        self.seed_low[child], self.seed_high[child] = seed & MASK, seed >> 32
        for column in (self.flags, self.may_end, self.limit, self.num_listed):
            column[child] = column[parent]
        _copy_entry(self._biases, parent, child)
        _copy_entry(self._forbidden, parent, child)
        self.constraints.copy(parent, child)
        self.histories.copy(parent, child)

    def place(self, array: npt.NDArray[np.generic]) -> Tensor:
        """The array as a tensor on the device."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def append(self, slots: npt.NDArray[np.int64], token_ids: Tensor, valid: npt.NDArray[np.bool_]) -> None:
        """Tokens int64 [n] follow in these slots, in order where a slot is named again: those with penalties remember
        them, constraints move on. valid bool [n]; False: the token means nothing, and its sequence ends."""
        flags = self.flags[slots]
        rows = np.flatnonzero(flags & PENALISED)
        if rows.size:
            self.histories.add(slots[rows], token_ids if rows.size == slots.size else token_ids[self.place(rows)])
        rows = np.flatnonzero((flags & CONSTRAINED != 0) & valid)
        if rows.size:
            self.constraints.accept(slots[rows].tolist(), token_ids[self.place(rows)].tolist())

    def biases(self, slots: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
        """Ids int64 and what is added to their logits, float32, of slots with BIASED."""
        return [self._biases[slot] for slot in slots]

    def forbidden(self, slots: Iterable[int]) -> list[Tensor]:
        """Ids int64 that would end each of these slots with MASKED."""
        return [self._forbidden[slot] for slot in slots]


def _copy_entry(entries: dict[int, T], source: int, target: int) -> None:
    """The target's entry is the source's, or none. Both hold the same object: it is never written."""
    entries.pop(target, None)
    if source in entries:
        entries[target] = entries[source]


def _numbers(p: SamplingParams) -> tuple[float, ...]:
    return (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)


def _flags(admission: Admission) -> int:
    p = admission.params
    return (
        (0 if p.greedy else DRAWN)
        | (TRUNCATED if p.truncated else 0)
        | (PENALISED if p.penalised else 0)
        | (BIASED if p.logit_bias else 0)
        | (MASKED if p.min_tokens else 0)
        | (0 if p.logprobs is None else LISTED)
        | (0 if admission.constraint is None else CONSTRAINED)
        | (0 if admission.reproducible or p.greedy else RESIDUAL)
    )
