"""The device's side of a cache: tensors, and the edits that the host's side orders.

Everything here happens in the order of one stream: edits, then a step's reads and writes, then the next edits. So a
block or a slot may change owner between two steps and no copy is ever protected by more than its place in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache import edits as edit
from deepinfer.cache.blocks import BLOCK_TOKENS, NULL_BLOCK, blocks_for
from deepinfer.cache.draft_window import DraftWindow
from deepinfer.cache.formats import KVFormat, check_drafts, format_problem, rounding
from deepinfer.cache.host_memory import OffloadedSequence, WindowArena, put, take
from deepinfer.cache.records import LastTokens, OpenRows, PagedRecords, WindowRings
from deepinfer.cache.step import StepView, crossings
from deepinfer.config import check_whole_number
from deepinfer.model.batch import Batch
from deepinfer.model.config import ModelConfig

if TYPE_CHECKING:
    from deepinfer.model.backbone import DeepseekV41


class CacheStorage:
    """State of up to `max_num_seqs` sequences in `num_blocks` blocks of 128 tokens, blocks 1 .. num_blocks; block 0 is
    what an unset table entry names.

    A slot is a sequence's place for what does not grow (window rings, open rows, last tokens); its block table names
    the blocks of what does. drafts: tokens that may be taken back (`truncate`); with any, the model's draft stages have
    window rings, too. window_entries: windows that host memory holds for later hits; without any, no replica is kept
    either. kv_format: see formats.py. padded_rows: rows of the largest step that a `GraphView` is to be made for; with
    any, there is a null slot behind the others, and the staging area has room for as many rows from the start.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_num_seqs: int,
        num_blocks: int,
        drafts: int = 0,
        kv_format: str = "float32",
        window_entries: int = 0,
        padded_rows: int = 0,
        device: torch.device,
    ) -> None:
        """Raises ValueError naming the argument."""
        check_whole_number("max_num_seqs", max_num_seqs)
        check_whole_number("num_blocks", num_blocks)
        check_whole_number("window_entries", window_entries, least=0)
        check_drafts(drafts)
        kind = KVFormat.named(kv_format)
        self.rounds = rounding(config, kind, device)
        self.config, self.drafts, self.device = config, drafts, device
        self.max_num_seqs, self.num_blocks = max_num_seqs, num_blocks
        self.records = {
            layer: PagedRecords(config, layer, num_blocks, kind, device) for layer in config.kv_source_layer_ids
        }
        self.null_slot, slots = max_num_seqs, max_num_seqs + (padded_rows > 0)
        self.windows = WindowRings(
            config, slots, kind, device, drafts=drafts, replicas=window_entries > 0, staging_rows=max(padded_rows, 1)
        )
        self.open_rows = OpenRows(config, slots, device, drafts=drafts)
        self.last_tokens = LastTokens(config, slots, device, drafts=drafts).ids
        width = min(blocks_for(config.max_position_embeddings), num_blocks)
        self.host_tables = np.full((slots, width), NULL_BLOCK, np.int64)
        self.tables = torch.from_numpy(self.host_tables).to(device)  # on a CPU the same memory
        self.stored_windows = WindowArena(self.windows, window_entries)
        self._capacity = np.zeros(max_num_seqs, np.int64)  # tokens that the slot's table has blocks for
        self._lengths = np.zeros(max_num_seqs, np.int64)  # tokens written
        self._furthest = np.zeros(max_num_seqs, np.int64)  # ever written, also if taken back
        self._replicas = np.full((max_num_seqs, 2), -1, np.int64)  # whose boundary each of the two replicas holds
        self._numbers = (self._lengths, self._furthest, self._replicas)  # what moves with a sequence
        self._offloaded: dict[int, OffloadedSequence] = {}  # by ticket
        self._carry_out: dict[type, Callable[..., None]] = {
            edit.OpenSlot: self._open_slot,
            edit.SetTable: self._set_table,
            edit.SetLength: self._set_length,
            edit.CopyBlock: self._copy_block,
            edit.CopySlot: self._copy_slot,
            edit.SaveWindow: self._save_window,
            edit.LoadWindow: self._load_window,
            edit.Offload: self._offload,
            edit.Restore: self._restore,
            edit.ForgetTicket: self._forget,
            edit.ForgetAll: lambda _: self._offloaded.clear(),
        }

    @classmethod
    def for_model(
        cls,
        model: DeepseekV41,
        *,
        max_num_seqs: int,
        num_blocks: int,
        drafts: int = 0,
        kv_format: str | None = None,
        window_entries: int = 0,
        padded_rows: int = 0,
    ) -> CacheStorage:
        """kv_format None: the numerics' own type. ValueError for one that would round a float32 model's records."""
        if kv_format is None:
            kv_format = str(model.numerics.dtype).removeprefix("torch.")
        if (problem := format_problem(kv_format, model.numerics.dtype)) is not None:
            raise ValueError(problem)
        return cls(
            model.config,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            drafts=drafts,
            kv_format=kv_format,
            window_entries=window_entries,
            padded_rows=padded_rows,
            device=model.device,
        )

    # -- steps ----------------------------------------------------------------------------------------------------

    def length(self, slot: int) -> int:
        """Tokens of the slot's sequence whose state is written."""
        return int(self._lengths[slot])

    def lengths(self, slots: np.ndarray) -> np.ndarray:
        """The same of many slots, int64 [n]."""
        return self._lengths[slots]

    def begin(self, batch: Batch) -> StepView:
        """Check a step and plan its reads and writes. ValueError: see `check`."""
        self.check(batch)
        return StepView(self, batch)

    def check(self, batch: Batch) -> None:
        """ValueError: a chunk that does not start at the slot's written length, blocks that are not in the slot's
        table, a slot that does not exist."""
        slots = batch.chunk_slots
        if int(slots.min()) < 0 or int(slots.max()) >= self.max_num_seqs:
            raise ValueError(f"slots must be in 0 .. {self.max_num_seqs - 1}")
        wrong = batch.starts != self._lengths[slots]
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"slot {slots[i]}: chunk starts at {batch.starts[i]}, {self._lengths[slots[i]]} tokens are written"
            )
        short = batch.ends > self._capacity[slots]
        if short.any():
            i = int(short.argmax())
            raise ValueError(f"slot {slots[i]}: no blocks reserved for {batch.ends[i]} tokens")

    def advance(self, batch: Batch) -> None:
        """The step's tokens count as written from here on; `StepView.commit` calls it after the last layer."""
        slots = batch.chunk_slots
        self._lengths[slots] = batch.ends
        self._furthest[slots] = np.maximum(self._furthest[slots], batch.ends)
        if self.windows.replicas:
            passed = crossings(batch)
            multiples = batch.ends[passed] // BLOCK_TOKENS
            self._replicas[slots[passed], multiples % 2] = multiples * BLOCK_TOKENS

    def truncate(self, slots: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Take tokens back (rejected drafts): each sequence ends at its length again and is written on from there.

        ValueError, before anything is changed, where more than `drafts` tokens below the furthest position ever written
        would be gone: the rings hold no more.
        """
        slots, lengths = np.atleast_1d(slots), np.atleast_1d(lengths)
        written, furthest = self._lengths[slots], self._furthest[slots]
        wrong = (lengths < np.maximum(furthest - self.drafts, 0)) | (lengths > written)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"slot {slots[i]}: cannot go back from {written[i]} to {lengths[i]} tokens; {furthest[i]} were written "
                f"once and at most {self.drafts} of them (drafts) may be taken back"
            )
        self._end_at(slots, lengths)

    def _end_at(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """The sequences are this long. A replica of a boundary further on may hold rows that are gone: it is forgotten,
        and copied again when its boundary is passed again."""
        self._lengths[slots] = lengths
        held = self._replicas[slots]  # [n, 2]
        self._replicas[slots] = np.where(held > lengths[:, None], -1, held)

    def begin_drafts(self, slots: np.ndarray, block: int) -> DraftWindow:
        """What a draft pass over `block` rows per slot reads, the first of them at the slot's length. ValueError where
        there are no draft layers."""
        if not self.windows.draft_layers:
            raise ValueError("this cache was made without drafts, or for a model without draft stages")
        return DraftWindow(self.windows, slots, self._lengths[slots], block, self.rounds)

    # -- edits ----------------------------------------------------------------------------------------------------

    def apply(self, edits: Iterable[edit.Edit]) -> None:
        """Carry out what the host ordered, in order. ValueError for an order that contradicts what is here."""
        for order in edits:
            self._carry_out[type(order)](order)

    def _open_slot(self, order: edit.OpenSlot) -> None:
        slot = order.slot
        self._put_table(slot, slice(None), NULL_BLOCK)
        self.last_tokens[slot] = -1
        self._capacity[slot] = self._lengths[slot] = self._furthest[slot] = 0
        self._replicas[slot] = -1

    def _set_table(self, order: edit.SetTable) -> None:
        end = order.first + len(order.blocks)
        if order.first * BLOCK_TOKENS > self._capacity[order.slot] or end > self.tables.shape[1]:
            raise ValueError(
                f"slot {order.slot}: table entries {order.first} to {end} do not continue a table of "
                f"{self._capacity[order.slot] // BLOCK_TOKENS} of at most {self.tables.shape[1]} blocks"
            )
        self._put_table(order.slot, slice(order.first, end), order.blocks)
        self._capacity[order.slot] = max(self._capacity[order.slot], end * BLOCK_TOKENS)

    def _put_table(self, slot: int, places: slice, blocks: Sequence[int] | int) -> None:
        self.host_tables[slot, places] = blocks
        if self.device.type != "cpu":
            # A page-locked copy of its own, so that nobody waits for the steps before: the table may change again.
            entries = torch.from_numpy(self.host_tables[slot, places]).pin_memory()
            self.tables[slot, places].copy_(entries, non_blocking=True)

    def _set_length(self, order: edit.SetLength) -> None:
        slot, length = order.slot, order.length
        if length > self._capacity[slot]:
            raise ValueError(f"slot {slot}: {length} tokens do not fit into its {self._capacity[slot]}")
        self._furthest[slot] = length
        self._end_at(np.array([slot]), np.array([length]))
        size, count = self.last_tokens.shape[1], len(order.last_tokens)
        if not size or not count:
            return
        if count > min(length, size):
            raise ValueError(f"slot {slot}: {count} last tokens for a length of {length}")
        ids = torch.tensor(order.last_tokens)
        ids[ids == self.config.image_token_id] = -1  # as in token_history: pictures end n-grams
        places = torch.arange(length - count, length) % size
        self.last_tokens[slot, places.to(self.device)] = ids.to(self.device)

    def _copy_block(self, order: edit.CopyBlock) -> None:
        for records in self.records.values():
            records.copy_block(order.source, order.target)

    def _copy_slot(self, order: edit.CopySlot) -> None:
        source, target = order.source, order.target
        self.windows.copy_slot(source, target)
        self.open_rows.copy_slot(source, target)
        self.last_tokens[target] = self.last_tokens[source]
        for numbers in self._numbers:
            numbers[target] = numbers[source]

    def _save_window(self, order: edit.SaveWindow) -> None:
        slot, boundary = order.slot, order.boundary
        if self._replicas[slot, boundary // BLOCK_TOKENS % 2] != boundary:
            raise ValueError(
                f"slot {slot}: no replica of the window below {boundary}, its two hold {self._replicas[slot].tolist()}"
            )
        self.stored_windows.save(slot, boundary, order.entry)

    def _load_window(self, order: edit.LoadWindow) -> None:
        self.stored_windows.load(order.entry, order.slot, order.boundary)

    def _offload(self, order: edit.Offload) -> None:
        slot = order.slot
        parts = take(self, slot, self._ids(order.blocks))
        self._offloaded[order.ticket] = OffloadedSequence(
            len(order.blocks), parts, [numbers[slot].copy() for numbers in self._numbers]
        )

    def _restore(self, order: edit.Restore) -> None:
        kept = self._offloaded.pop(order.ticket)
        if len(order.blocks) != kept.blocks:
            raise ValueError(f"ticket {order.ticket}: {kept.blocks} blocks were kept, {len(order.blocks)} are given")
        put(self, order.slot, self._ids(order.blocks), kept.parts)
        for numbers, value in zip(self._numbers, kept.numbers, strict=True):
            numbers[order.slot] = value

    def _forget(self, order: edit.ForgetTicket) -> None:
        del self._offloaded[order.ticket]

    # -- looking in -----------------------------------------------------------------------------------------------

    def block_checksums(self, blocks: Sequence[int]) -> np.ndarray:
        """A number per block, int64 [n], that changes with any bit of any of its records."""
        ids, total = self._ids(blocks), np.zeros(len(blocks), np.int64)
        for records in self.records.values():
            for pool in records.blocks():
                taken = pool[ids].flatten(1).contiguous().view(torch.uint8).cpu().numpy().astype(np.int64)
                weights = np.arange(1, taken.shape[1] + 1) * 2_654_435_761  # odd, so no byte's change can cancel out
                total = total * 1_000_003 + (taken + 1) @ weights
        return total

    def window_rows(self, slot: int) -> torch.Tensor:
        """Window records of the slot's last positions, oldest first: [layers, min(window, length), width]."""
        rings, length = self.windows, self.length(slot)
        positions = torch.arange(max(0, length - rings.window), length, device=self.device)
        return rings.pool[:, slot * rings.ring + positions % rings.ring]

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)
