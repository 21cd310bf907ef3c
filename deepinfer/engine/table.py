"""The counters of running sequences, by slot: a struct of arrays, so that the decode path of a step is a handful of
numpy operations whatever the number of sequences or the length of their contexts.

The counters (spec/engine.md 1.1), for a slot whose steps N and N + 1 are in flight:

    0 ....... done ... known ......... least ........ computed .. total
    state settled |  tokens settled | + a token for | scheduled  | known + promised at most by steps in flight
                                      each draw in flight          (every draft accepted)

Without a step in flight, done = computed and known = least = total. A sequence decodes when computed = total - 1.
Without drafts least = total: a step in flight brings one token per draw. With drafts the truth lies between the two,
and `total` and `computed` may run past the limit, which the tokens never do; they come back when the step is settled.
"""

from __future__ import annotations

import numpy as np

from deepinfer.config import BLOCK_SIZE


class SequenceTable:
    """All arrays have one entry per slot. Memory for tokens is touched, and so really taken, only as far as used."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        def counters() -> np.ndarray:
            return np.zeros(max_num_seqs, np.int64)

        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)  # known tokens of the slot's sequence
        self.known = counters()
        self.least = counters()
        self.total = counters()
        self.computed = counters()
        self.done = counters()
        self.limit = counters()  # prompt + output tokens at most
        self.prefill_end = counters()  # known tokens at admission: the prefill's length
        self.published = counters()  # full blocks handed to the prefix cache or taken from it
        self.replica = counters()  # last block boundary whose window a settled step copied; 0 = none
        self.crossing = counters()  # the same, of scheduled steps
        self.epoch = counters()  # grows when the slot changes hands: results of older epochs are stale
        self.number = counters()  # of the request
        self.index = np.zeros(max_num_seqs, np.int32)  # of the completion
        self.tenant = counters()  # a small number per tenant, given by the queue policy
        self.stops = np.full((max_num_seqs, 1), -1, np.int64)  # ids that end the sequence, filled up with -1

    def occupy(self, slot: int, token_ids: np.ndarray, *, number: int, index: int, limit: int, stops: set[int]) -> None:
        """A sequence with these known tokens takes the slot; nothing of it is computed."""
        count = len(token_ids)
        self.tokens[slot, :count] = token_ids
        self.known[slot] = self.least[slot] = self.total[slot] = self.prefill_end[slot] = count
        self.limit[slot], self.number[slot], self.index[slot] = limit, number, index
        self.epoch[slot] += 1
        self.replica[slot] = self.crossing[slot] = 0
        self.start_at(slot, 0)
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = list(stops)

    def start_at(self, slot: int, position: int, cached: int | None = None) -> None:
        """Tokens below `position` are computed; full blocks below `cached` (None: position) are in the prefix cache."""
        self.computed[slot] = self.done[slot] = position
        self.published[slot] = (position if cached is None else cached) // BLOCK_SIZE

    def branch(self, parent: int, child: int, index: int) -> None:
        """`child` starts with the parent's scheduled prompt and draws its own next token."""
        known = int(self.known[parent])
        self.tokens[child, :known] = self.tokens[parent, :known]
        for counter in (
            self.known, self.least, self.total, self.computed, self.limit, self.prefill_end, self.number, self.tenant
        ):  # fmt: skip
            counter[child] = counter[parent]
        self.done[child] = self.computed[parent]
        self.published[child] = known // BLOCK_SIZE  # the parent hands the shared blocks to the cache
        self.replica[child] = self.crossing[child] = 0
        self.index[child] = index
        self.epoch[child] += 1
        self.stops[child] = self.stops[parent]

    def vacate(self, slot: int) -> None:
        """The slot's sequence is gone; what is in flight for it is stale."""
        self.epoch[slot] += 1

    def schedule_chunks(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """A step computes these tokens."""
        self.computed[slots] = ends
        crossed = boundaries(starts, ends)
        self.crossing[slots] = np.where(crossed > 0, crossed, self.crossing[slots])

    def schedule_decodes(self, slots: np.ndarray, caps: np.ndarray | int) -> None:
        """A step computes the newest token of each and up to `caps` drafts, and draws a token."""
        total = self.total[slots]
        ends = total + caps
        self.schedule_chunks(slots, total - 1, ends)
        self.total[slots] = ends + 1
        self.least[slots] += 1

    def settle_chunks(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """These chunks' state is written, and stays."""
        ends = starts + lengths
        self.done[slots] = ends
        crossed = boundaries(starts, ends)
        self.replica[slots] = np.where(crossed > 0, crossed, self.replica[slots])

    def settle_draws(self, slots: np.ndarray, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each slot's next token is known -> bool [n] ended by a stop token, bool [n] at its length limit."""
        at = self.known[slots]
        self.tokens[slots, at] = token_ids
        self.known[slots] = at + 1
        stopped = (self.stops[slots] == token_ids[:, None]).any(1)
        return stopped, at + 1 >= self.limit[slots]

    def settle_runs(
        self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each slot's next tokens are known: the first counts [n] of its row of token_ids [n, m]. What stands behind a
        stop token or beyond the limit is dropped -> int64 [n] how many are kept, and as `settle_draws`."""
        at, columns = self.known[slots], np.arange(token_ids.shape[1])
        stops = (token_ids[:, :, None] == self.stops[slots][:, None, :]).any(2) & (columns < counts[:, None])
        stop = np.where(stops.any(1), stops.argmax(1), len(columns))
        kept = np.minimum(np.minimum(counts, stop + 1), self.limit[slots] - at)
        row, column = (columns < kept[:, None]).nonzero()
        self.tokens[slots[row], at[row] + column] = token_ids[row, column]
        self.known[slots] = at + kept
        return kept, stop < kept, at + kept >= self.limit[slots]

    def take_back(self, slots: np.ndarray, caps: np.ndarray, counts: np.ndarray) -> None:
        """Decodes that were scheduled with up to `caps` drafts came back with `counts` tokens [n]."""
        missing = caps + 1 - counts
        self.least[slots] += counts - 1
        self.total[slots] -= missing
        self.computed[slots] -= missing

    def unpublished(self, slots: np.ndarray) -> np.ndarray:
        """Those of the slots that have full blocks with settled state which the prefix cache has not seen."""
        return slots[self.done[slots] // BLOCK_SIZE > self.published[slots]]


def boundaries(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The last multiple b of 128 with start < b <= end, per chunk; 0 where there is none."""
    last = ends // BLOCK_SIZE * BLOCK_SIZE
    return np.where(last > starts, last, 0)
