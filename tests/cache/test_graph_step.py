"""Padded steps that are planned on the device give the bits of planned ones: logits, and all that is kept."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scribe import assert_same, open_slots, seen

from deepinfer.cache.graph_step import GraphView, StepRows, begin_rows, commit_rows
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Batch, Chunk, load_model

SLOTS, BLOCKS, DRAFTS = 3, 12, 5
LONGEST = BLOCKS // SLOTS * 128
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(draft_checkpoint: Path):
    return load_model(draft_checkpoint, drafts=True)


@functools.cache
def tokens(slot: int) -> list[int]:
    return torch.randint(3, 400, (LONGEST,), generator=torch.Generator().manual_seed(slot)).tolist()


def storage_for(model, drafts: int, padded_rows: int = 0) -> CacheStorage:
    storage = CacheStorage.for_model(
        model, max_num_seqs=SLOTS, num_blocks=BLOCKS, drafts=drafts, window_entries=2, padded_rows=padded_rows
    )
    open_slots(storage, *range(SLOTS))
    return storage


def chunk(slot: int, start: int, count: int, **bounds: int) -> Chunk:
    return Chunk(slot, start, tokens(slot)[start : start + count], count, **bounds)


class Padded:
    """A storage whose decode and verify steps run over buffers of one size, as a graph would."""

    def __init__(self, model, drafts: int, rows: int, chunks: int) -> None:
        self.model, self.storage = model, storage_for(model, drafts, rows)
        self.rows = StepRows(rows, chunks, SLOTS, CPU)

    def step(self, chunks: list[Chunk]) -> torch.Tensor:
        batch = Batch.from_chunks(chunks, CPU)
        assert self.rows.holds(batch)
        begin_rows(self.storage, batch, self.rows)
        view = GraphView(self.storage, self.rows, LONGEST)
        logits = self.model.run(view, None)
        view.finish()
        commit_rows(self.storage, batch)
        assert logits.shape[0] == self.rows.rows
        assert logits.isfinite().all()
        return logits[: batch.num_rows]


# around the edges that matter: windows (16), rings (22), blocks (128), what is chosen (8) and candidates (16 entries)
STARTS = st.one_of(st.integers(1, 40), st.integers(120, 134), st.integers(250, 258))


@settings(max_examples=12, deadline=None)
@given(
    drafts=st.integers(0, DRAFTS),
    starts=st.lists(STARTS, min_size=1, max_size=SLOTS),
    rounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5),
    padding=st.integers(0, 4),
)
def test_padded_decode_and_verify_steps_equal_planned_ones_bit_for_bit(model, drafts, starts, rounds, padding):
    """Sequences side by side that verify different numbers of drafts and keep some of them; some sit a step out."""
    count = len(starts)
    padded = Padded(model, drafts, count * (1 + drafts) + padding, count + padding % 2)
    plain = storage_for(model, drafts)
    for storage in (plain, padded.storage):
        model.forward([chunk(slot, 0, start) for slot, start in enumerate(starts)], storage)
    lengths = np.array(starts)
    for number, (verified, kept) in enumerate(rounds):
        slots = [slot for slot in range(count) if count == 1 or slot != number % (count + 1)]
        sizes = [1 + (verified + slot) % (drafts + 1) for slot in slots]
        chunks = [chunk(slot, int(lengths[slot]), size) for slot, size in zip(slots, sizes, strict=True)]
        assert torch.equal(padded.step(chunks), model.forward(chunks, plain))
        lengths[slots] += [1 + min(kept, size - 1) for size in sizes]
        for storage in (plain, padded.storage):
            storage.truncate(slots, lengths[slots])
    for slot in range(count):
        assert_same(seen(padded.storage, slot), seen(plain, slot))
    blocks = range(1, BLOCKS + 1)
    assert np.array_equal(padded.storage.block_checksums(blocks), plain.block_checksums(blocks))


def test_a_window_that_starts_late_is_shown_from_there(model):
    """As behind a replay: rows below the floor stand in the ring and are not shown."""
    padded, plain = Padded(model, DRAFTS, 4, 2), storage_for(model, DRAFTS)
    for storage in (plain, padded.storage):
        model.forward([chunk(0, 0, 40)], storage)
    chunks = [chunk(0, 40, 3, window_floor=35, write_from=40)]
    logits = padded.step(chunks)
    assert torch.equal(logits, model.forward(chunks, plain))
    assert_same(seen(padded.storage, 0), seen(plain, 0))
    whole = storage_for(model, DRAFTS)
    model.forward([chunk(0, 0, 40)], whole)
    assert not torch.equal(logits, model.forward([chunk(0, 40, 3)], whole))


def test_a_step_over_a_multiple_of_128_leaves_a_replica_of_the_window(model):
    """Also where drafts behind it have rows in the ring."""
    padded, plain = Padded(model, DRAFTS, 6, 1), storage_for(model, DRAFTS)
    for storage in (plain, padded.storage):
        model.forward([chunk(0, 0, 127)], storage)
    padded.step([chunk(0, 127, 6)])
    model.forward([chunk(0, 127, 6)], plain)
    assert list(seen(plain, 0).replicas) == [128]
    assert_same(seen(padded.storage, 0), seen(plain, 0))


def test_only_steps_whose_rows_all_give_logits_and_write_their_entries_fit(model):
    rows = StepRows(6, 2, SLOTS, CPU)

    def fits(*chunks: Chunk) -> bool:
        return rows.holds(Batch.from_chunks(chunks, CPU))

    assert fits(chunk(0, 5, 1), chunk(1, 0, 5))
    assert not fits(chunk(0, 5, 7))
    assert not fits(chunk(0, 5, 1), chunk(1, 0, 1), chunk(2, 0, 1))
    assert not fits(Chunk(0, 5, [3, 4], 1))
    assert not fits(chunk(0, 5, 2, write_from=6))
    assert not fits(chunk(0, 5, 2, keep_from=5))


def test_nobody_but_the_null_slot_sees_the_rows_of_padding(model):
    """The sequences that are not in the step keep what they have, bit for bit."""
    padded = Padded(model, DRAFTS, 5, 2)
    model.forward([chunk(slot, 0, 30 + slot) for slot in range(SLOTS)], padded.storage)
    before = [seen(padded.storage, slot) for slot in (0, 2)]
    open_rows = {layer: rows[:SLOTS].clone() for layer, rows in padded.storage.open_rows.rows.items()}
    sums = padded.storage.block_checksums(range(BLOCKS + 1))
    padded.step([chunk(1, 31, 1)])
    for slot, expected in zip((0, 2), before, strict=True):
        assert_same(seen(padded.storage, slot), expected)
    for layer, rows in padded.storage.open_rows.rows.items():
        assert torch.equal(rows[[0, 2]], open_rows[layer][[0, 2]])
    changed = np.flatnonzero(padded.storage.block_checksums(range(BLOCKS + 1)) != sums)
    assert changed.tolist() == [0, 1 + BLOCKS // SLOTS]


def test_steps_that_do_not_continue_their_sequences_are_refused(model):
    padded = Padded(model, DRAFTS, 4, 2)
    with pytest.raises(ValueError, match="slot 0: chunk starts at 3, 0 tokens are written"):
        padded.step([chunk(0, 3, 1)])
