"""Drafts and the cache: rows that are taken back leave nothing behind; the draft layers' windows go where a sequence
goes, but into no stored window."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scribe import assert_same, open_slots, record, seen, write

from deepinfer.cache.edits import (
    CopyBlock,
    CopySlot,
    LoadWindow,
    Offload,
    OpenSlot,
    Restore,
    SaveWindow,
    SetLength,
    SetTable,
)
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Chunk
from deepinfer.model.presets import tiny

WINDOW, BLOCK = tiny().sliding_window, tiny().dspark_block_size
BACKBONE = tiny().num_hidden_layers


def storage_for(drafts: int = 5, **options) -> CacheStorage:
    sizes = {"max_num_seqs": 3, "num_blocks": 12, "window_entries": 2} | options
    return CacheStorage(tiny(), drafts=drafts, device=torch.device("cpu"), **sizes)


def draw(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(count)]


def filled(storage: CacheStorage, slot: int, ids: list[int], cuts: tuple[int, ...] = ()) -> CacheStorage:
    """What the slot lacks of these tokens, in chunks that end at `cuts`."""
    start = storage.length(slot)
    for end in [*(cut for cut in cuts if start < cut < len(ids)), len(ids)]:
        if start < end:
            write(storage, [Chunk(slot, start, ids[start:end], 0)])
        start = max(start, end)
    return storage


# starts around the edges that matter: of the window (16), of a block (128), of a ring of 16 + 1 + 5 rows
EDGES = st.one_of(st.integers(1, 40), st.integers(120, 135), st.integers(250, 262), st.integers(1, 300))


@settings(max_examples=60, deadline=None)
@given(
    drafts=st.integers(1, 5),
    starts=st.lists(EDGES, min_size=1, max_size=3),
    rounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8),
    seed=st.integers(0, 999),
)
def test_drafts_taken_back_leave_the_cache_as_if_they_had_never_been_written(drafts, starts, rounds, seed):
    """Sequences side by side, each step verifies up to `drafts` rows of each and keeps some of them."""
    storage, plain = storage_for(drafts), storage_for(0)
    true = [draw(seed + slot, 400) for slot in range(len(starts))]
    slots = np.arange(len(starts))
    for one in (storage, plain):
        open_slots(one, *slots)
        for slot, start in enumerate(starts):
            filled(one, slot, true[slot][:start], (start // 2,))
    lengths = np.array(starts)
    for number, (verified, accepted) in enumerate(rounds):
        verify = (verified + slots) % (drafts + 1)  # another length for each
        stay = 1 + np.minimum((accepted + slots) % (drafts + 1), verify)
        chunks = []
        for slot, start in enumerate(lengths.tolist()):
            wrong = draw(1000 + number, 1 + int(verify[slot]) - int(stay[slot]))
            chunks.append(Chunk(slot, start, [*true[slot][start : start + int(stay[slot])], *wrong], 0))
        write(storage, chunks)
        lengths = lengths + stay
        storage.truncate(slots, lengths)
        assert storage.lengths(slots).tolist() == lengths.tolist()
        for slot, length in enumerate(lengths.tolist()):
            filled(plain, slot, true[slot][:length])
            assert_same(seen(storage, slot, BACKBONE), seen(plain, slot))
    for slot, length in enumerate(lengths.tolist()):
        positions = torch.arange(max(0, length - WINDOW), length)
        for layer, rows in enumerate(storage.window_rows(slot)):
            ids = torch.tensor(true[slot])[positions]
            assert torch.equal(rows, record(layer, positions, ids, tiny().head_dim))


@pytest.mark.parametrize(("stay", "kept"), [(1, False), (2, True), (3, True)])
def test_a_window_that_rejected_drafts_completed_is_forgotten_until_its_boundary_is_passed_again(stay, kept):
    storage, true = storage_for(), draw(3, 300)
    open_slots(storage, 0)
    filled(storage, 0, true[:254])
    write(storage, [Chunk(0, 254, [*true[254 : 254 + stay], *draw(9, 6 - stay)], 0)])
    storage.truncate([0], [254 + stay])
    if not kept:
        with pytest.raises(ValueError, match=r"slot 0: no replica of the window below 256, its two hold \[-1, 128\]"):
            storage.apply([SaveWindow(0, 256, 0)])
    filled(storage, 0, true[:258])
    storage.apply([SaveWindow(0, 256, 0)])
    positions = torch.arange(256 - WINDOW, 256)
    for layer, rows in enumerate(storage.stored_windows.rows[0]):
        assert torch.equal(rows, record(layer, positions, torch.tensor(true)[positions], tiny().head_dim))


def test_a_length_that_one_slot_of_many_cannot_have_is_refused_and_names_the_slot():
    storage = storage_for(2)
    open_slots(storage, 0, 1, 2)
    for slot in range(3):
        filled(storage, slot, draw(slot, 50))
    with pytest.raises(ValueError, match="slot 1: cannot go back from 50 to 47 tokens; 50 were written once"):
        storage.truncate(np.array([0, 1, 2]), np.array([49, 47, 50]))
    with pytest.raises(ValueError, match="slot 2: cannot go back from 50 to 51"):
        storage.truncate(np.array([0, 1, 2]), np.array([49, 49, 51]))
    assert storage.lengths(np.arange(3)).tolist() == [50, 50, 50]


def draft_rows(storage: CacheStorage, slot: int) -> torch.Tensor:
    """The last window of the draft layers as a draft pass reads it, [stages, min(W, length), width]."""
    window = storage.begin_drafts(np.array([slot]), BLOCK)
    places = window.indices[0, :WINDOW]
    return storage.windows.pool[BACKBONE:, places[places >= 0]].clone()


def expected_rows(ids: list[int]) -> torch.Tensor:
    config = tiny()
    positions = torch.arange(max(0, len(ids) - WINDOW), len(ids))
    layers = range(BACKBONE, BACKBONE + config.num_drafts)
    return torch.stack([record(layer, positions, torch.tensor(ids)[positions], config.head_dim) for layer in layers])


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 128, 300])
@pytest.mark.parametrize("cuts", [(), (3, 4, 100), (20, 44), (130, 299)])
def test_a_draft_pass_sees_the_last_window_of_its_sequence_however_it_was_chunked(length, cuts):
    storage, ids = storage_for(), draw(5, length)
    open_slots(storage, 0, 1)
    filled(storage, 1, draw(6, 40))
    filled(storage, 0, ids, cuts)
    assert torch.equal(draft_rows(storage, 0), expected_rows(ids))


@pytest.mark.parametrize("keep", [WINDOW, 22, 28, 60])
@pytest.mark.parametrize("cuts", [(), (290,), (284, 299)])
def test_a_draft_pass_after_a_truncated_prompt_sees_the_rows_that_reached_the_last_layers(keep, cuts):
    storage, ids = storage_for(), draw(5, 300)
    open_slots(storage, 0, 1)
    starts = [0, *cuts]
    for start, end in itertools.pairwise([*starts, 300]):
        mate = Chunk(1, storage.length(1), draw(start, 30), 0)
        write(storage, [mate, Chunk(0, start, ids[start:end], 0, keep_from=300 - keep)])
    assert torch.equal(draft_rows(storage, 0), expected_rows(ids))


def test_the_rows_of_a_block_see_the_window_and_the_whole_block_and_write_nothing():
    storage, config = storage_for(), tiny()
    open_slots(storage, 0, 1, 2)
    sequences = {2: draw(1, 40), 0: draw(2, 3)}
    for slot, ids in sequences.items():
        filled(storage, slot, ids)
    before = [seen(storage, slot) for slot in sequences]
    window = storage.begin_drafts(np.array([2, 0]), BLOCK)
    assert window.positions.tolist() == [40, 41, 42, 43, 44, 3, 4, 5, 6, 7]
    assert window.indices.shape == (2 * BLOCK, WINDOW + BLOCK)
    kv = torch.randn(2 * BLOCK, config.head_dim)
    for layer in range(BACKBONE, BACKBONE + config.num_drafts):
        pool, indices = window.stage(layer, kv)
        for row, ids in enumerate(sequences.values()):
            mine = indices[row * BLOCK : (row + 1) * BLOCK]
            assert (mine == mine[0]).all()
            assert torch.equal(pool[mine[0, WINDOW:]], kv[row * BLOCK : (row + 1) * BLOCK])
            shown = mine[0, :WINDOW]
            assert (shown >= 0).tolist() == [place < len(ids) for place in range(WINDOW)]
            assert torch.equal(pool[shown[shown >= 0]], expected_rows(ids)[layer - BACKBONE])
    for slot, earlier in zip(sequences, before, strict=True):
        assert_same(seen(storage, slot), earlier)


def test_a_draft_pass_may_stage_more_rows_than_any_step_before_it():
    storage, ids = storage_for(), draw(5, 17)
    open_slots(storage, 0, 1, 2)
    for position, token in enumerate(ids):
        write(storage, [Chunk(0, position, [token], 0)])
    window = storage.begin_drafts(np.array([0, 1, 2]), BLOCK)
    pool, indices = window.stage(BACKBONE, torch.ones(3 * BLOCK, tiny().head_dim))
    assert len(pool) == storage.windows.staging + 3 * BLOCK
    assert torch.equal(pool[indices[0, :WINDOW]], expected_rows(ids)[0])


def test_draft_layers_travel_with_a_sequence_that_leaves_for_host_memory_and_comes_back():
    storage, ids = storage_for(), draw(5, 140)
    open_slots(storage, 0)
    filled(storage, 0, ids)
    storage.apply([Offload(1, 0, (1, 2)), OpenSlot(0), SetTable(0, 0, (1, 2, 3, 4))])
    filled(storage, 0, draw(6, 150))
    storage.apply([OpenSlot(2), SetTable(2, 0, (9, 10)), Restore(1, 2, (9, 10))])
    assert torch.equal(draft_rows(storage, 2), expected_rows(ids))


@pytest.mark.parametrize("length", [128, 131, 140, 141])
@pytest.mark.parametrize("drafts", [1, 2, 4, 5])
def test_a_sequence_that_left_with_a_verify_step_in_flight_goes_on_below_it(length, drafts):
    """The host knows `length` tokens; the step in flight wrote 1 + drafts more before the copy was made."""
    storage, true = storage_for(drafts), draw(5, 300)
    open_slots(storage, 0)
    filled(storage, 0, true[:length])
    write(storage, [Chunk(0, length, draw(7, 1 + drafts), 0)])
    last = tuple(true[length - 3 : length])
    storage.apply([Offload(1, 0, (1, 2)), OpenSlot(2), SetTable(2, 0, (9, 10)), Restore(1, 2, (9, 10))])
    storage.apply([SetLength(2, length, last)])
    plain = storage_for(0)
    open_slots(plain, 2)
    for end in (length, length + 3):
        filled(storage, 2, true[:end])
        filled(plain, 2, true[:end])
        assert_same(seen(storage, 2, BACKBONE), seen(plain, 2))
        assert torch.equal(draft_rows(storage, 2), expected_rows(true[:end]))


def test_draft_layers_travel_with_a_fork():
    storage, ids = storage_for(), draw(5, 140)
    open_slots(storage, 0)
    filled(storage, 0, ids)
    storage.apply([OpenSlot(1), SetTable(1, 0, (1, 6)), CopyBlock(2, 6), CopySlot(0, 1)])
    filled(storage, 0, [*ids, *draw(8, 30)])
    assert torch.equal(draft_rows(storage, 1), expected_rows(ids))


def test_stored_windows_do_not_hold_draft_layers_and_loading_one_leaves_them_alone():
    storage, ids = storage_for(), draw(5, 140)
    open_slots(storage, 0, 1)
    filled(storage, 0, ids)
    storage.apply([SaveWindow(0, 128, 1)])
    assert storage.windows.pool.shape[0] == BACKBONE + tiny().num_drafts
    assert storage.stored_windows.rows.shape[1] == storage.windows.replica_rows.shape[0] == BACKBONE
    before = storage.windows.pool[BACKBONE:].clone()
    storage.apply([SetTable(1, 0, (1,)), SetLength(1, 128, tuple(ids[125:128])), LoadWindow(1, 1, 128)])
    assert torch.equal(storage.windows.pool[BACKBONE:], before)
    assert torch.equal(storage.window_rows(1)[:BACKBONE], storage.stored_windows.rows[1])


def test_after_a_hit_the_rows_that_are_computed_fill_a_draft_window():
    """A window and a verify step of them at least, by the rule for hits: an earlier owner of the slot is never seen."""
    storage, ids = storage_for(), draw(5, 128 + WINDOW + 6)
    open_slots(storage, 0, 1)
    filled(storage, 0, ids)
    storage.apply([SaveWindow(0, 128, 1)])
    filled(storage, 1, draw(6, 300))
    storage.apply([OpenSlot(1), SetTable(1, 0, (1, 6)), SetLength(1, 128, tuple(ids[125:128])), LoadWindow(1, 1, 128)])
    filled(storage, 1, ids)
    assert torch.equal(draft_rows(storage, 1), expected_rows(ids))


def test_window_memory_does_not_grow_over_5_000_decoded_tokens():
    storage = CacheStorage(
        tiny(), max_num_seqs=2, num_blocks=84, drafts=5, window_entries=1, device=torch.device("cpu")
    )
    rng, ids = random.Random(2), draw(5, 6000)
    open_slots(storage, 0, 1)
    filled(storage, 0, ids[:20])
    write(storage, [Chunk(0, 20, ids[20:26], 0), Chunk(1, 0, ids[:6], 0)])

    def sizes() -> list[int]:
        fixed = [storage.windows.pool, storage.windows.replica_rows, storage.last_tokens]
        return [one.numel() for one in [*fixed, *storage.open_rows.rows.values()]]

    before, length = sizes(), 26
    while length < 5026:
        verified = rng.randint(0, 5)
        stay = 1 + rng.randint(0, verified)
        rows = [*ids[length : length + stay], *draw(length, 1 + verified - stay)]
        write(storage, [Chunk(0, length, rows, 0)])
        length += stay
        storage.truncate([0], [length])
    assert sizes() == before
    assert torch.equal(draft_rows(storage, 0), expected_rows(ids[:length]))


def test_a_model_without_draft_stages_may_still_take_tokens_back_and_has_no_draft_layers():
    config = dataclasses.replace(
        tiny(),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=tiny().compress_ratios[:BACKBONE],
    )
    storage = CacheStorage(config, max_num_seqs=1, num_blocks=4, drafts=5, device=torch.device("cpu"))
    open_slots(storage, 0)
    filled(storage, 0, draw(1, 40))
    storage.truncate([0], [36])
    assert storage.windows.draft_layers == 0 and storage.windows.ring == WINDOW + 6
    with pytest.raises(ValueError, match="without draft stages"):
        storage.begin_drafts(np.array([0]), BLOCK)
