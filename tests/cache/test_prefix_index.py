"""How much of a prompt is found again, and where its computation starts."""

from __future__ import annotations

import numpy as np
import prefix_index  # benchmarks/
import pytest

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.events import EventBuffer
from deepinfer.cache.hashing import HashChain, namespace
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.prefix import PrefixIndex, ReplayPolicy
from deepinfer.cache.prefix_cache import CacheStats, PrefixCache

WINDOW, LAYERS = 128, 3
EXACT_REPLAY = 382  # 3 x 127 = 381, and even
# every length at which a block, the cap (134 below the prompt) or the replay (one block) begins to matter
BORDERS = [0, 1, 127, 128, 129, 133, 134, 255, 256, 257, 261, 262, 383, 384, 385, 389, 390, 391, 517, 518, 519, 800]


def tokens_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)


def chain_of(tokens: np.ndarray, salt: str = "") -> HashChain:
    chain = HashChain(namespace("model", "float32", 1, salt))
    chain.extend(tokens)
    return chain


def make(mode: str = "bounded", **changes) -> CacheManager:
    sizes = {"max_num_seqs": 4, "num_blocks": 32, "table_width": 16, "window": WINDOW, "num_layers": LAYERS}
    return CacheManager(**(sizes | {"window_entries": 8, "lookback": 3, "prefix_caching": mode} | changes))


def compute(cache: CacheManager, tokens: np.ndarray, windows=(), salt: str = "") -> HashChain:
    """A sequence comes, is computed, leaves windows at these boundaries, and goes."""
    chain, slot = chain_of(tokens, salt), cache.open()
    cache.reserve(slot, len(tokens))
    cache.publish(slot, chain, len(tokens))
    for boundary in windows:
        cache.save_window(slot, chain, boundary)
    cache.close(slot)
    return chain


# -- how much is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", BORDERS)
def test_a_hit_ends_at_least_134_below_the_prompt_and_at_a_block(known):
    cache, tokens = make(), tokens_of(1024)
    compute(cache, tokens, windows=range(128, 1025, 128))
    hit = cache.find(chain_of(tokens[:known]), known)
    longest = max((n for n in range(0, known + 1, 128) if n + 134 <= known), default=0)
    assert (hit.length, hit.replay_start, hit.replay_tokens) == (longest, longest, 0)
    assert len(hit.blocks) * 128 == longest
    assert (hit.length > 0) == (known >= 262)


@pytest.mark.parametrize("known", BORDERS)
def test_without_a_window_one_window_is_replayed_and_less_than_two_blocks_are_cold(known):
    cache, tokens = make(), tokens_of(1024)
    compute(cache, tokens)
    hit = cache.find(chain_of(tokens[:known]), known)
    if known < 390:
        assert hit == (0, 0, None, ())
    else:
        assert hit.length == (known - 134) // 128 * 128
        assert (hit.replay_start, hit.window_entry) == (hit.length - 128, None)


@pytest.mark.parametrize("known", BORDERS)
def test_exact_mode_replays_the_cone_of_all_layers(known):
    cache, tokens = make("exact"), tokens_of(1024)
    compute(cache, tokens)
    hit = cache.find(chain_of(tokens[:known]), known)
    length = max(0, known - 134) // 128 * 128
    if length <= EXACT_REPLAY:
        assert hit == (0, 0, None, ())
    else:
        assert (hit.length, hit.replay_start) == (length, length - EXACT_REPLAY)


def test_the_cap_follows_the_model_s_window():
    cache, tokens = make(window=16), tokens_of(512)
    compute(cache, tokens, windows=(128, 256, 384))
    lengths = {known: cache.find(chain_of(tokens[:known]), known).length for known in (149, 150, 277, 278, 512)}
    assert lengths == {149: 0, 150: 128, 277: 128, 278: 256, 512: 384}
    cold_windows = make(window=16)
    compute(cold_windows, tokens)
    assert cold_windows.find(chain_of(tokens[:150]), 150)[:3] == (128, 112, None)


def test_the_cone_is_even_and_covers_every_layer():
    assert [ReplayPolicy("exact", 128, layers).replay_tokens for layers in (1, 2, 8, 40)] == [128, 254, 1016, 5080]
    assert [ReplayPolicy("bounded", 128, layers).replay_tokens for layers in (1, 40)] == [128, 128]
    assert ReplayPolicy("exact", 16, 8).replay_tokens == 120


def test_a_prompt_that_shares_127_tokens_shares_nothing():
    cache, tokens = make(), tokens_of(1024)
    compute(cache, tokens, windows=range(128, 1025, 128))
    for shared, length in ((127, 0), (128, 128), (255, 128), (256, 256)):
        other = np.concatenate((tokens[:shared], tokens_of(1000, seed=9)))
        other[shared] = tokens[shared] + 1
        assert cache.find(chain_of(other), len(other)).length == length


@pytest.mark.parametrize("block", range(6))
def test_one_changed_token_cuts_the_hit_at_its_block(block):
    cache, tokens = make(), tokens_of(1024)
    compute(cache, tokens, windows=range(128, 1025, 128))
    for position in (128 * block, 128 * block + 127):
        changed = tokens.copy()
        changed[position] += 1
        assert cache.find(chain_of(changed), 1024).length == 128 * block


def test_salts_keep_their_prefixes_to_themselves():
    cache, tokens = make(), tokens_of(800)
    compute(cache, tokens, salt="alice")
    assert cache.find(chain_of(tokens, "bob"), 800).length == 0
    assert cache.find(chain_of(tokens), 800).length == 0
    assert cache.find(chain_of(tokens, "alice"), 800).length == 640


def test_generated_tokens_are_found_in_the_next_turn():
    cache, transcript = make(), tokens_of(900)
    chain, slot = HashChain(namespace("model", "float32", 1)), cache.open()
    for known in range(300, 701):  # a prompt of 300 tokens, then one token per step
        chain.extend(transcript[:known])
        cache.reserve(slot, known)
        cache.publish(slot, chain, known - 1)  # the newest token is known, its state is not written
    cache.close(slot)
    assert cache.find(chain_of(transcript), 900).length == 640


def test_off_finds_and_keeps_nothing():
    cache, tokens = make("off"), tokens_of(1024)
    chain, slot = chain_of(tokens), cache.open()
    cache.reserve(slot, 1024)
    cache.publish(slot, chain, 1024)
    assert not cache.save_window(slot, chain, 128) and not cache.has_window(chain.hashes[0])
    cache.close(slot)
    assert cache.find(chain, 1024) == (0, 0, None, ())
    assert cache.num_cached_blocks == 0 and cache.num_free_blocks == 32


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'on' is not one of off, exact, bounded"):
        make("on")


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_at_the_end_of_the_hit_saves_the_replay():
    cache, tokens = make("exact"), tokens_of(1024)
    chain = compute(cache, tokens, windows=(768,))
    hit = cache.find(chain, 768 + 134)
    assert (hit.length, hit.replay_start) == (768, 768) and hit.window_entry is not None
    assert cache.has_window(chain.digest(768)) and not cache.has_window(chain.digest(640))


@pytest.mark.parametrize("boundary, start", [(640, 640), (512, 512), (384, 386), (256, 386)])
def test_a_window_further_down_is_used_when_that_computes_less_than_the_replay(boundary, start):
    """The whole hit is 768 tokens, its replay would start at 768 - 382 = 386."""
    cache, tokens = make("exact"), tokens_of(1024)
    chain = compute(cache, tokens, windows=(boundary,))
    hit = cache.find(chain, 1000)
    assert hit.replay_start == start
    assert hit.length == (boundary if start == boundary else 768)


def test_of_two_equal_ways_the_stored_window_wins_because_it_is_exact():
    cache, tokens = make("bounded"), tokens_of(1024)
    chain = compute(cache, tokens, windows=(640,))
    hit = cache.find(chain, 1000)  # 768 - 128 = 640 = the replay's start
    assert (hit.length, hit.replay_start) == (640, 640) and hit.window_entry is not None


def test_a_window_helps_where_the_replay_would_begin_at_the_first_token():
    cache, tokens = make("exact"), tokens_of(1024)
    chain = compute(cache, tokens, windows=(128,))
    assert cache.find(chain, 390)[:2] == (128, 128)


def test_the_window_that_was_loaded_or_saved_last_stays():
    cache, tokens = make(window_entries=2), tokens_of(1024)
    chain = compute(cache, tokens, windows=(256, 384))
    slot = cache.open()
    cache.adopt(slot, cache.find(chain, 256 + 134), tokens[:390])  # uses the window at 256
    cache.close(slot)
    compute(cache, tokens, windows=(512,))
    assert [cache.has_window(chain.digest(n)) for n in (256, 384, 512)] == [True, False, True]
    compute(cache, tokens, windows=(256, 640))  # 256 is there already: asked for again, so it is used
    assert [cache.has_window(chain.digest(n)) for n in (256, 512, 640)] == [True, False, True]


def test_looking_a_window_up_does_not_count_as_use():
    cache, tokens = make(window_entries=2), tokens_of(1024)
    chain = compute(cache, tokens, windows=(256, 384))
    for _ in range(3):
        assert cache.find(chain, 390).window_entry is not None
    compute(cache, tokens, windows=(512,))
    assert not cache.has_window(chain.digest(256))


def test_a_window_is_stored_once():
    cache, tokens = make(), tokens_of(512)
    chain, slot = chain_of(tokens), cache.open()
    cache.reserve(slot, 512)
    assert cache.save_window(slot, chain, 256)
    assert not cache.save_window(slot, chain, 256)
    for boundary in (0, -128, 100, 640):
        with pytest.raises(ValueError, match="no window can be stored"):
            cache.save_window(slot, chain, boundary)
    assert cache.num_windows == 1
    cache.close(slot)


def test_a_window_whose_blocks_are_gone_is_useless_and_harmless():
    cache, tokens = make(num_blocks=8, table_width=8), tokens_of(1024)
    chain = compute(cache, tokens, windows=(768,))
    compute(cache, tokens_of(1024, seed=1))  # evicts everything
    assert cache.has_window(chain.digest(768))
    assert cache.find(chain, 1024) == (0, 0, None, ())
    compute(cache, tokens)
    assert cache.find(chain, 1000)[:2] == (768, 768)


def test_no_entries_no_windows():
    cache, tokens = make(window_entries=0), tokens_of(512)
    chain = compute(cache, tokens, windows=(256,))
    assert cache.num_windows == 0 and not cache.has_window(chain.digest(256))


# -- equal contents, holes --------------------------------------------------------------------------------------------


def test_two_who_computed_the_same_keep_a_block_each_and_either_may_go():
    cache, tokens = make(), tokens_of(600)
    chain, slots = chain_of(tokens), [cache.open(), cache.open()]
    for slot in slots:
        cache.reserve(slot, 600)
    for slot in slots:
        cache.publish(slot, chain, 600)
        cache.publish(slot, chain, 600)  # again: nothing changes
    first, second = (cache.table(slot).tolist() for slot in slots)
    assert not set(first) & set(second)
    assert cache.stats.blocks_published == 8
    cache.close(slots[0])
    assert cache.find(chain, 600).blocks == tuple(second[:3])  # those in use, so that the others can be evicted
    cache.close(slots[1])
    assert cache.num_cached_blocks == 8
    filler = cache.open()
    cache.reserve(filler, 16 * 128)
    cache.reserve(another := cache.open(), 12 * 128)  # all of 32 but 4: the first owner's blocks are gone
    assert cache.num_cached_blocks == 4
    assert cache.find(chain, 600).length == 384
    cache.close(filler)
    cache.close(another)


def test_what_was_evicted_ends_the_hit_and_comes_back_when_it_is_computed_again():
    cache, tokens = make(num_blocks=16), tokens_of(1024)
    chain = compute(cache, tokens)  # 8 cached, 8 free
    keeper = cache.open()
    cache.adopt(keeper, cache.find(chain, 600), tokens[:600])  # 3 blocks: 0, 1, 2 come to the end of the queue
    cache.close(keeper)
    filler = cache.open()
    cache.reserve(filler, 12 * 128)  # evicts 7, 6, 5, 4
    assert cache.find(chain, 1024).length == 512
    cache.reserve(filler, 13 * 128)  # evicts 3
    assert cache.find(chain, 1024).length == 384
    cache.close(filler)
    compute(cache, tokens[:640])  # 0 .. 4 again
    assert cache.find(chain, 1024).length == 640


def test_blocks_behind_a_hole_are_not_found():
    index, chain = PrefixIndex(), chain_of(tokens_of(640))
    parents = [chain.root, *chain.hashes]
    for block in (0, 1, 3, 4):
        index.add(10 + block, chain.hashes[block], parents[block])
    unused = np.zeros(20, np.int32)
    assert index.longest(chain.hashes, 5, unused) == [10, 11]
    assert index.longest(chain.hashes, 1, unused) == [10]
    index.add(12, chain.hashes[2], parents[2])
    assert index.longest(chain.hashes, 5, unused) == [10, 11, 12, 13, 14]


def test_a_block_cannot_stand_for_two_contents():
    index, chain = PrefixIndex(), chain_of(tokens_of(256))
    assert index.add(1, chain.hashes[0], chain.root)
    with pytest.raises(RuntimeError, match="block 1 already stands for other tokens"):
        index.add(1, chain.hashes[1], chain.hashes[0])


def test_tails_are_evicted_before_heads_and_old_prompts_before_new_ones():
    cache = make(num_blocks=16)
    old, new = tokens_of(1024), tokens_of(1024, seed=1)
    old_chain, new_chain = compute(cache, old), compute(cache, new)
    filler, lengths = cache.open(), []
    for blocks in range(1, 17):
        cache.reserve(filler, 128 * blocks)
        lengths.append((cache.find(old_chain, 4096).length // 128, cache.find(new_chain, 4096).length // 128))
    # a hit of one block alone is not worth a replay of one block
    assert [a for a, _ in lengths] == [7, 6, 5, 4, 3, 2, 0, 0] + [0] * 8
    assert [b for _, b in lengths] == [8] * 8 + [7, 6, 5, 4, 3, 2, 0, 0]
    cache.close(filler)


def test_a_hit_makes_an_old_prompt_young():
    cache = make(num_blocks=16)
    old, new = tokens_of(1024), tokens_of(1024, seed=1)
    old_chain, new_chain = compute(cache, old), compute(cache, new)
    slot = cache.open()
    cache.adopt(slot, cache.find(old_chain, 4096), old)
    cache.close(slot)
    filler = cache.open()
    cache.reserve(filler, 8 * 128)
    assert (cache.find(old_chain, 4096).length, cache.find(new_chain, 4096).length) == (1024, 0)
    cache.close(filler)


def test_what_was_adopted_is_not_evicted_by_the_reservation_that_follows():
    cache = make(num_blocks=10)
    tokens = tokens_of(1200)
    chain = compute(cache, tokens[:1024])  # 8 cached, 2 free
    chain.extend(tokens)
    slot, hit = cache.open(), cache.find(chain, 700)
    cache.adopt(slot, hit, tokens[:700])
    cache.reserve(slot, 1200)  # 10 blocks: 4 adopted, 2 free, 4 evicted
    assert cache.table(slot).tolist()[:4] == list(hit.blocks)
    assert len(set(cache.table(slot).tolist())) == 10
    assert cache.find(chain, 4096).length == 512
    cache.close(slot)


# -- events -----------------------------------------------------------------------------------------------------------


def test_events_name_runs_of_new_blocks_with_the_hash_before_them():
    buffer = EventBuffer()
    cache, tokens = make(num_blocks=8, on_event=buffer.append), tokens_of(1024)
    chain, slot = chain_of(tokens), cache.open()
    cache.reserve(slot, 512)
    cache.publish(slot, chain, 300)
    cache.publish(slot, chain, 512)
    cache.save_window(slot, chain, 512)
    cache.close(slot)
    assert buffer.take() == [
        ("stored", tuple(chain.hashes[:2]), chain.root, "device"),
        ("stored", tuple(chain.hashes[2:4]), chain.hashes[1], "device"),
        ("stored", (chain.hashes[3],), None, "window"),
    ]
    filler = cache.open()
    cache.reserve(filler, 6 * 128)
    assert buffer.take() == [("removed", (chain.hashes[3], chain.hashes[2]), None, "device")]
    cache.close(filler)
    cache.clear_prefix_cache()
    events = buffer.take()
    assert [(e.kind, set(e.hashes), e.tier) for e in events] == [
        ("removed", set(chain.hashes[:2]), "device"),
        ("removed", {chain.hashes[3]}, "window"),
    ]
    assert buffer.take() == []


def test_a_content_that_was_known_between_new_ones_is_not_told_again():
    buffer, pool, chain = EventBuffer(), BlockPool(8), chain_of(tokens_of(384))
    contents = PrefixCache(ReplayPolicy("bounded", WINDOW, LAYERS), pool, 0, CacheStats(), buffer.append)
    contents.store(pool.take(1), chain, 1)
    contents.store(pool.take(3), chain, 0)
    first, middle, last = chain.hashes
    assert buffer.take() == [
        ("stored", (middle,), first, "device"),
        ("stored", (first,), chain.root, "device"),
        ("stored", (last,), middle, "device"),
    ]


def test_equal_contents_are_one_for_those_who_watch():
    buffer = EventBuffer()
    cache, tokens = make(num_blocks=8, on_event=buffer.append), tokens_of(256)
    chain, slots = chain_of(tokens), [cache.open(), cache.open()]
    for slot in slots:
        cache.reserve(slot, 256)
        cache.publish(slot, chain, 256)
    assert len(buffer.take()) == 1
    for slot in slots:
        cache.close(slot)
    filler = cache.open()
    cache.reserve(filler, 6 * 128)
    assert buffer.take() == []  # the second owner's blocks are left
    cache.reserve(filler, 8 * 128)
    assert [(e.kind, set(e.hashes)) for e in buffer.take()] == [("removed", set(chain.hashes))]
    cache.close(filler)


# -- speed ------------------------------------------------------------------------------------------------------------


def test_the_benchmark_of_the_index_runs_and_names_every_target():
    report = prefix_index.measure(tokens=64 * 128, count=64, repeat=2)
    assert report["targets_ms"].keys() <= report["wall_ms"].keys() == report["process_ms"].keys()
    assert all(value >= 0 for value in report["wall_ms"].values())
    assert set(report["missed"]) <= report["targets_ms"].keys()  # which ones is the machine's affair


def test_looking_up_a_longer_prompt_hashes_only_what_is_new():
    """A turn of a conversation must not pay for the whole transcript again: what was hashed stays as it is."""
    tokens = tokens_of(40 * 128)
    chain = chain_of(tokens[: 39 * 128])
    before = list(chain.hashes)
    chain.extend(tokens)
    assert all(old is new for old, new in zip(before, chain.hashes, strict=False)) and len(chain.hashes) == 40
