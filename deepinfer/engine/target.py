"""The laws that a step's tokens follow: one per row of logits, with everything that a request asks for already in them.

Order (spec/dspark.md section 10): float32 copy, logit bias, penalties, min_tokens mask, constraint, temperature, min-p,
top-k, top-p, draw. Temperature 0 takes the argmax of the processed logits, ties to the lowest id.

Rows with and without drafts before them go the same way, so a token is the same bit for bit whichever it came from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.engine.penalties import add_biases, ban, penalise
from deepinfer.engine.sampling_state import (
    BIASED,
    CHANGED,
    CONSTRAINED,
    DRAWN,
    MASKED,
    PENALISED,
    TRUNCATED,
    SamplingState,
)
from deepinfer.engine.truncation import truncate
from deepinfer.kernels.argmax import argmax
from deepinfer.kernels.random_streams import gumbel
from deepinfer.kernels.select import constrain_rows, gpu_twins
from deepinfer.speculation.constraint import Masks
from deepinfer.speculation.verify import residual_logprobs

Whole = npt.NDArray[np.int64]


class StepTarget:
    """The `Target` of verify.py over a step's logits.

    logits float32 [rows, vocab], raw, not changed; slots [rows]: whose parameters hold; positions [rows]: of the last
    known token, the one before the token that is drawn. Rows of drafts: depths [rows] counts the drafts that a row
    stands behind, which are the inputs (int64 [rows], on the device) of the row itself and of the ones before it.
    masks: what may follow in the rows that are constrained, one behind the other; None where there are none.

    A row's law depends on its own logits, parameters, history, drafts and position alone, and its token on its seed.
    """

    def __init__(
        self,
        logits: Tensor,
        slots: Whole,
        positions: Whole,
        state: SamplingState,
        *,
        inputs: Tensor | None = None,
        depths: Whole | None = None,
        masks: Masks | None = None,
    ) -> None:
        self._slots, self._positions, self._state = slots, positions, state
        self._masks = masks
        self._inputs, self._depths = inputs, np.zeros_like(slots) if depths is None else depths
        self._flags = state.flags[slots]
        self._wanted = int(np.bitwise_or.reduce(self._flags)) if slots.size else 0
        self._z = self._changed(logits) if self._wanted & CHANGED else logits
        self._best_ids = argmax(self._z)  # the first of equal values: the lowest id
        # NaN wins an argmax, so a NaN anywhere in the row shows here.
        self._best = self._z.gather(-1, self._best_ids[:, None])  # [rows, 1]

    # -- the target of verification -------------------------------------------------------------------------------

    def draw(self, rows: Tensor | None = None) -> Tensor:
        """The tokens that decoding without drafts takes from rows int64 [n] (None: from all), int64 [n]."""
        ids = self._best_ids.clone() if rows is None else self._best_ids.index_select(0, rows)
        if not self._wanted & DRAWN:
            return ids
        if gpu_twins(ids.device, torch.bfloat16):
            return self._draw_by_kernel(rows)
        at = np.arange(len(self._slots)) if rows is None else rows.cpu().numpy()
        for own, truncated in self._drawn(at):
            values, kept = self._law(at[own], truncated)
            winner = argmax(values.double() + self._noise(at[own], kept, values.shape[-1]))
            ids[self._state.place(own)] = winner if kept is None else kept.gather(-1, winner[:, None])[:, 0]
        return ids

    def _draw_by_kernel(self, rows: Tensor | None) -> Tensor:
        """`draw` by the kernel of the rounds (device_round.py): the same token whichever way a step goes."""
        slots, positions, z = self._slots, self._positions, self._z
        if rows is not None:
            at = rows.cpu().numpy()
            slots, positions, z = slots[at], positions[at], z.index_select(0, rows)
        return drawn_by_kernel(z, slots, positions, self._state)[0]

    def finite(self, rows: Tensor | None = None) -> Tensor:
        """Bool [n]; False: no finite largest logit (NaN, or everything banned), the row's token means nothing."""
        valid = torch.isfinite(self._best[:, 0])
        return valid if rows is None else valid.index_select(0, rows)

    def logprobs(self, rows: Tensor, ids: Tensor) -> Tensor:
        """float32 [n]: log p of ids int64 [n] at rows int64 [n] with temperature > 0; -inf where p is 0."""
        out = torch.full(ids.shape, -torch.inf, device=ids.device)
        at = rows.cpu().numpy()
        for own, truncated in self._drawn(at):
            place = self._state.place(own)
            values, kept = self._law(at[own], truncated)
            wanted = ids.index_select(0, place)[:, None]
            logp = torch.log_softmax(values, -1)
            if kept is None:
                out[place] = logp.gather(-1, wanted)[:, 0]
            else:
                out[place] = torch.where(kept == wanted, logp, -torch.inf).amax(-1)
        return out

    def draw_residual(self, rows: Tensor, draft_logprobs: Tensor) -> Tensor:
        """Tokens int64 [n] from what p gives more than q: max(p - q, 0) / Z. rows int64 [n] with temperature > 0;
        draft_logprobs float32 [n, vocab]: log q."""
        at = rows.cpu().numpy()
        left = residual_logprobs(self._dense(at), draft_logprobs.double())
        return argmax(left + self._noise(at, None, left.shape[-1]))

    # -- laws with temperature > 0 --------------------------------------------------------------------------------

    def _drawn(self, rows: Whole) -> list[tuple[Whole, bool]]:
        """Which of the rows keep every token, then which may drop some, of those with noise: places, dropping."""
        kinds = self._flags[rows] & (DRAWN | TRUNCATED)
        parts = [(np.flatnonzero(kinds == kind), kind != DRAWN) for kind in (DRAWN, DRAWN | TRUNCATED)]
        return [part for part in parts if part[0].size]

    def _law(self, rows: Whole, truncated: bool) -> tuple[Tensor, Tensor | None]:
        """Logits over the temperature, of rows that all truncate or all do not: float32 [n, width] and the ids that
        they are of, None for all in order.

        Where the best is no number the row becomes NaN, which no comparison lets pass: it gets some id, and the other
        rows do not notice.
        """
        state, own = self._state, self._state.place(self._slots[rows])
        z, best = self._z, self._best
        if len(rows) != len(z) or (rows != np.arange(len(z))).any():
            at = state.place(rows)
            z, best = z.index_select(0, at), best.index_select(0, at)
        # Measured from the row's best logit, so that a tiny temperature cannot overflow it.
        tempered = (z - best).div_(state.temperature[own][:, None])
        return (
            truncate(tempered, state.min_p[own], state.top_k[own], state.top_p[own]) if truncated else (tempered, None)
        )

    def _dense(self, rows: Whole) -> Tensor:
        """log p of every id, float64 [n, vocab]."""
        out = torch.full((len(rows), self._z.shape[-1]), -torch.inf, dtype=torch.float64, device=self._z.device)
        for own, truncated in self._drawn(rows):
            values, kept = self._law(rows[own], truncated)
            logp = torch.log_softmax(values.double(), -1)
            if kept is None:
                out[self._state.place(own)] = logp
            else:
                at = self._state.place(own)[:, None]
                out[at, kept] = logp
        return out

    def _noise(self, rows: Whole, ids: Tensor | None, width: int) -> Tensor:
        state, own = self._state, self._state.place(self._slots[rows])
        key = (state.seed_low[own], state.seed_high[own])
        return gumbel(key, state.place(self._positions[rows]), ids, width)

    # -- what comes before the temperature ------------------------------------------------------------------------

    def _changed(self, logits: Tensor) -> Tensor:
        """Logits after bias, penalties and masks; the input itself when no row needs any now."""
        state, slots, flags = self._state, self._slots, self._flags
        biased, penalised = np.flatnonzero(flags & BIASED), np.flatnonzero(flags & PENALISED)
        masked = np.flatnonzero((flags & MASKED != 0) & (self._positions + 1 < state.may_end[slots]))
        constrained = np.flatnonzero(flags & CONSTRAINED)
        if not (biased.size or penalised.size or masked.size or constrained.size):
            return logits
        z = logits.clone()
        if biased.size:
            add_biases(z, state.place(biased), state.biases(slots[biased].tolist()))
        if penalised.size:
            own = state.place(slots[penalised])
            history = state.histories.gather(slots[penalised], self._drafts_before(penalised))
            penalise(
                z, state.place(penalised), history, state.repetition[own], state.frequency[own], state.presence[own]
            )
        if masked.size:
            ban(z, state.place(masked), state.forbidden(slots[masked].tolist()))
        if constrained.size:
            assert self._masks is not None and len(self._masks) == constrained.size
            constrain_rows(z, logits, state.place(constrained), state.place(self._masks))
        return z

    def _drafts_before(self, rows: Whole) -> tuple[Tensor, Tensor] | None:
        """The drafts that these rows stand behind: places in `rows` and ids, int64 [m] each."""
        depths = self._depths[rows]
        if self._inputs is None or not depths.any():
            return None
        places = np.repeat(np.arange(len(rows)), depths)
        back = np.arange(len(places)) - np.repeat(depths.cumsum() - depths, depths)  # 0 = the row's own input
        return self._state.place(places), self._inputs.index_select(0, self._state.place(rows[places] - back))


def drawn_by_kernel(z: Tensor, slots: Whole, positions: Whole, state: SamplingState) -> tuple[Tensor, Tensor]:
    """What the kernel of the rounds (device_round.py) draws from rows z float32 [n, vocab], int64 [n], and the logs of
    their probabilities in these rows, float32 [n]. Only where GPU kernels run."""
    from deepinfer.kernels.triton.sampling import sample  # both need Triton
    from deepinfer.kernels.triton.sampling_rows import RowLaws

    flags = state.flags[slots]
    heat = torch.where(state.place(state.flags & DRAWN != 0), state.temperature, 0.0)
    parameters = heat, state.top_k, state.top_p, torch.log(state.min_p), state.seed_low, state.seed_high
    laws = RowLaws(state.place(slots), state.place(positions), *parameters)
    drawn, truncated = bool((flags & DRAWN).any()), bool((flags & TRUNCATED).any())
    found = sample(z, laws, drawn=drawn, truncated=truncated)
    return found.token_ids, found.logprobs
