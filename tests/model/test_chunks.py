"""Cut a prompt anywhere, feed it among strangers, fork it: the logits stay the same."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache import Cache
from deepinfer.kernels import select
from deepinfer.model import Chunk, load_model

LENGTH = 300  # past the window (16), past index_topk and the candidate filter at both ratios, and two block borders
CASES = settings(max_examples=15, deadline=None)


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Path):
    return load_model(tiny_checkpoint)


@functools.cache
def tokens(seed: int, count: int = LENGTH) -> list[int]:
    return torch.randint(3, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model, cuts: list[int], strangers: bool = False) -> torch.Tensor:
    """Logits of every position, the prompt fed in pieces that end at `cuts`."""
    cache = Cache.for_model(model, max_num_seqs=4, num_blocks=32)
    slot, other = cache.open(), cache.open()
    cache.reserve(slot, LENGTH)
    cache.reserve(other, 2 * LENGTH)
    rows, start, far = [], 0, 0
    for end in [*sorted(set(cuts)), LENGTH]:
        if end <= start:
            continue
        chunks = [Chunk(slot, start, tokens(1)[start:end], end - start)]
        if strangers:
            mates = tokens(2, 2 * LENGTH)[far : far + 1 + (end - start) // 3]
            chunks.insert(0, Chunk(other, far, mates, 0))
            far += len(mates)
        rows.append(model.forward(chunks, cache))
        start = end
    cache.check_integrity()
    return torch.cat(rows)


@functools.cache
def whole(model) -> torch.Tensor:
    return run(model, [])


def same(model, got: torch.Tensor) -> None:
    """Bit for bit where the CPU kernels run; 1e-5 of the largest logit on the reference path (other orders of sums)."""
    expected = whole(model)
    if select.cpu_twins(model.device, model.numerics.dtype):
        assert torch.equal(got, expected)
    else:
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@CASES
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=12), strangers=st.booleans())
def test_chunk_cuts_anywhere_give_the_same_logits(model, cuts, strangers):
    same(model, run(model, cuts, strangers))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 127, 128, 129])
def test_chunk_sizes_at_the_borders_give_the_same_logits(model, size):
    same(model, run(model, list(range(size, LENGTH, size))))


@pytest.mark.parametrize("lengths", [(4, 4, 4), (6, 1, 6), (2, 5, 2), (6, 40, 6), (1, 3, 7)])
def test_rows_of_verify_steps_do_not_depend_on_who_verifies_beside_them(model, lengths):
    """Contexts of different lengths, whose rows are scored together where they are equally many."""
    starts = (250, 31, 140)  # with and without more entries than are chosen

    def step(members: tuple[int, ...]) -> list[torch.Tensor]:
        cache, chunks = Cache.for_model(model, max_num_seqs=4, num_blocks=32), []
        for i in members:
            slot = cache.open()
            cache.reserve(slot, LENGTH)
            ids = tokens(1 + i)[: starts[i] + lengths[i]]
            model.forward([Chunk(slot, 0, ids[: starts[i]], 0)], cache)
            chunks.append(Chunk(slot, starts[i], ids[starts[i] :], lengths[i]))
        return list(model.forward(chunks, cache).split([lengths[i] for i in members]))

    for i, got in enumerate(step((0, 1, 2))):
        (alone,) = step((i,))
        if select.cpu_twins(model.device, model.numerics.dtype):
            assert torch.equal(got, alone)
        else:
            assert (got - alone).abs().max() <= 1e-5 * alone.abs().max()


@settings(max_examples=6, deadline=None)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), min_size=1, max_size=4))
def test_chunk_cuts_on_the_reference_path_stay_within_its_tolerance(model, cuts):
    with select.reference_only():
        got = run(model, cuts)
    assert (got - whole(model)).abs().max() <= 1e-4 * whole(model).abs().max()


def test_chunks_of_a_fork_continue_like_the_original(model):
    cache = Cache.for_model(model, max_num_seqs=3, num_blocks=16)
    slot = cache.open()
    cache.reserve(slot, LENGTH)
    model.forward([Chunk(slot, 0, tokens(1)[:201], 0)], cache)
    child = cache.fork(slot)
    cache.reserve(child, LENGTH)
    rest = tokens(1)[201:]
    detour = model.forward([Chunk(slot, 201, tokens(2)[:99], 99)], cache)  # the parent goes elsewhere first
    got = model.forward([Chunk(child, 201, rest, 99)], cache)
    same(model, torch.cat((whole(model)[:201], got)))
    assert not torch.equal(detour, got)
    cache.check_integrity()


def test_a_chunk_that_does_not_continue_its_sequence_is_refused(model):
    cache = Cache.for_model(model, max_num_seqs=2, num_blocks=4)
    slot = cache.open()
    cache.reserve(slot, 10)
    with pytest.raises(ValueError, match="chunk starts at 3, 0 tokens are written"):
        model.forward([Chunk(slot, 3, [5], 1)], cache)
    with pytest.raises(ValueError, match="no blocks reserved"):
        model.forward([Chunk(slot, 0, tokens(1)[:200], 1)], cache)
    with pytest.raises(ValueError, match="token ids must be in"):
        model.forward([Chunk(slot, 0, [model.config.vocab_size], 1)], cache)
    with pytest.raises(ValueError, match="at most one chunk"):
        model.forward([Chunk(slot, 0, [5], 1), Chunk(slot, 1, [5], 1)], cache)
    assert cache.length(slot) == 0


def test_weights_kept_as_stored_give_the_logits_of_widened_ones(tiny_checkpoint, model):
    with select.reference_only():
        stored, wide = load_model(tiny_checkpoint, weights="stored"), load_model(tiny_checkpoint, weights="wide")
        assert torch.equal(run(stored, [100]), run(wide, [100]))
