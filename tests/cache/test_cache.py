"""Blocks and slots never leak, whatever the order of calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache import BLOCK_TOKENS, Cache, CacheFullError, blocks_for
from deepinfer.cache.edits import SetLength
from deepinfer.model.presets import tiny

BLOCKS, SEQS = 12, 4


def make() -> Cache:
    config = dataclasses.replace(tiny(), max_position_embeddings=8 * BLOCK_TOKENS)
    return Cache(config, max_num_seqs=SEQS, num_blocks=BLOCKS, device=torch.device("cpu"))


class CacheMachine(RuleBasedStateMachine):
    """Random opens, growth, forks and closes against a plain model of who owns how much."""

    def __init__(self):
        super().__init__()
        self.cache = make()
        self.open: list[int] = []

    @rule()
    def open_slot(self):
        if len(self.open) == SEQS:
            with pytest.raises(CacheFullError):
                self.cache.open()
        else:
            self.open.append(self.cache.open())

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99), tokens=st.integers(0, 9 * BLOCK_TOKENS))
    def grow(self, pick, tokens):
        slot = self.open[pick % len(self.open)]
        free = self.cache.num_free_blocks
        try:
            self.cache.reserve(slot, tokens)
        except CacheFullError:
            assert self.cache.num_free_blocks == free  # nothing changed
        except ValueError:
            assert tokens > 8 * BLOCK_TOKENS

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick):
        try:
            self.open.append(self.cache.fork(self.open[pick % len(self.open)]))
        except CacheFullError:
            assert len(self.open) == SEQS or self.cache.num_free_blocks == 0

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99))
    def close(self, pick):
        slot = self.open.pop(pick % len(self.open))
        self.cache.close(slot)
        with pytest.raises(ValueError, match="not open"):
            self.cache.close(slot)

    @invariant()
    def nothing_is_lost(self):
        self.cache.check_integrity()
        assert self.cache.num_free_slots == SEQS - len(self.open)

    def teardown(self):
        for slot in self.open:
            self.cache.close(slot)
        assert self.cache.num_free_blocks == BLOCKS


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestNothingLeaksWhateverTheOrder = CacheMachine.TestCase


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)])
def test_block_counts_at_the_borders(tokens, blocks):
    assert blocks_for(tokens) == blocks


def test_a_broken_reference_count_is_found():
    cache = make()
    slot = cache.open()
    cache.reserve(slot, 1)
    cache.manager._pool.references[5] += 1
    with pytest.raises(RuntimeError, match=r"blocks \[5\]"):
        cache.check_integrity()
    cache.manager._pool.references[5] -= 1
    cache.close(slot)


def test_a_device_that_missed_an_order_is_found():
    cache = make()
    slot = cache.open()
    cache.manager.reserve(slot, 200)  # past the facade, so the device is not told
    with pytest.raises(RuntimeError, match="the device's table differs from the host's"):
        cache.check_integrity()
    cache.storage.apply(cache.manager.take_edits())
    cache.check_integrity()
    cache.close(slot)


def test_a_fork_has_its_own_open_block_and_shares_the_full_ones():
    cache = make()
    slot = cache.open()
    cache.reserve(slot, 300)
    cache.storage.apply([SetLength(slot, 300, ())])
    child = cache.fork(slot)
    tables = [cache.storage.tables[s, :3].tolist() for s in (slot, child)]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    assert cache.length(child) == 300
    cache.close(slot)
    assert cache.num_free_blocks == BLOCKS - 3
    cache.close(child)


@pytest.mark.parametrize("call", ["length", "fork", "close"])
def test_a_closed_slot_is_named(call):
    cache = make()
    cache.close(cache.open())
    with pytest.raises(ValueError, match="slot 0 is not open"):
        getattr(cache, call)(0)


def test_a_cache_without_room_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match="num_blocks: must be a whole number >= 1"):
        Cache(tiny(), max_num_seqs=1, num_blocks=0, device=torch.device("cpu"))
