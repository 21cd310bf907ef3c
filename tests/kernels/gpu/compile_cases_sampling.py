"""Sampling and drafting at the full vocabulary, for the compile test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.triton import draft_selection, markov, round_rows, sampling, sampling_rows, verify

VOCAB = 129280
META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def whole(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def laws(rows: int, slots: int = 65) -> sampling_rows.RowLaws:
    numbers = empty(slots), whole(slots), empty(slots), empty(slots)
    return sampling_rows.RowLaws(whole(rows), whole(rows), *numbers, whole(slots), whole(slots))


def sample(drawn: bool, truncated: bool, masked: bool = False) -> None:
    masks = {}
    if masked:
        masks = {"masks": empty(384, VOCAB // 32, dtype=torch.int32), "mask_rows": whole(384)}
    sampling.sample(empty(384, VOCAB), laws(384), drawn=drawn, truncated=truncated, **masks)


def chain(rows: int, drawn: bool) -> None:
    embed, head = (empty(VOCAB, 256, dtype=torch.bfloat16) for _ in range(2))
    markov.markov_chain(whole(rows), embed, head, empty(rows, 5, VOCAB), laws(rows) if drawn else None)


def book(chunks: int, drafts: int) -> None:
    rows: Any = SimpleNamespace(rows=chunks * (1 + drafts), chunks=chunks, null_slot=64)
    for name in ("token_ids", "positions", "slots", "row_starts", "floors"):
        setattr(rows, name, whole(rows.rows))
    rows.chunk_slots, rows.chunk_rows = whole(chunks), whole(chunks + 1)
    lengths, there, limits = (whole(65) for _ in range(3))
    survivals, tokens = empty(65, drafts), empty(64, 2**20, dtype=torch.int32)
    round_rows.fill_rows(rows, whole(1 + 2 * chunks), lengths, there, limits, survivals, tokens, 2**20)
    report = verify.Report.empty(chunks, drafts, META)
    drawn = whole(rows.rows), empty(rows.rows), empty(rows.rows, dtype=torch.bool)
    bounds = rows.chunk_slots, rows.chunk_rows
    verify.settle_coupled(rows.token_ids, *drawn, *bounds, lengths, there, tokens, report, 64)
    proposed = whole(chunks, drafts), empty(chunks, drafts)
    verify.keep_drafts(*proposed, rows.chunk_slots, lengths, there, survivals, tokens, report, 64)
    draft_selection.select_lengths(empty(chunks, drafts), whole(chunks), whole(1))


CASES: dict[str, Callable[[], None]] = {
    "greedy": lambda: sample(False, False),
    "drawn": lambda: sample(True, False),
    "truncated": lambda: sample(True, True),
    "truncated under masks": lambda: sample(True, True, True),
    "markov chain of 64": lambda: chain(64, False),
    "markov chain of 8": lambda: chain(8, False),
    "a round's bookkeeping": lambda: book(64, 5),
    "a large round's bookkeeping": lambda: book(512, 5),
    "drawn markov chain of 64": lambda: chain(64, True),
}
WGMMA = {"markov chain of 64", "drawn markov chain of 64"}
