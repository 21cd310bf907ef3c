"""What the host orders, the device's tensors do: growth, forks, preemption to host memory, drafts taken back."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from yoco import cold_slot, draw_tokens, feed, same_logits

from deepinfer.cache.edits import (
    CopyBlock,
    CopySlot,
    ForgetTicket,
    LoadWindow,
    Offload,
    OpenSlot,
    Restore,
    SaveWindow,
    SetLength,
    SetTable,
)
from deepinfer.cache.formats import (
    block_bytes,
    format_problem,
    ring_rows,
    slot_bytes,
    staging_bytes,
    window_entry_bytes,
)
from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Batch, Chunk, load_model
from deepinfer.model.presets import flash, tiny

LENGTH = 300


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Path):
    return load_model(tiny_checkpoint)


@functools.cache
def ids(length: int = LENGTH) -> list[int]:
    return draw_tokens(5, LENGTH)[:length]


def storage_for(model, **options) -> CacheStorage:
    return CacheStorage.for_model(model, max_num_seqs=3, num_blocks=16, **options)


@functools.cache
def whole(model) -> torch.Tensor:
    """Logits of every position, the prompt in one piece."""
    storage = storage_for(model)
    cold_slot(storage, 0, LENGTH)
    return model.forward([Chunk(0, 0, ids(), LENGTH)], storage)


@pytest.mark.parametrize("cut", [1, 127, 128, 201])
def test_a_sequence_that_was_offloaded_goes_on_in_another_slot_and_other_blocks(model, cut):
    storage = storage_for(model, window_entries=1)
    blocks = cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(cut), [cut // 2])
    held = tuple(blocks)[: -(-cut // 128)]
    storage.apply([Offload(7, 0, held)])
    cold_slot(storage, 0, LENGTH)  # slot and blocks go to somebody else
    feed(model, storage, 0, draw_tokens(6, LENGTH))
    own = tuple(range(9, 12))
    storage.apply([OpenSlot(2), SetTable(2, 0, own), Restore(7, 2, own[: len(held)])])
    assert storage.length(2) == cut
    same_logits(model, feed(model, storage, 2, ids(), num_logits=LENGTH - cut), whole(model)[cut:])
    if cut > 128:  # the replica came along
        storage.apply([SaveWindow(2, cut // 128 * 128, 0)])
    with pytest.raises(KeyError):
        storage.apply([Restore(7, 2, own)])


def test_a_ticket_can_be_forgotten_and_must_get_as_many_blocks_as_it_gave(model):
    storage = storage_for(model)
    cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(200))
    storage.apply([Offload(1, 0, (1, 2)), Offload(2, 0, (1, 2)), ForgetTicket(1)])
    with pytest.raises(ValueError, match="ticket 2: 2 blocks were kept, 1 are given"):
        storage.apply([Restore(2, 1, (4,))])


@pytest.mark.parametrize("cut", [2, 127, 128, 201])
def test_a_fork_made_by_edits_goes_its_own_way(model, cut):
    storage = storage_for(model, drafts=3, window_entries=1)
    cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(cut))
    full = cut // 128
    own = tuple(range(8, 8 + 3 - full))
    table = [SetTable(1, 0, tuple(range(1, 1 + full))), SetTable(1, full, own)]
    storage.apply([OpenSlot(1), *table, CopyBlock(1 + full, own[0]), CopySlot(0, 1)])
    feed(model, storage, 0, [*ids(cut), *draw_tokens(8, LENGTH - cut)])  # the parent goes elsewhere first
    same_logits(model, feed(model, storage, 1, ids(), num_logits=LENGTH - cut), whole(model)[cut:])


@settings(max_examples=25, deadline=None)
@given(
    drafts=st.integers(0, 5),
    start=st.integers(1, LENGTH - 6 * 6 - 5),  # six rounds of at most six tokens, and five that are read at the end
    accepted=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_drafts_that_are_taken_back_leave_no_trace(model, drafts, start, accepted):
    """Rows m .. m + drafts are written, 1 + a of them stay: windows, open pairs, n-grams and entries follow."""
    storage = storage_for(model, drafts=drafts, window_entries=1)
    cold_slot(storage, 0, LENGTH + 12)
    feed(model, storage, 0, ids(start), [start // 2])
    position = start
    for count in accepted:
        stay = 1 + min(count, drafts)
        rows = [*ids()[position : position + stay], *draw_tokens(position, 1 + drafts - stay)]
        logits = model.forward([Chunk(0, position, rows, len(rows))], storage)
        same_logits(model, logits[:stay], whole(model)[position : position + stay])
        position += stay
        storage.truncate(0, position)
    assert storage.length(0) == position
    same_logits(model, feed(model, storage, 0, ids(), num_logits=5), whole(model)[-5:])


def test_a_boundary_that_drafts_passed_and_fell_back_behind_is_copied_when_it_is_passed_for_good(model):
    storage = storage_for(model, drafts=5, window_entries=2)
    cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(126))
    model.forward([Chunk(0, 126, [ids()[126], 9, 9, 9, 9, 9], 1)], storage)
    storage.truncate(0, 127)
    model.forward([Chunk(0, 127, ids()[127:129], 1)], storage)
    plain = storage_for(model, window_entries=2)
    cold_slot(plain, 0, LENGTH)
    feed(model, plain, 0, ids(140))
    for one in (storage, plain):
        one.apply([SaveWindow(0, 128, 1)])
    assert torch.equal(storage.stored_windows.rows[1], plain.stored_windows.rows[1])


def test_taking_back_more_than_the_drafts_is_refused(model):
    storage = storage_for(model, drafts=2)
    cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, ids(100))
    storage.truncate(0, 99)
    storage.truncate(0, 98)
    with pytest.raises(ValueError, match="slot 0: cannot go back from 98 to 97 tokens; 100 were written once"):
        storage.truncate(0, 97)
    with pytest.raises(ValueError, match="cannot go back from 98 to 99"):
        storage.truncate(0, 99)


def test_a_step_that_the_slot_cannot_hold_is_refused_before_anything_is_written(model):
    storage = storage_for(model)
    cold_slot(storage, 0, 100)
    with pytest.raises(ValueError, match="slot 0: chunk starts at 3, 0 tokens are written"):
        model.forward([Chunk(0, 3, [5])], storage)
    with pytest.raises(ValueError, match="slot 0: no blocks reserved for 129 tokens"):
        model.forward([Chunk(0, 0, ids(129))], storage)
    with pytest.raises(ValueError, match="slot 1: no blocks reserved for 1 tokens"):
        model.forward([Chunk(1, 0, [5])], storage)
    for slot in (-1, 3):
        with pytest.raises(ValueError, match=r"slots must be in 0 \.\. 2"):
            storage.begin(Batch.from_chunks([Chunk(slot, 0, [5])], model.device))
    assert [storage.length(slot) for slot in range(3)] == [0, 0, 0]


def test_orders_that_contradict_the_tables_are_refused(model):
    storage = storage_for(model)
    storage.apply([OpenSlot(0), SetTable(0, 0, (1, 2))])
    with pytest.raises(ValueError, match="table entries 3 to 4 do not continue a table of 2"):
        storage.apply([SetTable(0, 3, (3,))])
    with pytest.raises(ValueError, match="at most 16 blocks"):
        storage.apply([SetTable(0, 2, tuple(range(3, 18)))])
    with pytest.raises(ValueError, match="257 tokens do not fit into its 256"):
        storage.apply([SetLength(0, 257, ())])
    with pytest.raises(ValueError, match="3 last tokens for a length of 2"):
        storage.apply([SetLength(0, 2, (1, 2, 3))])


def test_a_slot_that_is_opened_again_is_empty(model):
    storage = storage_for(model, drafts=5)
    cold_slot(storage, 0, LENGTH)
    feed(model, storage, 0, draw_tokens(11, 201))
    cold_slot(storage, 0, LENGTH, first_block=5)
    same_logits(model, feed(model, storage, 0, ids(), [77], num_logits=3), whole(model)[-3:])
    storage.apply([OpenSlot(0)])
    with pytest.raises(ValueError, match="no blocks reserved"):
        model.forward([Chunk(0, 0, [5])], storage)


def test_a_slot_takes_as_many_window_rows_whatever_the_length_of_the_output(model):
    storage = storage_for(model, drafts=5)
    cold_slot(storage, 0, LENGTH)
    rows = storage.windows.staging
    assert storage.windows.ring == ring_rows(model.config, 5) == 16 + 1 + 5
    for length in (10, 200, 201, 202):
        feed(model, storage, 0, ids(length))
        assert storage.windows.staging == rows == 3 * 22
    assert len(storage.window_rows(0)[0]) == 16


@pytest.mark.parametrize("kv_format", ["bfloat16", "packed"])
def test_bfloat16_records_packed_or_wide_give_the_same_logits_bit_for_bit(tiny_checkpoint, kv_format):
    """Whatever happens to them: chunks, a stored window, host memory, drafts taken back."""
    rounded = load_model(tiny_checkpoint, dtype="bfloat16")

    def run(kv_format: str) -> torch.Tensor:
        storage = CacheStorage.for_model(
            rounded, max_num_seqs=2, num_blocks=8, drafts=2, window_entries=1, kv_format=kv_format
        )
        cold_slot(storage, 0, LENGTH)
        rows = [feed(rounded, storage, 0, ids(140), [100], num_logits=9)]
        storage.truncate(0, 139)
        storage.apply([SaveWindow(0, 128, 0), Offload(1, 0, (1, 2)), OpenSlot(1), SetTable(1, 0, (5, 6, 7))])
        storage.apply([Restore(1, 1, (5, 6))])
        rows.append(feed(rounded, storage, 1, ids(150), num_logits=11))
        storage.apply([OpenSlot(0), SetTable(0, 0, (1, 2)), SetLength(0, 128, tuple(ids(128)[-3:]))])
        storage.apply([LoadWindow(0, 0, 128)])
        rows.append(feed(rounded, storage, 0, ids(150), num_logits=22))
        return torch.cat(rows)

    assert torch.equal(run(kv_format), run("float32"))


def test_the_sizes_are_those_of_the_tensors():
    for config in (tiny(), flash()):
        for kv_format in ("float32", "bfloat16", "packed"):
            if config.num_hidden_layers > 8 and kv_format != "packed":
                continue
            sizes = {"max_num_seqs": 1, "num_blocks": 1, "drafts": 5, "window_entries": 1, "kv_format": kv_format}
            storage = CacheStorage(config, device=torch.device("meta"), **sizes)
            blocks = sum(pool[0].nbytes for records in storage.records.values() for pool in records.blocks())
            assert block_bytes(config, kv_format) == blocks
            entry = storage.stored_windows.rows[0].nbytes
            assert window_entry_bytes(config, kv_format) == entry
            windows = storage.windows
            slot = windows.pool[:, : windows.staging].nbytes + windows.replica_rows.nbytes + storage.last_tokens.nbytes
            slot += sum(rows.nbytes for rows in storage.open_rows.rows.values())
            assert slot_bytes(config, kv_format, 5) == slot
            assert slot_bytes(config, kv_format, 5, replicas=False) == slot - 2 * entry
            for drafts, rows in ((0, 7), (5, max(7, 3 * config.dspark_block_size))):  # 3 sequences' draft blocks
                pool = CacheStorage(config, device=torch.device("meta"), **sizes | {"drafts": drafts}).windows.pool
                staged = pool[:, :1].nbytes * rows
                assert staging_bytes(config, kv_format, 7, drafts=drafts, max_num_seqs=3) == staged


def test_the_real_model_has_the_bytes_of_the_specification():
    assert block_bytes(flash(), "packed") == 113_920
    assert window_entry_bytes(flash(), "packed") == 40 * 128 * 528
    assert ring_rows(flash(), 5) == 134


def test_formats_that_would_round_a_float32_model_are_refused_with_what_works(model):
    for kv_format in ("packed", "bfloat16"):
        with pytest.raises(ValueError, match='keeps unrounded records; use kv_format "float32", or dtype "bfloat16"'):
            storage_for(model, kv_format=kv_format)
    assert format_problem("packed", torch.bfloat16) is None
    with pytest.raises(ValueError, match="kv_format: 'fp3' is not one of float32, bfloat16, packed"):
        storage_for(model, kv_format="fp3")
    for name, value in (("drafts", 6), ("window_entries", -1), ("drafts", -1)):
        with pytest.raises(ValueError, match=name):
            storage_for(model, **{name: value})
    with pytest.raises(ValueError, match="num_blocks"):
        CacheStorage(tiny(), max_num_seqs=1, num_blocks=0, device=torch.device("cpu"))
