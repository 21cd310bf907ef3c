"""Prefill leaves rows out of the last layers, and nobody can tell from the logits that masks would have given."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from yoco import Bounds, Masks, cold_slot, draw_tokens, feed, masked_full, same_logits

from deepinfer.cache.storage import CacheStorage
from deepinfer.model import Batch, Chunk, load_model
from deepinfer.model.presets import flash, tiny
from deepinfer.model.truncation import least_keep_tokens, truncation_problem

KEEP = 28  # window 16 + 2 x 6, as 140 is 128 + 2 x 6
AFTER = 5  # tokens decoded behind the prompt, and compared, too
CASES = settings(max_examples=20, deadline=None)


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Path):
    return load_model(tiny_checkpoint)


@functools.cache
def ids(length: int) -> list[int]:
    return draw_tokens(1, 400)[:length]


@functools.cache
def expected(model, length: int, keep: int = KEEP, after: int = AFTER) -> torch.Tensor:
    """Logits of the prompt's last token and of those decoded after it."""
    return masked_full(model, ids(length + after), Masks(keep_from=max(0, length - keep)), after + 1)


def storage_for(model, **options) -> CacheStorage:
    return CacheStorage.for_model(model, max_num_seqs=3, num_blocks=12, **options)


def decode(model, storage, slot: int, length: int, after: int = AFTER) -> list[torch.Tensor]:
    """The tokens after a prompt of this length, one step each."""
    return [model.forward([Chunk(slot, i, [ids(length + after)[i]])], storage) for i in range(length, length + after)]


def truncated(model, length: int, cuts, *, keep: int = KEEP, mates=(), **options) -> torch.Tensor:
    storage = storage_for(model, **options)
    cold_slot(storage, 1, length + AFTER)
    if mates:
        cold_slot(storage, 0, 400, first_block=6)
    prefill = feed(model, storage, 1, ids(length), cuts, bounds=Bounds(keep_from=max(0, length - keep)), mates=mates)
    return torch.cat([prefill, *decode(model, storage, 1, length)])


# The specification's lengths with the window and the keep set of the tiny model: around 16 = W, 22, 28 = K, 128 = a
# block, and where the candidate filter leaves entries out.
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 21, 22, 23, 27, 28, 29, 30, 43, 44, 45, 127, 128, 129, 156, 300])
def test_a_truncated_prompt_gives_the_logits_of_a_masked_one(model, length):
    same_logits(model, truncated(model, length, ()), expected(model, length))


@CASES
@given(
    length=st.integers(1, 300),
    cuts=st.lists(st.integers(1, 300), max_size=6),
    near=st.lists(st.integers(-30, 3), max_size=4),
    strangers=st.booleans(),
)
def test_cuts_anywhere_and_batch_mates_do_not_change_a_truncated_prompt(model, length, cuts, near, strangers):
    mates = []
    if strangers:  # a prompt that is truncated elsewhere, then one that is not
        far = draw_tokens(2, 400)
        mates = [Chunk(0, 0, far[:37], 0, keep_from=30), Chunk(0, 37, far[37:38], 1), Chunk(0, 38, far[38:120], 0)]
    got = truncated(model, length, [*cuts, *(length + offset for offset in near)], mates=mates)
    same_logits(model, got, expected(model, length))


@pytest.mark.parametrize("cut", range(100 - KEEP - 3, 100 - KEEP + 4))
def test_chunks_that_end_around_the_first_kept_row_give_the_same(model, cut):
    same_logits(model, truncated(model, 100, [cut]), expected(model, 100))


@pytest.mark.parametrize("keep", [22, 23, 64, 1000])
def test_keep_sets_of_any_size_from_the_floor_on_equal_their_masks(model, keep):
    same_logits(model, truncated(model, 150, [90, 140], keep=keep), expected(model, 150, keep))


def test_keeping_everything_is_the_full_model(model):
    storage = storage_for(model)
    cold_slot(storage, 0, 150)
    full = model.forward([Chunk(0, 0, ids(150), 1)], storage)
    same_logits(model, truncated(model, 150, [90], keep=150)[:1], full)
    assert not torch.equal(truncated(model, 150, [90])[:1], full)  # the masks do hide something


def test_a_chunk_before_the_kept_rows_ends_at_the_last_kv_source(model):
    """Its rows cost the layers up to there, and none of those after."""
    storage, seen = storage_for(model), {}
    cold_slot(storage, 0, 300)
    model.trace = lambda name, value: seen.setdefault(name, len(value))
    try:
        assert model.forward([Chunk(0, 0, ids(100), 0, keep_from=272)], storage).shape == (0, model.config.vocab_size)
        last = max(model.config.kv_source_layer_ids)
        assert seen[f"layers.{last}.stream_in"] == seen[f"layers.{last}.compressed_kv"] == 100
        assert not any(name.startswith(f"layers.{last + 1}.") or name == "final_hidden" for name in seen)
        assert f"layers.{last}.ffn_in" not in seen
        seen.clear()
        model.forward([Chunk(0, 100, ids(300)[100:], 1, keep_from=272)], storage)
        assert seen[f"layers.{last}.stream_in"] == seen[f"layers.{last}.compressed_kv"] == 200
        assert seen[f"layers.{last}.ffn_in"] == seen[f"layers.{last + 1}.stream_in"] == seen["final_hidden"] == KEEP
    finally:
        model.trace = None


def test_rejected_drafts_after_a_truncated_prompt_leave_no_trace(model):
    length, storage = 100, storage_for(model, drafts=5)
    cold_slot(storage, 1, length + AFTER)
    rows = [feed(model, storage, 1, ids(length), bounds=Bounds(keep_from=length - KEEP))]
    for position in range(length, length + AFTER):
        wrong = [7 + position, 8, 9, 10, 11]
        logits = model.forward([Chunk(1, position, [ids(length + AFTER)[position], *wrong], 6)], storage)
        rows.append(logits[:1])
        storage.truncate(1, position + 1)
    same_logits(model, torch.cat(rows), expected(model, length))


def test_image_tokens_on_both_sides_of_the_cut_are_treated_alike(model):
    picture = model.config.image_token_id
    prompt = [*ids(60), *[picture] * 30, *ids(100)[60:]]
    storage = storage_for(model)
    cold_slot(storage, 0, len(prompt))
    start = len(prompt) - 50  # 40 picture rows are left out, ten kept
    got = feed(model, storage, 0, prompt, [len(prompt) - 30], num_logits=20, bounds=Bounds(keep_from=start))
    same_logits(model, got, masked_full(model, prompt, Masks(keep_from=start), 20))


def test_logits_of_a_row_that_is_left_out_are_refused(model):
    with pytest.raises(ValueError, match=r"slot 0: logits are wanted from position 9 on.*keep_from = 10"):
        Batch.from_chunks([Chunk(0, 0, ids(12), 3, keep_from=10)], model.device)
    Batch.from_chunks([Chunk(0, 0, ids(12), 2, keep_from=10)], model.device)


def test_models_and_keep_sets_that_cannot_be_truncated_are_refused_with_what_can():
    assert truncation_problem(tiny(), KEEP) is None
    assert truncation_problem(flash(), 140) is None
    assert least_keep_tokens(flash()) == 134
    assert "use keep_tokens >= 134" in (truncation_problem(flash(), 133) or "")
    for layer in (20, 24):
        late = dataclasses.replace(flash(), engram_layer_ids=(1, layer))
        assert "Engram layer" in (truncation_problem(late) or "")
        assert "use truncation off" in (truncation_problem(late) or "")
