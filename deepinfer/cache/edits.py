"""What the host tells the device's side of the cache to do: small records, carried out in order between forward passes.

The host decides (who gets which block, what is shared, what is kept); the device's tensors change only in the order of
the stream: the edits of a step are applied before its forward pass and after that of the step before it. So a block or
slot may be given to another sequence while a step that still writes it is in flight: its new owner comes later in the
stream. Nothing here holds a tensor, so a plan may also cross a process border.
"""

from __future__ import annotations

from typing import NamedTuple


class OpenSlot(NamedTuple):
    """The slot belongs to a new, empty sequence: length 0, no blocks, no open row, no tokens before the first."""

    slot: int


class SetTable(NamedTuple):
    """Entries first, first + 1, ... of the slot's block table name these blocks."""

    slot: int
    first: int
    blocks: tuple[int, ...]


class SetLength(NamedTuple):
    """The slot's sequence counts as written below `length` (an adopted prefix), which ends with these tokens.

    last_tokens: the ids before position `length`, oldest first, as many as Engram looks back (fewer at the beginning).
    """

    slot: int
    length: int
    last_tokens: tuple[int, ...]


class CopyBlock(NamedTuple):
    """All entries of a block, for a fork that writes on in its own copy."""

    source: int
    target: int


class CopySlot(NamedTuple):
    """Everything that a slot holds (window rings, open rows, replica, last tokens, length) but its block table."""

    source: int
    target: int


class SaveWindow(NamedTuple):
    """Window rows of positions [boundary - window, boundary) from the slot's replica to an entry of the host store."""

    slot: int
    boundary: int
    entry: int


class LoadWindow(NamedTuple):
    """The same rows from the host store into the slot's rings."""

    entry: int
    slot: int
    boundary: int


class Offload(NamedTuple):
    """A preempted sequence's blocks and slot, copied to host memory under a ticket."""

    ticket: int
    slot: int
    blocks: tuple[int, ...]


class Restore(NamedTuple):
    """The sequence of a ticket into another slot (opened before) and other blocks; the ticket is gone afterwards."""

    ticket: int
    slot: int
    blocks: tuple[int, ...]


class ForgetTicket(NamedTuple):
    """The sequence of a ticket ended while it was offloaded."""

    ticket: int


class ForgetAll(NamedTuple):
    """After a failed step: no sequence is left, and edits may have been lost. Every ticket is gone."""


Edit = (
    OpenSlot
    | SetTable
    | SetLength
    | CopyBlock
    | CopySlot
    | SaveWindow
    | LoadWindow
    | Offload
    | Restore
    | ForgetTicket
    | ForgetAll
)
