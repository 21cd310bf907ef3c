"""Compressor of a KV source: one latent per token or per pair of tokens, for its index keys and its records (2.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig
from deepinfer.model.indexer import IndexKeys
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource

if TYPE_CHECKING:
    from deepinfer.model.state import StepState


class Compressor:
    """Closes groups, and writes their entries and index keys before anything of the step reads them."""

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, numerics: Numerics) -> None:
        prefix = f"layers.{layer}.attn"
        self.layer, self.ratio = layer, config.ratio(layer)
        self.eps, self.numerics = config.rms_norm_eps, numerics
        self.wkv = source.matrix(f"{prefix}.compressor.wkv")
        self.wgate = source.matrix(f"{prefix}.compressor.wgate") if self.ratio == 2 else None
        self.norm = source.vector(f"{prefix}.compressor.norm.weight")
        self.keys = IndexKeys(config, source, f"{prefix}.indexer")

    def __call__(self, x: Tensor, state: StepState) -> None:
        """x [N, D]: the attention's normalised input."""
        latents = self._latents(x, state)  # [G, head_dim], before RoPE
        if latents.shape[0] == 0:
            return
        cos, sin = state.compressed_rope(state.entry_positions(self.layer))
        keys, kv = self.keys(latents, cos, sin), select.apply_rope(latents, cos, sin)
        keys = keys if state.rounds.keys else self.numerics.index_record(keys)
        kv = kv if state.rounds.latents else self.numerics.compressed_record(kv)
        state.trace(f"layers.{self.layer}.compressed_kv", kv)
        state.trace(f"layers.{self.layer}.index_k", keys)
        state.write_entries(self.layer, kv, keys)

    def _latents(self, x: Tensor, state: StepState) -> Tensor:
        if self.wgate is None:
            rows = state.closing_rows(self.layer)
            x = x if rows is None else x[rows]
            return select.rms_norm(select.project(x, self.wkv, rounded=False), self.norm, self.eps)
        # ratio 2 projects, weighs and pools in float32 whatever the activations are
        values, gates = (select.project_wide(x, weight) for weight in (self.wkv, self.wgate))
        rows = torch.stack((values, gates), dim=1)  # [N, 2, head_dim]
        first, second = state.close_pairs(self.layer, rows)
        return select.compress_pairs(first, second, self.norm, self.eps, self.numerics.dtype)
