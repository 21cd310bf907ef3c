"""A prefix found in the cache is entered one window before its end: what that may read, and what it must not write."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from yoco import Bounds, Masks, cold_slot, draw_tokens, feed, hit_slot, masked_full, same_logits

from deepinfer.cache.edits import LoadWindow, OpenSlot, SaveWindow, SetLength, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Chunk, load_model

WINDOW, KEEP, LENGTH = 16, 28, 420
CASES = settings(max_examples=20, deadline=None)


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Path):
    return load_model(tiny_checkpoint)


@functools.cache
def ids(length: int = LENGTH) -> list[int]:
    return draw_tokens(3, LENGTH)[:length]


def storage_for(model, **options) -> CacheStorage:
    return CacheStorage.for_model(model, max_num_seqs=4, num_blocks=24, **options)


def warmed(model, **options) -> tuple[CacheStorage, range]:
    """A storage in which slot 0 has computed the whole prompt, and its blocks."""
    storage = storage_for(model, **options)
    blocks = cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(), [128, 256, 384])
    return storage, blocks


@functools.cache
def expected(model, length: int, masks: Masks, num_logits: int = 1) -> torch.Tensor:
    return masked_full(model, ids(length), masks, num_logits)


def checksums(storage: CacheStorage, blocks) -> list[int]:
    return storage.block_checksums(list(blocks)).tolist()


@pytest.mark.parametrize("hit", [128, 256, 384])
@pytest.mark.parametrize("keep", [None, KEEP])
def test_a_replayed_prompt_gives_the_logits_of_a_masked_one(model, hit, keep):
    storage, shared = warmed(model)
    start, keep_from = hit - WINDOW, 0 if keep is None else LENGTH - keep
    hit_slot(storage, 1, ids(), hit, start, range(10, 14), shared)
    got = feed(model, storage, 1, ids(), num_logits=5, bounds=Bounds(start, hit, keep_from))
    same_logits(model, got, expected(model, LENGTH, Masks(start, hit, keep_from), 5))
    cold = expected(model, LENGTH, Masks(), 5)
    assert not torch.equal(got, cold)  # bounded replay is an approximation: the masks do hide something


@CASES
@given(
    hit=st.sampled_from([128, 256]),
    length=st.integers(290, 320),
    near=st.lists(st.integers(-WINDOW, WINDOW + 1), max_size=4),
    far=st.lists(st.integers(100, 330), max_size=3),
    truncated=st.booleans(),
)
def test_chunk_ends_anywhere_in_a_replay_do_not_change_it(model, hit, length, near, far, truncated):
    storage, shared = warmed(model)
    start, keep_from = hit - WINDOW, length - KEEP if truncated else 0
    hit_slot(storage, 2, ids(length), hit, start, range(10, 14), shared)
    cuts = [*(hit + offset for offset in near), *far]
    before = checksums(storage, shared)
    bounds = Bounds(start, hit, keep_from)
    got = feed(model, storage, 2, ids(length), cuts, mates=[Chunk(0, LENGTH, [5], 1)], bounds=bounds)
    same_logits(model, got, expected(model, length, Masks(start, hit, keep_from)))
    assert checksums(storage, shared[:3]) == before[:3]


def test_replays_side_by_side_over_shared_blocks_change_none_of_them(model):
    storage, shared = warmed(model)
    before = checksums(storage, shared)
    lengths, hits, chunks = {1: 300, 2: 411, 3: 402}, {1: 128, 2: 256, 3: 256}, []
    for slot, length in lengths.items():
        hit, start = hits[slot], hits[slot] - WINDOW
        hit_slot(storage, slot, ids(length), hit, start, range(4 + 4 * slot, 8 + 4 * slot), shared)
        chunks.append(Chunk(slot, start, ids(length)[start:], 1, window_floor=start, write_from=hit))
    logits = model.forward(chunks, storage)
    assert checksums(storage, shared) == before
    for row, (slot, length) in enumerate(lengths.items()):
        masks = Masks(hits[slot] - WINDOW, hits[slot])
        same_logits(model, logits[row : row + 1], expected(model, length, masks))


def test_blocks_are_written_from_the_hit_on_and_would_be_below_it(model):
    """The checksums see a write: without suppression the same replay changes the shared block."""
    storage, shared = warmed(model)
    before = checksums(storage, shared)
    hit_slot(storage, 1, ids(), 256, 256 - WINDOW, range(10, 14), shared)
    model.forward([Chunk(1, 256 - WINDOW, ids()[256 - WINDOW :], 1, window_floor=256 - WINDOW)], storage)
    after = checksums(storage, shared)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
    assert checksums(storage, range(10, 12)) != checksums(storage, range(12, 14))  # its own blocks are filled


def test_nothing_below_the_start_of_a_replay_is_read(model):
    """Window rows, open rows and last tokens that an earlier owner of the slot left behind are poison."""
    storage, shared = warmed(model, drafts=5, window_entries=1)
    hit, start = 256, 256 - WINDOW
    hit_slot(storage, 1, ids(), hit, start, range(10, 14), shared)
    storage.windows.pool[:, storage.windows.ring_of(1)] = float("nan")
    for rows in storage.open_rows.rows.values():
        rows[1] = float("nan")
    bounds = Bounds(start, hit)
    got = feed(model, storage, 1, ids(), [start + 1, start + 7, hit, hit + 3], num_logits=3, bounds=bounds)
    same_logits(model, got, expected(model, LENGTH, Masks(start, hit), 3))


def test_tokens_before_a_replay_come_from_the_prompt_and_pictures_among_them_count(model):
    picture = model.config.image_token_id
    prompt = [*ids(256 - WINDOW - 2), picture, *ids()[256 - WINDOW - 1 :]]
    storage = storage_for(model)
    shared = cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, prompt)
    hit_slot(storage, 1, prompt, 256, 256 - WINDOW, range(10, 14), shared)
    got = feed(model, storage, 1, prompt, bounds=Bounds(256 - WINDOW, 256))
    same_logits(model, got, masked_full(model, prompt, Masks(256 - WINDOW, 256), 1))


@pytest.mark.parametrize("cuts", [(), (200,), (255, 256, 257)])
def test_a_replay_of_the_whole_cone_gives_what_a_cold_run_gives(model, cuts):
    """Every layer's window reaches one window further back: 8 layers x 15 rows, and the logits are exact."""
    cone = model.config.num_hidden_layers * (WINDOW - 1)
    storage, shared = warmed(model)
    hit = 256
    hit_slot(storage, 1, ids(), hit, hit - cone, range(10, 14), shared)
    bounds = Bounds(hit - cone, hit)
    got = feed(model, storage, 1, ids(), cuts, num_logits=LENGTH - hit, bounds=bounds)
    same_logits(model, got, expected(model, LENGTH, Masks(), LENGTH - hit))
    for slot in (0, 1):
        assert storage.length(slot) == LENGTH
    assert torch.equal(storage.window_rows(0), storage.window_rows(1))
    # one pair less of it is not enough
    hit_slot(storage, 2, ids(), hit, hit - cone + 2, range(14, 18), shared)
    short = Bounds(hit - cone + 2, hit)
    less = feed(model, storage, 2, ids(), num_logits=LENGTH - hit, bounds=short)
    assert not torch.equal(less[0], got[0])


@pytest.mark.parametrize("drafts", [0, 5])
def test_decoding_goes_on_after_a_truncated_replay_as_after_masks(model, drafts):
    length, hit, start = 390, 256, 256 - WINDOW
    storage, shared = warmed(model, drafts=drafts)
    hit_slot(storage, 1, ids(), hit, start, range(10, 14), shared)
    bounds = Bounds(start, hit, length - KEEP)
    rows = [feed(model, storage, 1, ids(length), [hit], bounds=bounds)]
    for position in range(length, LENGTH):
        wrong = draw_tokens(position, drafts)
        rows.append(model.forward([Chunk(1, position, [ids()[position], *wrong], 1 + drafts)], storage)[:1])
        if drafts:
            storage.truncate(1, position + 1)
    masks = Masks(start, hit, length - KEEP)
    same_logits(model, torch.cat(rows), expected(model, LENGTH, masks, LENGTH - length + 1))


@pytest.mark.parametrize(
    "cuts", [(128, 256), (100, 255, 256), (130, 140, 250, 256, 257), (256,), (300,), (250,), (245, 259)]
)
def test_a_window_from_the_store_gives_what_a_cold_run_gives(model, cuts):
    """Saved by one sequence whatever its chunks were, read by another: no row is computed twice, no bit differs."""
    storage, hit = storage_for(model, window_entries=2), 256
    shared = cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(310), cuts)
    storage.apply([SaveWindow(0, hit, 1), OpenSlot(0)])
    hit_slot(storage, 1, ids(), hit, hit, range(10, 14), shared)
    storage.apply([LoadWindow(1, 1, hit)])
    got = feed(model, storage, 1, ids(), [hit + 1, 300], num_logits=LENGTH - 300)
    same_logits(model, got, expected(model, LENGTH, Masks(), LENGTH - 300))


def test_truncation_never_reads_the_last_layers_part_of_a_stored_window(model):
    """It may come from a truncated prompt, whose last layers had no rows there: keep_from is then at least the hit."""
    storage, hit, length = storage_for(model, window_entries=1), 256, 280
    shared = cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(), bounds=Bounds(keep_from=LENGTH - KEEP))
    saved = storage_for(model, window_entries=1)
    cold_slot(saved, 0, 384)
    feed(model, saved, 0, ids(256 + 5), [hit])
    saved.apply([SaveWindow(0, hit, 0)])
    rows = saved.stored_windows.rows
    rows[0, max(model.config.kv_source_layer_ids) + 1 :] = float("nan")
    storage.stored_windows.rows.copy_(rows)
    hit_slot(storage, 1, ids(length), hit, hit, range(10, 14), shared)
    storage.apply([LoadWindow(0, 1, hit)])
    keep_from = max(length - KEEP, hit)
    got = feed(model, storage, 1, ids(length), [hit + 3], bounds=Bounds(keep_from=keep_from))
    same_logits(model, got, masked_full(model, ids(length), Masks(keep_from=keep_from), 1))


def test_a_replay_into_a_slot_of_another_sequence_finds_nothing_of_it(model):
    storage, shared = warmed(model)
    cold_slot(storage, 1, 300, first_block=14)
    feed(model, storage, 1, draw_tokens(9, 300))  # then it ends, and its slot is given on
    hit_slot(storage, 1, ids(), 128, 128 - WINDOW, range(10, 14), shared)
    got = feed(model, storage, 1, ids(), bounds=Bounds(128 - WINDOW, 128))
    same_logits(model, got, expected(model, LENGTH, Masks(128 - WINDOW, 128)))


def test_the_window_before_the_newest_boundary_can_still_be_saved(model):
    """Whoever decides to keep it may hear of it one boundary late."""
    storage = storage_for(model, window_entries=2)
    cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(128), [120])
    rings = [storage.window_rows(0)]
    feed(model, storage, 0, ids(256), [250])
    rings.append(storage.window_rows(0))
    feed(model, storage, 0, ids(300))
    storage.apply([SaveWindow(0, 128, 0), SaveWindow(0, 256, 1)])
    assert torch.equal(storage.stored_windows.rows, torch.stack(rings))


def test_a_window_that_no_replica_holds_cannot_be_saved(model):
    storage = storage_for(model, window_entries=1)
    cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(300), [200])  # passes 128 in one step, 256 in the next
    storage.apply([SaveWindow(0, 128, 0), SaveWindow(0, 256, 0)])
    with pytest.raises(ValueError, match=r"slot 0: no replica of the window below 384, its two hold \[256, 128\]"):
        storage.apply([SaveWindow(0, 384, 0)])
    storage.apply([OpenSlot(0), SetTable(0, 0, (1,)), SetLength(0, 0, ())])
    with pytest.raises(ValueError, match="no replica of the window below 256"):
        storage.apply([SaveWindow(0, 256, 0)])
