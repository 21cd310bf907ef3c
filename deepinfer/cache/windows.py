"""Which boundaries have their window rows in host memory, and where: least recently used first out.

A window is named by the hash of everything before its boundary. It may outlive the blocks before it: then nobody finds
it, until it is evicted like any other.
"""

from __future__ import annotations

from collections import OrderedDict


class WindowIndex:
    """Hash of a boundary -> entry 0 .. num_entries - 1 of the host store."""

    def __init__(self, num_entries: int) -> None:
        if num_entries < 0:
            raise ValueError(f"window_entries must not be negative, not {num_entries}")
        self.num_entries = num_entries
        self._entry_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._digest_of: dict[int, bytes] = {}
        self._free = list(range(num_entries - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entry_of

    def find(self, digest: bytes) -> int | None:
        """The entry, without counting as a use."""
        return self._entry_of.get(digest)

    def digests(self) -> list[bytes]:
        """The next to be evicted first."""
        return list(self._entry_of)

    def use(self, entry: int) -> None:
        """The entry is loaded. ValueError if it holds nothing."""
        if entry not in self._digest_of:
            raise ValueError(f"window entry {entry} holds nothing")
        self._entry_of.move_to_end(self._digest_of[entry])

    def add(self, digest: bytes) -> tuple[int, bytes | None]:
        """An entry for a new hash -> (entry, the hash that lost its entry for it). Needs num_entries > 0."""
        evicted = None
        if self._free:
            entry = self._free.pop()
        else:
            evicted, entry = self._entry_of.popitem(last=False)
        self._entry_of[digest] = entry
        self._digest_of[entry] = digest
        return entry, evicted

    def clear(self) -> list[bytes]:
        """Forget all -> their hashes."""
        lost = list(self._entry_of)
        self._free += sorted(self._digest_of, reverse=True)
        self._entry_of.clear()
        self._digest_of.clear()
        return lost

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free + used entries are all entries and both directions agree."""
        if sorted([*self._free, *self._entry_of.values()]) != list(range(self.num_entries)):
            raise RuntimeError("a window entry is lost, or free and used at once")
        if {digest: entry for entry, digest in self._digest_of.items()} != dict(self._entry_of):
            raise RuntimeError("window entries and their hashes disagree")
