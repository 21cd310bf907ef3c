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
from deepinfer.cache.blocks import BlockPool, CacheFullError, EvictionQueue
from deepinfer.cache.events import EventBuffer
from deepinfer.cache.hashing import HashChain, namespace
from deepinfer.cache.manager import CacheManager

B = 128
SEQS, BLOCKS, WIDTH, ENTRIES, OFFLOAD, WINDOW, LAYERS, LOOKBACK = 4, 14, 8, 2, 7, 128, 3, 3


def make(mode: str = "exact", **changes) -> CacheManager:
    chosen = dict(
        max_num_seqs=SEQS,
        num_blocks=BLOCKS,
        table_width=WIDTH,
        window=WINDOW,
        num_layers=LAYERS,
        window_entries=ENTRIES,
        lookback=LOOKBACK,
        offload_blocks=OFFLOAD,
    )
    return CacheManager(**(chosen | {"prefix_caching": mode} | changes))


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
        self.promised: dict[int, set[bytes]] = {}
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

    @rule(salt=st.sampled_from(["", "", "", "b"]), letters=st.lists(st.integers(0, 1), max_size=6), tail=st.integers(0, 140))
    def admit(self, salt, letters, tail):
        """A prompt of few different blocks, so that prefixes are shared often: find, adopt, reserve, as a scheduler."""
        sequence = Sequence(salt, [token for letter in letters for token in range(letter, B + letter)] + [7] * tail)
        self.remember(sequence)
        if len(self.open) == SEQS:
            with pytest.raises(CacheFullError):
                self.cache.open()
            return
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
                self.promised.get(slot, set()).discard(sequence.chain.hashes[index])

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def announce(self, number):
        slot = self.pick(number)
        sequence = self.open[slot]
        self.cache.announce(slot, sequence.chain, len(sequence.tokens))
        if self.keeps and sequence.era == self.era:
            published = 0
            while published < len(self.owned[slot]) and self.seen(slot, published):
                published += 1
            self.promised[slot] = set(sequence.chain.hashes[published:])

    def seen(self, slot: int, index: int) -> bool:
        return index < self.cache._published[slot]  # a twin's publication does not count, so the model cannot tell

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
        self.promised.pop(slot, None)
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
        self.promised.clear()

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self):
        self.cache.check_integrity()

    @invariant()
    def the_model_agrees(self):
        cache = self.cache
        assert {slot: cache.table(slot).tolist() for slot in self.open} == self.owned == {
            slot: self.device.tables[slot] for slot in self.open
        }
        assert cache._pool.eviction_order().tolist() == self.idle
        assert cache.num_cached_blocks == len(self.idle)
        assert cache.num_free_blocks == self.num_available() == cache.num_blocks - cache.num_used_blocks
        assert cache.num_free_slots == SEQS - len(self.open)
        assert cache.capacity.tolist() == [B * len(self.owned.get(slot, ())) for slot in range(SEQS)]
        assert [self.content_of[digest] for digest in cache._windows.digests()] == self.windows
        announced = set().union(*self.promised.values())
        assert all(cache.is_computing(digest) == (digest in announced) for digest in self.content_of)

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


@pytest.mark.parametrize("mode, examples", [("exact", 40), ("bounded", 40), ("off", 10)])
def test_nothing_is_lost_or_mixed_up_whatever_the_order(mode, examples):
    run_state_machine_as_test(
        type("Machine", (ManagerMachine,), {"mode": mode}),
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
