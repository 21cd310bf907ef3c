"""The host's books against a plain model of a device that only does what the edits say.

The device knows the tokens that every block holds. So the tests see what a user would: a block that was overwritten
while somebody else read it, a prefix that is not the prompt's, a window of another conversation.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from deepinfer.cache import edits as E
from deepinfer.cache.blocks import BlockPool, CacheFullError, EvictionQueue, live_caches
from deepinfer.cache.events import EventBuffer
from deepinfer.cache.hashing import HashChain, namespace
from deepinfer.cache.manager import CacheManager

B = 128
SEQS, BLOCKS, WIDTH, ENTRIES, OFFLOAD, WINDOW, LAYERS, LOOKBACK = 4, 14, 8, 2, 7, 128, 3, 3


def make(mode: str = "exact", **changes) -> CacheManager:
    sizes = {"max_num_seqs": SEQS, "num_blocks": BLOCKS, "table_width": WIDTH, "window": WINDOW, "num_layers": LAYERS}
    host = {"window_entries": ENTRIES, "lookback": LOOKBACK, "offload_blocks": OFFLOAD}
    return CacheManager(**(sizes | host | {"prefix_caching": mode} | changes))


class Device:
    """Blocks are lists of tokens; a slot has a table, a written length and the tokens that its window stands for."""

    def __init__(self) -> None:
        self.blocks = {block: [None] * B for block in range(1, BLOCKS + 1)}
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.last_tokens: dict[int, tuple[int, ...]] = {}
        self.windows: dict[int, list[int]] = {}
        self.host: dict[int, tuple[list[list[int]], int, tuple[int, ...]]] = {}

    def apply(self, edits) -> None:
        for edit in edits:
            match edit:
                case E.OpenSlot(slot):
                    self.tables[slot], self.lengths[slot], self.last_tokens[slot] = [], 0, ()
                case E.SetTable(slot, first, blocks):
                    assert first == len(self.tables[slot])  # tables are only appended to
                    self.tables[slot] += blocks
                case E.SetLength(slot, length, last_tokens):
                    self.lengths[slot], self.last_tokens[slot] = length, last_tokens
                case E.CopyBlock(source, target):
                    self.blocks[target] = list(self.blocks[source])
                case E.CopySlot(source, target):
                    self.lengths[target] = self.lengths[source]
                    self.last_tokens[target] = self.last_tokens[source]
                case E.SaveWindow(slot, boundary, entry):
                    assert 0 <= entry < ENTRIES and boundary <= self.lengths[slot]
                    self.windows[entry] = self.read(slot, boundary)
                case E.LoadWindow(entry, slot, boundary):
                    assert self.windows[entry] == self.read(slot, boundary)  # the same past, to the first token
                case E.Offload(ticket, slot, blocks):
                    contents = [list(self.blocks[block]) for block in blocks]
                    self.host[ticket] = (contents, self.lengths[slot], self.last_tokens[slot])
                case E.Restore(ticket, slot, blocks):
                    contents, self.lengths[slot], self.last_tokens[slot] = self.host.pop(ticket)
                    assert list(blocks) == self.tables[slot][: len(blocks)]
                    for block, content in zip(blocks, contents, strict=True):
                        self.blocks[block] = content
                case E.ForgetTicket(ticket):
                    del self.host[ticket]
                case _:
                    raise AssertionError(edit)

    def write(self, slot: int, tokens: list[int], write_from: int) -> None:
        """The slot's next tokens; those below `write_from` change no block."""
        for token in tokens:
            position = self.lengths[slot]
            if position >= write_from:
                self.blocks[self.tables[slot][position // B]][position % B] = token
            self.lengths[slot] += 1
        self.last_tokens[slot] = (*self.last_tokens[slot], *tokens)[-LOOKBACK:]

    def read(self, slot: int, length: int) -> list[int]:
        return [token for block in self.tables[slot] for token in self.blocks[block]][:length]


class Sequence:
    def __init__(self, salt: str, tokens: list[int]) -> None:
        self.salt, self.tokens = salt, tokens
        self.chain = HashChain(namespace("model", "float32", 1, salt))
        self.write_from = 0
        self.era = 0

    def content(self, length: int) -> tuple:
        return (self.salt, *self.tokens[:length])


class ManagerMachine(RuleBasedStateMachine):
    """Any order of everything that a scheduler may do. The model: `owned` (who has which blocks), `known` (what is
    published where), `idle` (the cached blocks, oldest first), `windows` (oldest first), all plain and slow."""

    mode = "exact"

    def __init__(self):
        super().__init__()
        self.events = EventBuffer()
        self.cache = make(self.mode, on_event=self.events.append)
        self.device = Device()
        self.open: dict[int, Sequence] = {}
        self.owned: dict[int, list[int]] = {}
        self.known: dict[int, tuple] = {}
        self.idle: list[int] = []
        self.windows: list[tuple] = []
        self.tickets: dict[int, Sequence] = {}
        self.content_of: dict[bytes, tuple] = {}
        self.mirror: dict[str, set[bytes]] = {"device": set(), "window": set()}
        self.era = 0

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return self.mode != "off"

    def num_available(self) -> int:
        return BLOCKS - len({block for table in self.owned.values() for block in table})

    def pick(self, number: int) -> int:
        return sorted(self.open)[number % len(self.open)]

    def run_edits(self, extra=()) -> None:
        self.device.apply(self.cache.take_edits())
        self.device.apply(extra)

    def took(self, slot: int, blocks: list[int]) -> None:
        """The slot got new blocks: nobody owned them, free ones went first, then the oldest idle ones."""
        free = set(self.device.blocks) - {b for table in self.owned.values() for b in table} - set(self.idle)
        assert len(set(blocks)) == len(blocks)
        evicted = self.idle[: max(0, len(blocks) - len(free))]
        assert set(blocks) - free == set(evicted) and (not evicted or free <= set(blocks))
        for block in evicted:
            self.idle.remove(block)
            del self.known[block]
        self.owned[slot] += blocks

    def gave_back(self, slot: int) -> None:
        for block in reversed(self.owned.pop(slot)):
            if not any(block in table for table in self.owned.values()) and block in self.known:
                self.idle.append(block)

    def best_start(self, sequence: Sequence) -> tuple[int, int]:
        """By trying everything: (where computing starts, length of the longest known prefix below the cap)."""
        if not self.keeps:
            return 0, 0
        contents = set(self.known.values())
        longest = 0
        while longest + B <= len(sequence.tokens) - (WINDOW + 6) and sequence.content(longest + B) in contents:
            longest += B
        starts = [boundary for boundary in range(B, longest + 1, B) if sequence.content(boundary) in self.windows]
        replay = {"bounded": WINDOW, "exact": LAYERS * (WINDOW - 1) + 1}[self.mode]
        return max([0, longest - replay, *starts]), longest

    def remember(self, sequence: Sequence) -> None:
        sequence.chain.extend(np.array(sequence.tokens, np.int32))
        for block, digest in enumerate(sequence.chain.hashes):
            self.content_of[digest] = sequence.content((block + 1) * B)

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(
        salt=st.sampled_from(["", "", "", "", "b"]),
        letters=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=4, max_size=7) | st.lists(st.just(0), max_size=6),
        tail=st.integers(0, B),
        fate=st.sampled_from(["admitted", "computed", "published", "published", "finished", "finished", "finished"]),
    )
    def come(self, salt, letters, tail, fate):
        """A prompt of few different blocks, so that prefixes are shared often, which gets so far at once."""
        slot = self.admit(salt, letters, tail)
        if slot is None or fate == "admitted":
            return
        self.compute(sorted(self.open).index(slot), len(self.open[slot].tokens) - self.device.lengths[slot])
        if fate == "computed":
            return
        self.publish(sorted(self.open).index(slot), 0)
        if fate == "finished":
            if self.device.lengths[slot] >= B:
                self.save_window(sorted(self.open).index(slot))
            self.close_slot(slot)

    def admit(self, salt: str, letters: list[int], tail: int) -> int | None:
        """find, adopt, reserve, as a scheduler does -> the slot if there was room."""
        sequence = Sequence(salt, [token for letter in letters for token in range(letter, B + letter)] + [7] * tail)
        self.remember(sequence)
        if len(self.open) == SEQS:
            with pytest.raises(CacheFullError):
                self.cache.open()
            return None
        before = self.cache.num_cached_blocks
        hit = self.cache.find(sequence.chain, len(sequence.tokens))
        assert self.cache.num_cached_blocks == before
        start, longest = self.best_start(sequence)
        assert hit.replay_start == start and hit.length <= longest and hit.length % B == 0
        for number, block in enumerate(hit.blocks):
            assert self.known[block] == sequence.content((number + 1) * B)
        if hit.window_entry is not None:
            assert hit.length == start
            self.windows.remove(sequence.content(start))
            self.windows.append(sequence.content(start))
        elif hit.length:
            assert hit.length == longest and sequence.content(start) not in self.windows

        fits = self.cache.fits(hit, len(sequence.tokens))
        slot = self.cache.open()
        assert slot not in self.open
        self.cache.adopt(slot, hit, np.array(sequence.tokens, np.int32))
        sequence.write_from, sequence.era = hit.length, self.era
        self.open[slot], self.owned[slot] = sequence, list(hit.blocks)
        self.idle = [block for block in self.idle if block not in hit.blocks]
        self.run_edits()
        assert self.device.lengths[slot] == start
        assert self.device.last_tokens[slot] == tuple(sequence.tokens[max(0, start - LOOKBACK) : start])
        assert self.device.read(slot, hit.length) == sequence.tokens[: hit.length]
        assert fits == self.reserve(slot, len(sequence.tokens))
        if not fits:
            self.close_slot(slot)
        return slot if fits else None

    def reserve(self, slot: int, tokens: int) -> bool:
        missing = -(-tokens // B) - len(self.owned[slot])
        before = self.cache.num_free_blocks, self.cache.num_cached_blocks, self.cache.table(slot).tolist()
        if missing > self.num_available():
            with pytest.raises(CacheFullError):
                self.cache.reserve(slot, tokens)
            assert self.cache.take_edits() == []
            assert before == (self.cache.num_free_blocks, self.cache.num_cached_blocks, self.cache.table(slot).tolist())
            return False
        self.cache.reserve(slot, tokens)
        self.took(slot, self.cache.table(slot).tolist()[len(self.owned[slot]) :])
        self.run_edits()
        return True

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99), count=st.sampled_from([1, 2, 100, 128, 300]))
    def compute(self, number, count):
        """Some of the tokens that are not written yet, then new ones."""
        slot = self.pick(number)
        sequence = self.open[slot]
        written = self.device.lengths[slot]
        new = max(0, min(written + count, WIDTH * B) - len(sequence.tokens))
        if not self.reserve(slot, len(sequence.tokens) + new):
            return
        sequence.tokens = sequence.tokens + [8] * new
        self.remember(sequence)
        tokens = sequence.tokens[written : written + count]
        touched = {position // B for position in range(max(written, sequence.write_from), written + len(tokens))}
        for block in (self.device.tables[slot][index] for index in touched):
            owners = Counter(b for table in self.owned.values() for b in table)
            assert owners[block] == 1 and block not in self.known  # only what is one's own and unpublished is written
        self.device.write(slot, tokens, sequence.write_from)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99), cut=st.integers(0, 200))
    def publish(self, number, cut):
        slot = self.pick(number)
        sequence = self.open[slot]
        computed = max(0, self.device.lengths[slot] - cut)
        self.cache.publish(slot, sequence.chain, computed)
        if self.keeps and sequence.era == self.era:
            for index in range(computed // B):
                self.known.setdefault(self.owned[slot][index], sequence.content((index + 1) * B))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def save_window(self, number):
        slot = self.pick(number)
        sequence = self.open[slot]
        boundary = self.device.lengths[slot] // B * B
        if not boundary:
            with pytest.raises(ValueError, match="no window can be stored"):
                self.cache.save_window(slot, sequence.chain, boundary)
            return
        stored = self.cache.save_window(slot, sequence.chain, boundary)
        content = sequence.content(boundary)
        allowed = self.keeps and sequence.era == self.era
        assert stored == (allowed and content not in self.windows)
        if allowed:
            self.windows = [*(w for w in self.windows if w != content), content][-ENTRIES:]
        self.run_edits()

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def fork(self, number):
        slot = self.pick(number)
        parent = self.open[slot]
        length = self.device.lengths[slot]
        if length < parent.write_from:
            return  # still replaying: a scheduler forks when the prompt is computed
        full = length // B
        if len(self.open) == SEQS or (length % B and not self.num_available()):
            before = self.cache.num_free_blocks, self.cache.num_free_slots
            with pytest.raises(CacheFullError):
                self.cache.fork(slot, length)
            assert before == (self.cache.num_free_blocks, self.cache.num_free_slots)
            return
        child, edits = self.cache.fork(slot, length)
        assert self.cache.take_edits() == []  # they are returned, because they run after the forward pass
        twin = Sequence(parent.salt, parent.tokens[:length])
        twin.chain, twin.era = parent.chain.copy(), parent.era
        twin.chain.hashes = twin.chain.hashes[:full]  # a real child is as long as its parent's known tokens
        self.open[child], self.owned[child] = twin, self.owned[slot][:full]
        self.took(child, self.cache.table(child).tolist()[full:])
        self.run_edits(edits)
        assert self.device.lengths[child] == length
        assert self.device.last_tokens[child] == self.device.last_tokens[slot]

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def close(self, number):
        self.close_slot(self.pick(number))

    def close_slot(self, slot: int) -> None:
        self.cache.close(slot)
        del self.open[slot]
        self.gave_back(slot)
        for call in (self.cache.close, self.cache.table):
            with pytest.raises(ValueError, match="not open"):
                call(slot)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def offload(self, number):
        slot = self.pick(number)
        length = self.device.lengths[slot]
        if length < self.open[slot].write_from:
            return  # blocks of a replay are not the sequence's own state yet; a scheduler would compute it again
        used = sum(-(-self.device.host[ticket][1] // B) for ticket in self.tickets)
        ticket = self.cache.offload(slot, length)
        assert (ticket is None) == (used + -(-length // B) > OFFLOAD)
        if ticket is not None:
            assert ticket not in self.tickets
            self.tickets[ticket] = self.open[slot]
            self.run_edits()
            self.close_slot(slot)

    @precondition(lambda self: self.tickets)
    @rule(number=st.integers(0, 99))
    def restore(self, number):
        ticket = sorted(self.tickets)[number % len(self.tickets)]
        sequence = self.tickets[ticket]
        if len(self.open) == SEQS:
            return
        slot = self.cache.open()
        sequence.write_from = 0
        self.open[slot], self.owned[slot] = sequence, []
        self.run_edits()
        length = self.device.host[ticket][1]
        tokens = np.array(sequence.tokens, np.int32)
        if not self.reserve(slot, length):
            with pytest.raises(ValueError, match="no blocks reserved"):
                self.cache.restore(ticket, slot, tokens)
            self.close_slot(slot)
            return
        assert self.cache.restore(ticket, slot, tokens) == length
        del self.tickets[ticket]
        self.run_edits()

    @precondition(lambda self: self.tickets)
    @rule(number=st.integers(0, 99))
    def forget(self, number):
        ticket = sorted(self.tickets)[number % len(self.tickets)]
        self.cache.forget(ticket)
        del self.tickets[ticket]
        self.run_edits()
        with pytest.raises(ValueError, match="not in use"):
            self.cache.forget(ticket)

    @precondition(lambda self: len(self.known) > 5)  # seldom
    @rule(really=st.integers(0, 4))
    def clear(self, really):
        if really:
            return
        self.cache.clear_prefix_cache()
        self.era += 1
        self.known.clear()
        self.idle.clear()
        self.windows.clear()

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self):
        self.cache.check_integrity()

    @invariant()
    def the_model_agrees(self):
        cache = self.cache
        assert (
            {slot: cache.table(slot).tolist() for slot in self.open}
            == self.owned
            == {slot: self.device.tables[slot] for slot in self.open}
        )
        assert cache._pool.eviction_order().tolist() == self.idle
        assert cache.num_cached_blocks == len(self.idle)
        assert cache.num_free_blocks == self.num_available() == cache.num_blocks - cache.num_used_blocks
        assert cache.num_free_slots == SEQS - len(self.open)
        assert cache.capacity.tolist() == [B * len(self.owned.get(slot, ())) for slot in range(SEQS)]
        assert [self.content_of[digest] for digest in cache._prefixes.windows.digests()] == self.windows

    @invariant()
    def every_sequence_still_reads_its_own_tokens(self):
        for slot, sequence in self.open.items():
            length = max(self.device.lengths[slot], sequence.write_from)
            assert self.device.read(slot, length) == sequence.tokens[:length]
        for block, (_, *tokens) in self.known.items():
            assert self.device.blocks[block] == tokens[-B:]

    @invariant()
    def whoever_follows_the_events_knows_what_is_there(self):
        for event in self.events.take():
            if event.kind == "stored":
                assert not self.mirror[event.tier] & set(event.hashes)
                self.mirror[event.tier] |= set(event.hashes)
            else:
                assert self.mirror[event.tier] >= set(event.hashes)
                self.mirror[event.tier] -= set(event.hashes)
        assert {self.content_of[digest] for digest in self.mirror["device"]} == set(self.known.values())
        assert {self.content_of[digest] for digest in self.mirror["window"]} == set(self.windows)

    def teardown(self):
        for slot in list(self.open):
            self.close_slot(slot)
        for ticket in self.tickets:
            self.cache.forget(ticket)
        assert self.cache.num_free_blocks == BLOCKS and self.cache.num_free_slots == SEQS
        assert self.cache.num_offloaded == 0
        self.cache.check_integrity()


@pytest.mark.parametrize("mode, examples", [("exact", 60), ("bounded", 60), ("off", 10)])
def test_nothing_is_lost_or_mixed_up_whatever_the_order(mode, examples):
    run_state_machine_as_test(
        type("Machine", (ManagerMachine,), {"mode": mode}),
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# -- single promises --------------------------------------------------------------------------------------------------


def chain_of(tokens: np.ndarray) -> HashChain:
    chain = HashChain(namespace("model", "float32", 1))
    chain.extend(tokens)
    return chain


TOKENS = np.arange(WIDTH * B, dtype=np.int32)


def test_low_blocks_are_handed_out_first():
    cache = make("off")
    first, second = cache.open(), cache.open()
    cache.reserve(first, 3 * B)
    cache.reserve(second, 2 * B)
    assert cache.table(first).tolist() == [1, 2, 3] and cache.table(second).tolist() == [4, 5]
    cache.close(first)
    cache.reserve(second, 6 * B)
    assert cache.table(second).tolist() == [4, 5, 1, 2, 3, 6]
    cache.close(second)


def test_a_reservation_beyond_the_table_is_an_error_and_one_beyond_the_pool_is_full():
    cache = make("off")
    first, second = cache.open(), cache.open()
    cache.reserve(first, WIDTH * B)
    cache.take_edits()
    with pytest.raises(ValueError, match="1025 tokens are more than a sequence can have, 1024"):
        cache.reserve(second, WIDTH * B + 1)
    with pytest.raises(CacheFullError, match="7 cache blocks wanted, 6 of 14 are free or evictable"):
        cache.reserve(second, 6 * B + 1)
    assert cache.take_edits() == [] and cache.capacity.tolist()[second] == 0
    cache.reserve(first, 100)  # less than it has: nothing to do
    assert cache.take_edits() == []
    cache.close(first)
    cache.close(second)


def test_edits_come_in_the_order_of_the_calls_and_once():
    cache = make("off")
    first = cache.open()
    cache.reserve(first, 200)
    cache.close(first)
    second = cache.open()
    assert second == first
    cache.reserve(second, 1)
    assert cache.take_edits() == [
        E.OpenSlot(first),
        E.SetTable(first, 0, (1, 2)),
        E.OpenSlot(second),
        E.SetTable(second, 0, (1,)),
    ]
    assert cache.take_edits() == []
    cache.close(second)


def test_an_adopted_prefix_reaches_the_device_with_the_tokens_before_it():
    cache = make()
    chain, slot = chain_of(TOKENS), cache.open()
    cache.reserve(slot, len(TOKENS))
    cache.publish(slot, chain, len(TOKENS))
    cache.save_window(slot, chain, 640)
    cache.close(slot)
    cache.take_edits()
    slot = cache.open()
    cache.adopt(slot, cache.find(chain, 800), TOKENS[:800])
    assert cache.take_edits() == [
        E.OpenSlot(slot),
        E.SetTable(slot, 0, (1, 2, 3, 4, 5)),
        E.SetLength(slot, 640, (637, 638, 639)),
        E.LoadWindow(0, slot, 640),
    ]
    assert cache.capacity[slot] == 640
    other = cache.open()
    cache.adopt(
        other, cache.find(chain, 1024), TOKENS
    )  # 768 in blocks; its replay would start at 386, the window is at 640
    assert cache.take_edits()[1:] == [
        E.SetTable(other, 0, (1, 2, 3, 4, 5)),
        E.SetLength(other, 640, (637, 638, 639)),
        E.LoadWindow(0, other, 640),
    ]
    assert (cache.stats.hit_tokens, cache.stats.window_hits, cache.stats.window_replays) == (1280, 2, 0)
    cache.close(slot)
    cache.close(other)


def test_a_replay_starts_before_the_end_of_its_blocks():
    cache = make("bounded", lookback=200)
    chain, slot = chain_of(TOKENS), cache.open()
    cache.reserve(slot, len(TOKENS))
    cache.publish(slot, chain, len(TOKENS))
    cache.close(slot)
    cache.take_edits()
    slot = cache.open()
    cache.adopt(slot, cache.find(chain, 390), TOKENS[:390])
    assert cache.take_edits() == [
        E.OpenSlot(slot),
        E.SetTable(slot, 0, (1, 2)),
        E.SetLength(slot, 128, tuple(range(128))),  # there are no 200 tokens before it
    ]
    assert (cache.stats.hit_tokens, cache.stats.replay_tokens, cache.stats.window_replays) == (128, 128, 1)
    cache.close(slot)


def test_a_fork_s_edits_are_returned_because_they_run_after_the_forward_pass():
    cache = make()
    chain, slot = chain_of(TOKENS), cache.open()
    cache.reserve(slot, 300)
    cache.take_edits()
    child, edits = cache.fork(slot, 300)
    assert cache.take_edits() == []
    assert edits == (
        E.OpenSlot(child),
        E.SetTable(child, 0, (1, 2, 4)),
        E.CopyBlock(3, 4),
        E.CopySlot(slot, child),
    )
    aligned, edits = cache.fork(slot, 256)
    assert [type(edit) for edit in edits] == [E.OpenSlot, E.SetTable, E.CopySlot]  # nothing half full to copy
    with pytest.raises(ValueError, match="no blocks reserved for 385 tokens"):
        cache.fork(slot, 385)
    for one in (slot, child, aligned):
        cache.publish(one, chain.copy(), 256)  # whoever comes first; the others have the same blocks
    assert cache.stats.blocks_published == 2 and cache.num_cached_blocks == 0
    cache.close(slot)
    assert cache.num_cached_blocks == 0 and cache.num_used_blocks == 3  # the children still read them
    cache.close(child)
    cache.close(aligned)
    assert cache.num_cached_blocks == 2


def test_a_fork_of_a_prompt_that_was_hit_publishes_only_its_own():
    cache = make("bounded")
    chain, slot = chain_of(TOKENS), cache.open()
    cache.reserve(slot, 800)
    cache.publish(slot, chain, 800)
    cache.close(slot)
    parent = cache.open()
    cache.adopt(parent, cache.find(chain, 600), TOKENS[:600])
    cache.reserve(parent, 600)
    child, _ = cache.fork(parent, 600)
    before = cache.stats.blocks_published
    cache.publish(child, chain, 600)
    assert cache.stats.blocks_published == before + 1  # the fourth block, computed together with the parent
    cache.close(parent)
    cache.close(child)


def test_only_an_empty_slot_adopts_and_only_what_is_still_there():
    cache = make("bounded")
    chain, slot = chain_of(TOKENS), cache.open()
    cache.reserve(slot, 1024)
    cache.publish(slot, chain, 1024)
    hit = cache.find(chain, 1024)
    with pytest.raises(ValueError, match="has blocks already"):
        cache.adopt(slot, hit, TOKENS)
    cache.close(slot)
    slot = cache.open()
    cache.clear_prefix_cache()
    with pytest.raises(RuntimeError, match="evicted between find and adopt"):
        cache.adopt(slot, hit, TOKENS)
    assert cache.num_used_blocks == 0
    cache.close(slot)


def test_more_tokens_than_blocks_cannot_be_published():
    cache = make()
    slot = cache.open()
    cache.reserve(slot, 128)
    with pytest.raises(ValueError, match="256 tokens computed in 1 blocks"):
        cache.publish(slot, chain_of(TOKENS), 256)
    cache.close(slot)


def test_what_was_computed_before_a_clear_never_comes_back():
    cache = make("bounded")
    chain = chain_of(TOKENS)
    old, ticket_owner = cache.open(), cache.open()
    for slot in (old, ticket_owner):
        cache.reserve(slot, 700)
    cache.publish(old, chain, 300)
    ticket = cache.offload(ticket_owner, 700)
    cache.close(ticket_owner)
    cache.clear_prefix_cache()
    child, _ = cache.fork(old, 600)
    restored = cache.open()
    cache.close(old)
    cache.reserve(restored, 700)
    cache.restore(ticket, restored, TOKENS[:700])
    for slot in (child, restored):
        cache.publish(slot, chain, 600)
        assert not cache.save_window(slot, chain, 512)
        cache.close(slot)
    assert cache.num_cached_blocks == 0 and cache.find(chain, 1024).length == 0
    fresh = cache.open()
    cache.reserve(fresh, 700)
    cache.publish(fresh, chain, 700)
    assert cache.find(chain, 1024).length == 640
    cache.close(fresh)


def test_host_memory_for_preempted_sequences_is_bounded():
    cache = make("off")
    slot = cache.open()
    cache.reserve(slot, 4 * B)
    cache.take_edits()
    ticket = cache.offload(slot, 3 * B + 1)
    assert cache.take_edits() == [E.Offload(ticket, slot, (1, 2, 3, 4))]
    assert cache.offload(slot, 4 * B) is None  # 7 blocks in all
    assert cache.take_edits() == []
    other = cache.offload(slot, 3 * B)
    assert other != ticket and cache.num_offloaded == 2
    cache.forget(ticket)
    assert cache.offload(slot, 4 * B) is not None
    with pytest.raises(ValueError, match="no blocks reserved for 513 tokens"):
        cache.offload(slot, 4 * B + 1)
    cache.close(slot)


def test_a_restored_sequence_never_overwrites_a_shared_block():
    cache = make("bounded")
    chain, slot = chain_of(TOKENS), cache.open()
    cache.reserve(slot, 600)
    cache.publish(slot, chain, 600)
    ticket = cache.offload(slot, 600)
    with pytest.raises(ValueError, match="shares blocks"):
        cache.restore(ticket, slot, TOKENS[:600])
    cache.close(slot)
    adopter = cache.open()
    cache.adopt(adopter, cache.find(chain, 600), TOKENS[:600])
    cache.reserve(adopter, 600)
    with pytest.raises(ValueError, match="shares blocks"):
        cache.restore(ticket, adopter, TOKENS[:600])
    cache.close(adopter)
    again = cache.open()
    cache.reserve(again, 600)
    cache.take_edits()
    assert cache.restore(ticket, again, TOKENS[:600]) == 600
    blocks = tuple(cache.table(again).tolist())
    assert cache.take_edits() == [E.Restore(ticket, again, blocks), E.SetLength(again, 600, (597, 598, 599))]
    with pytest.raises(ValueError, match=f"ticket {ticket} is not in use"):
        cache.restore(ticket, again, TOKENS[:600])
    cache.close(again)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"table_width": 0}, "table_width must be at least 1"),
        ({"window_entries": -1}, "window_entries must not be negative"),
        ({"offload_blocks": -1}, "offload_blocks must not be negative"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def _lose_a_slot(cache):
    cache._free_slots.pop()


def _count_once_too_often(cache):
    cache._pool.references[1] += 1


def _forget_a_hash(cache):
    cache._prefixes._index.remove([1])


def _swap_two_blocks(cache):
    cache._tables[0, :2] = cache._tables[0, 1::-1]


def _free_a_cached_block(cache):
    cache._pool.hashed[4] = False


def _claim_capacity(cache):
    cache.capacity[1] = 128


def _lose_a_window(cache):
    cache._prefixes.windows._free.pop()


def _lose_offloaded_blocks(cache):
    cache._offloaded.num_used -= 1


def _leave_a_block_behind_the_table(cache):
    cache._tables[1, 0] = 5


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_slot,
        _count_once_too_often,
        _forget_a_hash,
        _swap_two_blocks,
        _free_a_cached_block,
        _claim_capacity,
        _lose_a_window,
        _lose_offloaded_blocks,
        _leave_a_block_behind_the_table,
    ],
)
def test_damage_to_the_books_is_found(damage):
    cache = make()
    chain, slot, other = chain_of(TOKENS), cache.open(), cache.open()
    cache.reserve(slot, 300)
    cache.publish(slot, chain, 300)
    cache.reserve(other, 300)
    cache.publish(other, chain_of(TOKENS + 1), 300)
    cache.offload(other, 300)
    cache.close(other)
    cache.check_integrity()
    damage(cache)
    live_caches.discard(cache)  # it stays broken
    with pytest.raises(RuntimeError):
        cache.check_integrity()


def test_the_oldest_are_evicted_first_however_often_blocks_come_and_go():
    """Against a plain list, through many compactions of the queue."""
    generator = np.random.default_rng(0)
    queue, model = EvictionQueue(40), []
    for _ in range(3000):
        outside = [block for block in range(1, 41) if block not in model]
        count = int(generator.integers(0, 12))
        action = generator.integers(0, 3)
        if action == 0:
            blocks = generator.permutation(outside)[:count].astype(np.int64)
            queue.append(blocks)
            model += blocks.tolist()
        elif action == 1:
            blocks = generator.permutation(model)[:count].astype(np.int64)
            queue.remove(blocks)
            model = [block for block in model if block not in blocks]
        else:
            count = min(count, len(model))
            assert queue.pop(count).tolist() == model[:count]
            model = model[count:]
        assert queue.blocks().tolist() == model and len(queue) == len(model)


def test_a_block_that_is_free_can_be_neither_shared_nor_released_nor_kept():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="block 1 is free and cannot be shared"):
        pool.share(blocks)
    with pytest.raises(ValueError, match="block 1 is free already"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="has no content to keep"):
        pool.keep(blocks)
    pool.check_integrity(np.empty(0, np.int64))


def test_settings_of_the_model_and_the_engine_are_taken_over():
    from deepinfer.config import EngineConfig
    from deepinfer.model.presets import tiny

    model = tiny()
    config = EngineConfig(
        max_model_len=1000, max_num_seqs=3, max_num_batched_tokens=64, num_blocks=20, prefix_caching="exact", drafts=2
    )
    cache = CacheManager.for_model(model, config, offload_blocks=5)
    assert (cache.max_num_seqs, cache.num_blocks, cache.table_width) == (3, 20, 8)
    assert cache.window == model.sliding_window
    assert cache.replay_tokens >= model.num_hidden_layers * (model.sliding_window - 1)


def test_after_a_failed_step_nothing_is_said_to_be_anywhere():
    cache = make("bounded")
    chain, slot = chain_of(TOKENS), cache.open()
    cache.reserve(slot, 1024)
    cache.publish(slot, chain, 1024)
    cache.save_window(slot, chain, 512)
    with pytest.raises(RuntimeError, match="sequences are left"):
        cache.void()
    cache.close(slot)
    cache.void()
    assert cache.take_edits() == [E.ForgetAll()]  # what was queued may name what never reached the device
    assert cache.num_cached_blocks == 0 and cache.num_windows == 0 and cache.num_free_blocks == BLOCKS
    assert cache.find(chain, 1024).length == 0
