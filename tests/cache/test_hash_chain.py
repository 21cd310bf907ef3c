"""Two prompts share a block only when everything before its end, and everything that it depends on, is the same."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.cache.hashing import HashChain, namespace

NAMESPACE = namespace(b"model", "packed", 1)


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 129_280, count, dtype=np.int32)


def chain_of(token_ids, name: bytes = NAMESPACE, extras=None) -> HashChain:
    chain = HashChain(name)
    chain.extend(token_ids, extras)
    return chain


def test_the_hash_is_the_one_that_the_specification_spells_out():
    """SHA-256 cut to 16 bytes over the parent and 128 little-endian uint32; written out here with struct."""
    tokens = ids(300).tolist()
    parent = sha256(NAMESPACE).digest()[:16]
    expected = []
    for block in range(2):
        parent = sha256(parent + struct.pack("<128I", *tokens[128 * block : 128 * block + 128])).digest()[:16]
        expected.append(parent)
    assert chain_of(np.array(tokens, np.int32)).hashes == expected


def test_another_process_gets_the_same_hashes():
    program = (
        "import numpy as np; from deepinfer.cache.hashing import *\n"
        "chain = HashChain(namespace('digest', 'float32', 3, 'salt')); chain.extend(np.arange(256, dtype=np.int32))\n"
        "print(chain.hashes[-1].hex())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert chain_of(np.arange(256), namespace("digest", "float32", 3, "salt")).hashes[-1].hex() == other


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 0), (127, 0), (128, 1), (129, 1), (255, 1), (256, 2)])
def test_only_full_blocks_have_a_hash(tokens, blocks):
    assert len(chain_of(ids(tokens)).hashes) == blocks


@given(st.lists(st.integers(0, 700), max_size=8))
def test_tokens_that_come_in_pieces_give_the_hashes_of_the_whole(ends):
    tokens = ids(700)
    chain = HashChain(NAMESPACE)
    for end in sorted(ends):
        chain.extend(tokens[:end])
    chain.extend(tokens)
    assert chain.hashes == chain_of(tokens).hashes


@given(position=st.integers(0, 639))
def test_one_changed_token_changes_its_block_and_all_after_it_and_none_before(position):
    tokens = ids(640)
    changed = tokens.copy()
    changed[position] += 1
    same = [a == b for a, b in zip(chain_of(tokens).hashes, chain_of(changed).hashes, strict=True)]
    assert same == [block < position // 128 for block in range(5)]


def test_swapped_blocks_are_another_prompt():
    tokens = ids(256)
    swapped = np.concatenate((tokens[128:], tokens[:128]))
    assert not set(chain_of(tokens).hashes) & set(chain_of(swapped).hashes)


def test_every_part_of_the_namespace_matters():
    names = {
        namespace(b"model", "packed", 1),
        namespace(b"other", "packed", 1),
        namespace(b"model", "float32", 1),
        namespace(b"model", "packed", 2),
        namespace(b"model", "packed", 1, "tenant"),
        namespace(b"modelp", "acked", 1),  # the same letters, cut elsewhere
        namespace(b"model", "packed", 1, "\ud800"),  # a salt from JSON may hold a lone surrogate
    }
    assert len(names) == 7
    assert len({chain_of(ids(128), name).hashes[0] for name in names}) == 7
    assert namespace("model", "packed", 1) == namespace(b"model", "packed", 1)


def test_a_picture_in_a_block_changes_that_block_and_all_after_it():
    tokens = ids(512)
    plain, cat, dog = (chain_of(tokens, extras=extras).hashes for extras in (None, {2: b"cat"}, {2: b"dog"}))
    assert plain[:2] == cat[:2] == dog[:2]
    for block in (2, 3):
        assert len({plain[block], cat[block], dog[block]}) == 3
    chain = HashChain(NAMESPACE)
    for end in (200, 300, 400, 512):  # extras are named by the block's number in the sequence, not in the call
        chain.extend(tokens[:end], {2: b"cat"})
    assert chain.hashes == cat


def test_a_copy_goes_its_own_way():
    tokens = ids(256)
    parent = chain_of(tokens)
    child = parent.copy()
    parent.extend(np.concatenate((tokens, ids(128, seed=1))))
    child.extend(np.concatenate((tokens, ids(128, seed=2))))
    assert parent.hashes[:2] == child.hashes[:2] and parent.hashes[2] != child.hashes[2]
    assert parent.root == child.root


def test_the_type_of_the_ids_does_not_matter():
    tokens = ids(256)
    assert chain_of(tokens).hashes == chain_of(tokens.tolist()).hashes == chain_of(tokens.astype(np.int64)).hashes
    assert chain_of(np.repeat(tokens, 2)[::2]).hashes == chain_of(tokens).hashes  # not contiguous in memory


def test_digest_names_a_length_in_tokens():
    chain = chain_of(ids(400))
    assert [chain.digest(n) for n in (0, 128, 384)] == [chain.root, chain.hashes[0], chain.hashes[2]]
    with pytest.raises(IndexError):
        chain.digest(512)


def test_random_prompts_do_not_collide():
    generator = random.Random(0)
    prompts = {tuple(generator.choices(range(4), k=128)) for _ in range(2000)}
    assert len({chain_of(prompt).hashes[0] for prompt in prompts}) == len(prompts)
