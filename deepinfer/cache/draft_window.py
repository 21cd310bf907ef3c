"""What a draft pass sees of the cache: the target's last window as the draft layers keep it, and the block itself.

Every row of a slot's block sees the same rows: positions n - W .. n - 1, n being the slot's length, and all rows of the
block, also those behind it (the block is no causal sequence). The block's rows live in the staging area for the length
of a layer and are never committed: the step that verifies the drafts writes the rings.

Nothing else bounds what is shown, neither where a replay started nor where truncation began (`window_floor`,
`keep_from`). Both lie too far back to matter: a hit ends at least a window and a verify step before the last known
token (prefix.ReplayPolicy.margin, 134 = 128 + 6), and as many rows of a prompt's end pass the last layers
(yoco_keep_tokens), so all W rows before n were written by this sequence, in this slot, with all taps. A sequence that
was driven otherwise finds older rows of its slot there, which costs acceptance and never a token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.records import WindowRings
from deepinfer.model.state import Rounding


class _Blocks:
    """Blocks of drafts behind the rings of their slots."""

    positions: Tensor
    indices: Tensor

    def __init__(self, rings: WindowRings, rounds: Rounding) -> None:
        self._rings, self.rounds = rings, rounds

    def places(self, layer: int, count: int) -> Tensor | None:
        """As `RowsView.window_places`."""
        return self._rings.places(layer, count) if self.rounds.latents else None

    def stage(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Show the block's entries kv [R * block, D] of a draft layer to its attention -> the pool, `indices`."""
        return self._rings.stage(layer, kv), self.indices


class DraftWindow(_Blocks):
    """Made by `CacheStorage.begin_drafts`, for R slots.

    positions: int64 [R * block], n .. n + block - 1 of each slot. indices: int64 [R * block, W + block], rows of a
    layer's pool that each row reads: positions max(0, n - W) .. n - 1, oldest first, then -1; then the block.
    """

    def __init__(
        self, rings: WindowRings, slots: np.ndarray, lengths: np.ndarray, block: int, rounds: Rounding
    ) -> None:
        """slots, lengths: int64 [R]."""
        super().__init__(rings, rounds)
        device = rings.pool.device
        wanted = np.maximum(lengths - rings.window, 0)[:, None] + np.arange(rings.window)  # [R, W]
        context = np.where(wanted < lengths[:, None], slots[:, None] * rings.ring + wanted % rings.ring, -1)
        own = rings.staging + np.arange(len(slots) * block).reshape(-1, block)  # [R, block]
        seen = torch.from_numpy(np.concatenate((context, own), axis=1)).to(device)
        self.positions = torch.from_numpy((lengths[:, None] + np.arange(block)).ravel()).to(device)
        self.indices = seen.repeat_interleave(block, dim=0)


class PaddedDraftWindow(_Blocks):
    """The same for slots and lengths that only the device knows, int64 [R] both; the null slot's block sees itself."""

    def __init__(self, rings: WindowRings, slots: Tensor, lengths: Tensor, block: int, rounds: Rounding) -> None:
        super().__init__(rings, rounds)
        device = slots.device
        wanted = (lengths - rings.window).clamp_min(0)[:, None] + torch.arange(rings.window, device=device)  # [R, W]
        context = torch.where(wanted < lengths[:, None], slots[:, None] * rings.ring + wanted % rings.ring, -1)
        own = rings.staging + torch.arange(len(slots) * block, device=device).view(-1, block)  # [R, block]
        self.positions = (lengths[:, None] + torch.arange(block, device=device)).flatten()
        seen = torch.cat((context, own), 1)  # [R, W + block]
        self.indices = seen.unsqueeze(1).expand(-1, block, -1).flatten(0, 1)
