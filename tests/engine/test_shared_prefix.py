"""Who computes a prefix that a waiting request needs, and how much two prompts have in common."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.cache.hashing import HashChain, namespace
from deepinfer.config import BLOCK_SIZE
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.shared_prefix import SharedPrefixes

PROMPT = np.arange(10 * BLOCK_SIZE, dtype=np.int32)
MOST = len(PROMPT)


def sequence_of(tokens: np.ndarray, salt: str = "") -> Sequence:
    """As the core makes it: hashed as far as its prompt has full blocks."""
    chain = HashChain(namespace("model", "float32", 1, salt))
    chain.extend(tokens)
    request = EngineRequest(
        number=0, request_id="r", prompt_token_ids=tokens, params=SamplingParams(), max_tokens=1, salt=salt
    )
    return Sequence(
        request, index=0, seed=0, arrival=0.0, limit=len(tokens) + 1, chain=chain, token_ids=tokens, siblings=[]
    )


def with_other_token(position: int, length: int = MOST) -> np.ndarray:
    changed = PROMPT[:length].copy()
    changed[position] += 1
    return changed


def owners(prefixes: SharedPrefixes, sequence: Sequence) -> list[Sequence | None]:
    """Of every full block of its prompt."""
    return [prefixes.owner(sequence, block) for block in range(len(sequence.chain.hashes))]


# -- who computes it --------------------------------------------------------------------------------------------------


def test_nobody_computes_what_nobody_announced() -> None:
    prefixes, sequence = SharedPrefixes(), sequence_of(PROMPT)
    assert prefixes.is_empty() and owners(prefixes, sequence) == [None] * 10


def test_a_prefix_under_way_can_be_waited_for() -> None:
    prefixes, first, second = SharedPrefixes(), sequence_of(PROMPT), sequence_of(with_other_token(4 * BLOCK_SIZE))
    prefixes.announce(first, 0)
    assert not prefixes.is_empty()
    assert owners(prefixes, first) == [first] * 10
    assert owners(prefixes, second) == [first] * 4 + [None] * 6  # its own part: nobody to wait for
    assert prefixes.common_tokens(first, second) == 4 * BLOCK_SIZE
    prefixes.withdraw(first)
    assert prefixes.is_empty() and owners(prefixes, second) == [None] * 10


@pytest.mark.parametrize("announced, waiting", [(3, 10), (10, 3), (3, 3), (0, 10), (10, 0)])
def test_prompts_of_different_lengths_share_the_blocks_that_both_have(announced: int, waiting: int) -> None:
    prefixes = SharedPrefixes()
    first, second = sequence_of(PROMPT[: announced * BLOCK_SIZE + 1]), sequence_of(PROMPT[: waiting * BLOCK_SIZE + 5])
    prefixes.announce(first, 0)
    shared = min(announced, waiting)
    assert owners(prefixes, second) == [first] * shared + [None] * (waiting - shared)
    assert prefixes.common_tokens(first, second) == prefixes.common_tokens(second, first) == shared * BLOCK_SIZE
    prefixes.withdraw(first)
    assert prefixes.is_empty()


def test_a_block_beyond_the_end_of_the_prompt_has_no_owner() -> None:
    prefixes, first, short = SharedPrefixes(), sequence_of(PROMPT), sequence_of(PROMPT[: 2 * BLOCK_SIZE])
    prefixes.announce(first, 0)
    assert [prefixes.owner(short, block) for block in (1, 2, 9)] == [first, None, None]
    assert prefixes.owner(first, 10) is None


def test_blocks_that_the_cache_already_has_are_not_announced() -> None:
    prefixes, sequence = SharedPrefixes(), sequence_of(PROMPT)
    prefixes.announce(sequence, 4)
    assert owners(prefixes, sequence) == [None] * 4 + [sequence] * 6
    prefixes.withdraw(sequence)
    prefixes.announce(sequence, 10)  # a hit up to the last full block
    assert owners(prefixes, sequence) == [None] * 10 and not prefixes.is_empty()
    prefixes.withdraw(sequence)
    assert prefixes.is_empty()


def test_requests_of_different_salts_never_wait_for_each_other() -> None:
    prefixes = SharedPrefixes()
    alice, bob, nobody = sequence_of(PROMPT, "alice"), sequence_of(PROMPT, "bob"), sequence_of(PROMPT)
    prefixes.announce(alice, 0)
    assert owners(prefixes, bob) == owners(prefixes, nobody) == [None] * 10
    assert prefixes.common_tokens(alice, bob) == prefixes.common_tokens(alice, nobody) == 0
    prefixes.announce(bob, 0)
    assert owners(prefixes, sequence_of(PROMPT, "alice")) == [alice] * 10
    assert owners(prefixes, sequence_of(PROMPT, "bob")) == [bob] * 10
    prefixes.withdraw(alice)
    assert owners(prefixes, bob) == [bob] * 10


def test_equal_tokens_behind_different_ones_are_not_the_same_block() -> None:
    prefixes, first, second = SharedPrefixes(), sequence_of(PROMPT), sequence_of(with_other_token(0))
    prefixes.announce(first, 0)
    assert owners(prefixes, second) == [None] * 10
    assert prefixes.common_tokens(first, second) == 0


# -- two who compute the same -----------------------------------------------------------------------------------------


def test_of_two_announcers_of_one_block_the_first_is_waited_for() -> None:
    prefixes, first, second = SharedPrefixes(), sequence_of(PROMPT[: 6 * BLOCK_SIZE]), sequence_of(PROMPT)
    prefixes.announce(first, 0)
    prefixes.announce(second, 2)
    assert owners(prefixes, second) == [first] * 6 + [second] * 4
    prefixes.withdraw(first)
    assert owners(prefixes, second) == [None] * 6 + [second] * 4  # published by now, or given up
    prefixes.withdraw(second)
    assert prefixes.is_empty()


def test_the_second_announcer_s_end_takes_nothing_from_the_first() -> None:
    prefixes, first, second = SharedPrefixes(), sequence_of(PROMPT[: 6 * BLOCK_SIZE]), sequence_of(PROMPT)
    prefixes.announce(first, 0)
    prefixes.announce(second, 0)
    prefixes.withdraw(second)
    assert owners(prefixes, second) == [first] * 6 + [None] * 4
    prefixes.withdraw(first)
    assert prefixes.is_empty()


def test_what_an_aborted_prefill_had_announced_can_be_announced_by_the_next() -> None:
    prefixes, first, second = SharedPrefixes(), sequence_of(PROMPT), sequence_of(PROMPT)
    prefixes.announce(first, 0)
    prefixes.withdraw(first)
    prefixes.announce(second, 0)
    prefixes.withdraw(first)  # once more, as a sequence does that ends after its prefill: nothing of the second's
    assert owners(prefixes, first) == [second] * 10
    prefixes.withdraw(second)
    prefixes.withdraw(second)
    assert prefixes.is_empty()


def test_withdrawing_what_was_never_announced_changes_nothing() -> None:
    prefixes, first = SharedPrefixes(), sequence_of(PROMPT)
    prefixes.withdraw(first)
    assert prefixes.is_empty()
    prefixes.announce(first, 0)
    prefixes.withdraw(sequence_of(PROMPT))  # another request with the same prompt
    assert owners(prefixes, first) == [first] * 10


def test_blocks_hashed_after_the_announcement_are_withdrawn_with_nothing_left() -> None:
    prefixes, sequence = SharedPrefixes(), sequence_of(PROMPT[: 3 * BLOCK_SIZE])
    prefixes.announce(sequence, 0)
    sequence.chain.extend(PROMPT)  # generated meanwhile
    assert owners(prefixes, sequence) == [sequence] * 3 + [None] * 7
    prefixes.withdraw(sequence)
    assert prefixes.is_empty()


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, MOST), st.integers(0, MOST - 1), st.sampled_from(["", "", "", "b"])),
        min_size=2,
        max_size=5,
    ),
    calls=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10)), max_size=30),
)
def test_an_owner_always_runs_and_computes_that_block_whatever_the_order(prompts, calls) -> None:
    """A call starts a prefill that does not run, from some block on, or ends one that does."""
    prefixes = SharedPrefixes()
    sequences = [sequence_of(with_other_token(position, 1 + max(n, position)), salt) for n, position, salt in prompts]
    started: dict[Sequence, int] = {}
    for number, first_block in calls:
        sequence = sequences[number % len(sequences)]
        if sequence in started:
            prefixes.withdraw(sequence)
            del started[sequence]
        else:
            running = owners(prefixes, sequence)
            prefixes.announce(sequence, first_block)
            started[sequence] = first_block
            # whoever was waited for still is, and all the rest is its own
            missing = [None] * min(first_block, len(running)) + [sequence] * max(0, len(running) - first_block)
            assert owners(prefixes, sequence) == [a or b for a, b in zip(running, missing, strict=True)]
        for one in sequences:
            for block, owner in enumerate(owners(prefixes, one)):
                if owner is not None:
                    assert started[owner] <= block and owner.chain.hashes[block] == one.chain.hashes[block]
    for sequence in started:
        prefixes.withdraw(sequence)
    assert prefixes.is_empty()


# -- how much is common -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, blocks",
    [(0, 0), (1, 0), (127, 0), (128, 1), (129, 1), (255, 1), (256, 2), (1151, 8), (1152, 9), (1279, 9)],
)
def test_only_full_blocks_are_common(tokens: int, blocks: int) -> None:
    one, other = sequence_of(PROMPT), sequence_of(with_other_token(tokens))
    assert SharedPrefixes.common_tokens(one, other) == SharedPrefixes.common_tokens(other, one) == blocks * BLOCK_SIZE
    if tokens:
        assert SharedPrefixes.common_tokens(one, sequence_of(PROMPT[:tokens])) == blocks * BLOCK_SIZE


def test_a_prompt_has_all_its_full_blocks_in_common_with_itself() -> None:
    for length in (1, 128, 300, MOST):
        one, other = sequence_of(PROMPT[:length]), sequence_of(PROMPT[:length])
        assert SharedPrefixes.common_tokens(one, other) == SharedPrefixes.common_tokens(one, one)
        assert SharedPrefixes.common_tokens(one, one) == length // BLOCK_SIZE * BLOCK_SIZE


near_a_border = st.builds(
    lambda block, off: min(max(block * BLOCK_SIZE + off, 0), MOST - 1), st.integers(0, 10), st.integers(-1, 1)
)
positions = near_a_border | st.integers(0, MOST - 1)


@given(
    lengths=st.tuples(positions, positions).map(lambda pair: [1 + n for n in pair]),
    changed=st.sets(positions, max_size=3),
    salts=st.sampled_from([("", ""), ("", ""), ("", ""), ("b", "b"), ("", "b")]),
)
def test_common_tokens_are_those_that_a_comparison_token_by_token_finds(lengths, changed, salts) -> None:
    """Lengths and changed tokens anywhere, and often at the ends of blocks."""
    tokens, others = PROMPT[: lengths[0]].copy(), PROMPT[: lengths[1]].copy()
    others[[position for position in changed if position < lengths[1]]] += 1
    equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens.tolist(), others.tolist(), strict=False))))
    expected = equal // BLOCK_SIZE * BLOCK_SIZE if salts[0] == salts[1] else 0
    one, other = sequence_of(tokens, salts[0]), sequence_of(others, salts[1])
    assert SharedPrefixes.common_tokens(one, other) == expected
    assert SharedPrefixes.common_tokens(other, one) == expected
