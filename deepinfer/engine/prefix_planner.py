"""What a sequence takes from the prefix cache when it starts, what it waits for, and which windows it leaves there.

Attention reads a window that no block holds, so a hit is free only where a window was kept. Windows are kept where a
sequence ends, where a sequence could have hit if there had been one (so that equal beginnings, a system prompt or a
prompt that is repeated, hit from the third time on), and at the end of what waiting sequences have in common with a
prefill that runs. A prefill is asked to stop there once.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.cache.manager import CacheManager
from deepinfer.cache.prefix import COLD, PrefixHit
from deepinfer.config import BLOCK_SIZE, VERIFY_ROWS, EngineConfig
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.shared_prefix import SharedPrefixes
from deepinfer.engine.table import SequenceTable


class PrefixPlanner:
    """The scheduler asks it when a sequence waits, starts, goes on and leaves."""

    def __init__(self, config: EngineConfig, manager: CacheManager, table: SequenceTable) -> None:
        self.enabled = config.prefix_caching != "off"
        self.shared = SharedPrefixes()
        self._keeps_windows = config.window_entries > 0
        self._manager = manager
        self._table = table
        self._stopping: dict[Sequence, None] = {}  # sequences with boundaries whose windows are to be saved, in order
        margin = manager.window + VERIFY_ROWS
        # In exact mode a truncated prefill must keep the same rows hot and cold, so a hit ends before them.
        exact_cut = config.truncation and config.prefix_caching == "exact"
        self._cap_shift = max(0, config.keep_tokens - margin) if exact_cut else 0
        self._margin = margin + self._cap_shift

    # -- before it starts -----------------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """What the cache has of its known tokens now."""
        if not self._reads(sequence):
            return COLD
        return self._manager.find(sequence.chain, sequence.num_known - self._cap_shift)

    def is_awaiting(self, sequence: Sequence) -> bool:
        """True while the prefill that it waits for has not settled the common part."""
        if sequence.awaited is not None:
            owner, position = sequence.awaited
            if owner.slot is not None and self._table.done[owner.slot] < position:
                return True
            sequence.awaited = None
        return False

    def must_wait(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """True if a running prefill will soon put more of its prompt into the cache than is there now.

        If it has not passed the end of the common part yet, it is asked to stop there once and leave its window.
        """
        if not self._reads(sequence):
            return False
        owner = self.shared.owner(sequence, hit.length // BLOCK_SIZE)
        if owner is None or owner.slot is None:
            return False
        end = min(self.shared.common_tokens(sequence, owner), self._longest_hit(sequence))
        if end <= hit.length or self._table.done[owner.slot] >= end:
            return False
        if self._keeps_windows and self._table.computed[owner.slot] < end:
            self._stop_at(owner, end)
        elif end not in owner.boundaries and end - self._manager.replay_tokens <= hit.replay_start:
            return False  # its window is lost, and computing it again costs as much as the common part
        sequence.awaited = (owner, end)
        sequence.waits_for = "prefix"
        return True

    # -- while it runs --------------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, hit: PrefixHit, followers: Iterable[Sequence]) -> None:
        """It has a slot and has adopted `hit`. followers: the next that wait; stops are set at the ends of what it has
        in common with them now, because a short prompt would be computed before they are looked at."""
        if not self.enabled or sequence.scores_prompt:
            return
        self.shared.announce(sequence, hit.length // BLOCK_SIZE)
        if not self._keeps_windows:
            return
        cached = self._manager.cached_tokens(sequence.chain, sequence.num_known - self._cap_shift)
        if cached > hit.length or hit.replay_start < hit.length:
            self._stop_at(sequence, cached)  # the next one that comes here finds a window and need not replay
        for other in followers:
            if other is not sequence and self._reads(other):
                end = min(self.shared.common_tokens(sequence, other), self._longest_hit(other))
                if end > hit.length:
                    self._stop_at(sequence, end)

    def save_windows(self) -> None:
        """Windows at the boundaries where prefills were asked to stop: after the step that ends there, before the one
        that goes on, whose copy would take their place. They lie in known tokens, so what a scheduled step is to pass
        there it does pass; of decodes with drafts that is certain only once they are settled."""
        for sequence in list(self._stopping):
            slot = sequence.slot
            if slot is not None and (boundary := int(self._table.crossing[slot])) in sequence.boundaries:
                self._manager.save_window(slot, sequence.chain, boundary)
                sequence.boundaries.discard(boundary)
            if not sequence.boundaries:
                del self._stopping[sequence]

    def publish(self, sequence: Sequence) -> None:
        """Its full blocks with settled state enter the cache. O(new tokens)."""
        if not self.enabled:
            return
        slot, table = sequence.slot, self._table
        assert slot is not None
        sequence.chain.extend(table.tokens[slot, : table.known[slot]])
        self._manager.publish(slot, sequence.chain, int(table.done[slot]))
        table.published[slot] = table.done[slot] // BLOCK_SIZE
        if table.published[slot] >= table.prefill_end[slot] // BLOCK_SIZE:
            self.shared.withdraw(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It is about to lose its slot: what it computed stays in the cache, with its last window."""
        if self.enabled:
            self.publish(sequence)
            self._save_last_window(sequence)
        self.shared.withdraw(sequence)
        self._stopping.pop(sequence, None)
        sequence.boundaries.clear()

    # -- parts ----------------------------------------------------------------------------------------------------

    def _reads(self, sequence: Sequence) -> bool:
        """Prompts that are scored need every row computed; a sequence in host memory brings its own state."""
        return self.enabled and not sequence.scores_prompt and sequence.ticket is None

    def _longest_hit(self, sequence: Sequence) -> int:
        """Tokens that a hit may have: whole blocks, below the window and a verify step."""
        return max(0, sequence.num_known - self._margin) // BLOCK_SIZE * BLOCK_SIZE

    def _stop_at(self, sequence: Sequence, boundary: int) -> None:
        sequence.boundaries.add(boundary)
        self._stopping[sequence] = None

    def _save_last_window(self, sequence: Sequence) -> None:
        """Its last settled boundary, unless a step in flight copies another one over it (the replica has two places,
        for even and odd multiples of 128), or it lies in a replay, whose windows are whole only at its end. Drafts in
        flight may pass the next boundary and fall back behind it, which takes the other place."""
        slot = sequence.slot
        assert slot is not None
        boundary = int(self._table.replica[slot])
        if boundary >= max(sequence.hit.length, 1) and int(self._table.crossing[slot]) - boundary in (0, BLOCK_SIZE):
            self._manager.save_window(slot, sequence.chain, boundary)
