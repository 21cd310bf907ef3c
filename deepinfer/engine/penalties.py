"""Changes to the logits that come before the temperature: bias, penalties, and the ban on ending too early.

All work on a float32 copy of the raw logits; the order is that of spec/dspark.md section 10 (bias and penalties do
not commute: the repetition penalty looks at the sign of the biased logit).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.integer]


class TokenHistories:
    """What the sequences with penalties have seen and said, one row of vocabulary size each.

    Rows (0.6 MB at 129,280 ids) are made when the first sequences ask for them, and twice as many whenever they run
    out; a step gathers the rows it needs and adds its tokens to them with one operation each.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # of the output
        self._row = np.full(num_slots, -1, np.int64)
        self._free: list[int] = []

    def open(self, slot: int, prompt_ids: Ids, output_ids: Ids) -> None:
        """The slot's history begins with these tokens, whatever was there before."""
        row = self._new_row(slot)
        vocab, device = self.counts.shape[1], self.counts.device
        self.in_prompt[row] = False
        self.in_prompt[row, torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        said = torch.tensor(output_ids, dtype=torch.int64, device=device)
        self.counts[row] = torch.bincount(said, minlength=vocab).int()

    def close(self, slot: int) -> None:
        """The slot has no history any more. Idempotent."""
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1

    def copy(self, parent: int, child: int) -> None:
        """The child's history is its parent's so far, or none."""
        if self._row[parent] < 0:
            self.close(child)
            return
        row = self._new_row(child)
        self.in_prompt[row] = self.in_prompt[self._row[parent]]
        self.counts[row] = self.counts[self._row[parent]]

    def add(self, slots: npt.NDArray[np.int64], token_ids: Tensor) -> None:
        """One more output token int64 [n] in each of these slots, which have histories."""
        vocab, device = self.counts.shape[1], self.counts.device
        places = torch.from_numpy(self._row[slots] * vocab).to(device) + token_ids
        self.counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def gather(
        self, slots: npt.NDArray[np.int64], drafts: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """in_prompt bool and output counts int32, [n, vocab] each, of slots with histories. drafts: places in `slots`
        and ids, int64 [m] each, counted as output here and not remembered."""
        rows = torch.from_numpy(self._row[slots]).to(self.counts.device)
        counts = self.counts.index_select(0, rows)
        if drafts is not None:
            places = drafts[0] * counts.shape[1] + drafts[1]
            counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        return self.in_prompt.index_select(0, rows), counts

    def _new_row(self, slot: int) -> int:
        if self._row[slot] < 0:
            if not self._free:
                self._grow()
            self._row[slot] = self._free.pop()
        return int(self._row[slot])

    def _grow(self) -> None:
        old = len(self.counts)
        more = max(1, min(old, len(self._row) - old))
        self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])))
        self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self.counts.shape[1])))
        self._free += range(old + more - 1, old - 1, -1)


def add_biases(logits: Tensor, rows: Tensor, biases: list[tuple[Tensor, Tensor]]) -> None:
    """Adds each row's biases in place. logits float32 [all rows, vocab]; rows int64 [n]; biases: for each of them, ids
    int64 and values float32."""
    sizes = torch.tensor([len(ids) for ids, _ in biases], device=rows.device)
    row_of = torch.repeat_interleave(rows, sizes)
    logits[row_of, torch.cat([ids for ids, _ in biases])] += torch.cat([values for _, values in biases])


def penalise(
    logits: Tensor,
    rows: Tensor,
    history: tuple[Tensor, Tensor],
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Repetition, then frequency and presence penalties, in place.

    logits float32 [all rows, vocab]; rows int64 [n]; history as from `TokenHistories.gather`; penalties float32 [n].
    Repetition (Keskar et al. 2019, CTRL) counts prompt and output: positive logits are divided, negative multiplied.
    Frequency and presence count the output only, as the OpenAI protocol defines them.
    """
    in_prompt, counts = history
    said = counts > 0
    z, factor = logits.index_select(0, rows), repetition[:, None]
    z = torch.where(said | in_prompt, torch.where(z > 0, z / factor, z * factor), z)
    z -= frequency[:, None] * counts
    z -= presence[:, None] * said
    logits.index_copy_(0, rows, z)


def ban(logits: Tensor, rows: Tensor, token_ids: list[Tensor]) -> None:
    """Sets the listed ids (int64, one list per row) of each of `rows` to -inf in place: end and stop tokens before
    min_tokens."""
    sizes = torch.tensor([len(ids) for ids in token_ids], device=rows.device)
    logits[torch.repeat_interleave(rows, sizes), torch.cat(token_ids)] = -torch.inf
