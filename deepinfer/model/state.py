"""What the layers of one step share: the cache's view of it, positions turned into rotations, and the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.kernels.reference.rope import rope_angles, rope_frequencies, yarn_frequencies
from deepinfer.kernels.select import PagedKeys
from deepinfer.model.batch import Batch
from deepinfer.model.config import ModelConfig
from deepinfer.model.taps import Taps

Trace = Callable[[str, Tensor], None]


class Segment(Protocol):
    """Rows that are scored against the same keys; `cache.step.Segment` says the shapes."""

    @property
    def rows(self) -> Tensor: ...

    @property
    def key_rows(self) -> Tensor: ...

    @property
    def visible(self) -> Tensor: ...

    @property
    def whole(self) -> bool: ...


class Rounding(NamedTuple):
    """Which records a cache rounds itself, as the bfloat16 numerics would."""

    latents: bool = False  # window and compressed records
    keys: bool = False  # index keys, which lie in pages then


class StepBatch(Protocol):
    """The rows of a step, int64 [N] each, on the device; `batch.Batch` and `cache.graph_step.StepRows` have them."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def row_starts(self) -> Tensor: ...
    @property
    def logit_rows(self) -> Tensor | slice: ...


class CacheView(Protocol):
    """One step's reads and writes of a cache; `cache.step.StepView` implements it and says the shapes, and so does
    `cache.graph_step.GraphView`."""

    @property
    def batch(self) -> StepBatch: ...
    @property
    def narrowed(self) -> tuple[Tensor, CacheView] | None: ...
    @property
    def keeps_drafts(self) -> bool: ...
    @property
    def rounds(self) -> Rounding:
        """Which records are rounded where they are written, so that they come as they are."""
        ...

    def draft_context(self) -> tuple[Tensor | None, CacheView]: ...
    def window_places(self, layer: int, count: int) -> Tensor | None: ...
    def stage_window(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]: ...
    def commit_window(self, layer: int) -> None: ...
    def commit(self) -> None: ...
    def close_pairs(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]: ...
    def closing_rows(self, layer: int) -> Tensor | None: ...
    def entry_positions(self, layer: int) -> Tensor: ...
    def write_entries(self, layer: int, kv: Tensor, keys: Tensor) -> None: ...
    def kv_pool(self, layer: int) -> Tensor: ...
    def key_pool(self, layer: int) -> Tensor: ...
    def visible(self, layer: int) -> Tensor: ...
    def most_visible(self, layer: int) -> int: ...
    def entry_rows(self, layer: int, entries: Tensor) -> Tensor: ...
    def seen_entries(self, layer: int, most: int) -> tuple[Tensor, Tensor | None] | None: ...
    def segments(self, layer: int) -> Sequence[Segment]: ...
    def paged_keys(self, layer: int) -> PagedKeys: ...
    def token_history(self, live_ids: Tensor, lookback: int) -> Tensor: ...


class BlockWindow(Protocol):
    """What the blocks of one draft pass see of the cache; `cache.draft_window.DraftWindow` implements it."""

    positions: Tensor  # int64 [R * block]

    @property
    def rounds(self) -> Rounding: ...

    def places(self, layer: int, count: int) -> Tensor | None: ...
    def stage(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]: ...


class ModelCache(Protocol):
    """A cache as the forward pass sees it."""

    def begin(self, batch: Batch) -> CacheView: ...


class Rotations:
    """The two sets of RoPE frequencies: plain for ratio-0 layers, YaRN for layers that read compressed KV."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        self.window = rope_frequencies(dim, config.rope_theta).to(device)
        compressed = yarn_frequencies(
            dim,
            config.compress_rope_theta,
            factor=scaling.factor,
            original_length=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
        self.compressed = compressed.to(device)


class StepState:
    """Handed through the layers. Everything that touches the cache goes to the view unchanged.

    kept: rows that go past the last KV source, int64 [M]; None = all. `narrow` leaves the others behind.
    """

    def __init__(
        self,
        view: CacheView,
        rotations: Rotations,
        dead: Tensor | None,
        trace: Trace | None,
        taps: Taps | None = None,
    ) -> None:
        positions = view.batch.positions
        self.dead = dead  # bool [N], image tokens; None = none in this step
        self.window_rope = rope_angles(positions, rotations.window)
        self._compressed = rotations.compressed
        self.compressed_query_rope = rope_angles(positions, self._compressed)
        self._trace, self._taps = trace, taps
        self._look_at(view)
        self.kept = None if view.narrowed is None else view.narrowed[0]

    def _look_at(self, view: CacheView) -> None:
        self.view, self.rounds = view, view.rounds
        self._selected: tuple[int, Tensor, Tensor] | None = None
        self._unpacked: tuple[int, tuple[Tensor, Tensor | None] | None] | None = None
        self.window_places = view.window_places
        self.stage_window, self.commit_window = view.stage_window, view.commit_window
        self.close_pairs, self.closing_rows = view.close_pairs, view.closing_rows
        self.entry_positions, self.write_entries = view.entry_positions, view.write_entries
        self.kv_pool, self.key_pool = view.kv_pool, view.key_pool
        self.visible, self.most_visible, self.segments = view.visible, view.most_visible, view.segments

    def narrow(self) -> None:
        """From here on there are only the kept rows, and the view that they have of the cache."""
        assert self.view.narrowed is not None
        kept, view = self.view.narrowed
        self.dead = None if self.dead is None else self.dead[kept]
        self.window_rope = self.window_rope[0][kept], self.window_rope[1][kept]
        self.compressed_query_rope = self.compressed_query_rope[0][kept], self.compressed_query_rope[1][kept]
        self._look_at(view)
        if self._taps is not None:
            self._taps.narrow()

    def query_rope(self, compressed: bool) -> tuple[Tensor, Tensor]:
        """Rotation of the rows' own positions: cos, sin [N, dim / 2]."""
        return self.compressed_query_rope if compressed else self.window_rope

    def compressed_rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotation of compressed entries at their groups' first positions, int64 [G] -> cos, sin [G, dim / 2]."""
        return rope_angles(positions, self._compressed)

    def selected_rows(self, source: int, entries: Tensor) -> Tensor:
        """Pool rows of the chosen entries; the same choice serves several layers, so it is looked up once."""
        if self._selected is None or self._selected[0] != source or self._selected[1] is not entries:
            self._selected = (source, entries, self.view.entry_rows(source, entries))
        return self._selected[2]

    def unpacked_keys(self, source: int, entries: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keys of a source for `select.attention_over_unpacked`, and the rows of them that are chosen, [N, K]; None
        where the step sees too many. All layers that read the source share the keys: its entries of this step have been
        written when the first one asks."""
        if self._unpacked is None or self._unpacked[0] != source:
            seen = self.view.seen_entries(source, select.MOST_UNPACKED)
            made = None if seen is None else (select.unpack_entries(self.kv_pool(source), seen[0]), seen[1])
            self._unpacked = source, made
        if (unpacked := self._unpacked[1]) is None:
            return None
        keys, firsts = unpacked
        return keys, entries if firsts is None else torch.where(
            entries < 0, entries, entries + firsts.to(entries.dtype)
        )

    def listens(self, layer: int) -> bool:
        """Whether somebody wants the stream that enters a layer."""
        return self._trace is not None or (self._taps is not None and self._taps.wants(layer))

    def tap(self, layer: int, stream: Tensor) -> None:
        """Let the draft model have the stream that enters a layer, if it wants it."""
        if self._taps is not None:
            self._taps.take(layer, stream)

    def trace(self, name: str, value: Tensor) -> None:
        """Hand an intermediate to the listener, if there is one."""
        if self._trace is not None:
            self._trace(name, value)


class BlockState(StepState):
    """The state of a draft pass: its layers read a window and nothing else, and what they stage is never kept, so there
    is no view of a step behind it."""

    def __init__(self, window: BlockWindow, rope: tuple[Tensor, Tensor]) -> None:
        self.dead = self.kept = None  # drafts are text
        self.window_rope = rope
        self._trace = self._taps = None
        self.window_places, self.stage_window, self.rounds = window.places, window.stage, window.rounds
        self.commit_window = _keep_nothing


def _keep_nothing(layer: int) -> None:
    pass
