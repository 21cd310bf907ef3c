"""Attention of one layer: shared-latent queries over the window and the selected compressed entries (2.4, 2.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.compressor import Compressor
from deepinfer.model.config import ModelConfig
from deepinfer.model.indexer import Indexer, Selection
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource

if TYPE_CHECKING:
    from deepinfer.model.state import StepState


class Attention:
    """Window KV is the layer's own; compressed KV, index keys and the choice of entries come from the sources that the
    config names."""

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, numerics: Numerics) -> None:
        prefix = f"layers.{layer}.attn"
        self.layer, self.numerics, self.eps = layer, numerics, config.rms_norm_eps
        self.heads, self.head_dim, self.groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.kv_source = config.kv_source(layer) if config.ratio(layer) else None
        self.wq_a = source.matrix(f"{prefix}.wq_a")
        self.q_norm = source.vector(f"{prefix}.q_norm.weight")
        self.wq_b = source.matrix(f"{prefix}.wq_b")
        self.wkv = source.matrix(f"{prefix}.wkv")
        self.kv_norm = source.vector(f"{prefix}.kv_norm.weight")
        self.wo_a = source.grouped(f"{prefix}.wo_a", self.groups)  # one [o_lora_rank, K] per group
        self.wo_b = source.matrix(f"{prefix}.wo_b")
        self.sink = source.vector(f"{prefix}.attn_sink")
        self.compressor = Compressor(config, source, layer, numerics) if config.owns_kv(layer) else None
        self.indexer = Indexer(config, source, layer, numerics) if config.owns_index(layer) else None

    def __call__(self, x: Tensor, state: StepState, selection: Selection) -> Tensor:
        """x [N, D], normalised -> [N, D]. Reads and writes the step's state; updates `selection` at index sources."""
        cos, sin = state.window_rope if self.kv_source is None else state.compressed_query_rope
        latent_query = select.project(x, self.wq_a, rounded=True)
        latent_query = select.rms_norm(latent_query, self.q_norm, self.eps)  # [N, q_lora_rank]
        q = select.project(latent_query, self.wq_b, rounded=True).unflatten(1, (self.heads, self.head_dim))
        q = select.apply_rope(q, cos, sin)  # [N, heads, head_dim]
        kv = select.rms_norm(select.project(x, self.wkv, rounded=True), self.kv_norm, self.eps)
        window = state.stage_window(self.layer, self.numerics.window_record(select.apply_rope(kv, cos, sin)))
        if self.compressor is not None:
            self.compressor(x, state)
        if self.indexer is not None:
            self.indexer.select(x, latent_query, cos, sin, state, selection)
        kv_pool, kv_rows = None, None
        if self.kv_source is not None:
            assert selection.entries is not None
            kv_pool = state.kv_pool(self.kv_source)
            kv_rows = state.selected_rows(self.kv_source, selection.entries)
        o = select.sparse_attention(q, window, state.window_indices, kv_pool, kv_rows, self.sink, self.head_dim**-0.5)
        state.commit_window(self.layer)
        return self._project(select.apply_rope(o, cos, sin, inverse=True))

    def _project(self, o: Tensor) -> Tensor:
        """Grouped low-rank output: each group of heads has its own wo_a rows. o [N, heads, head_dim] -> [N, D]."""
        groups = o.flatten(1).unflatten(1, (self.groups, -1))  # [N, groups, heads / groups * head_dim]
        # bf16 activations even in the official numerics: the release dequantises wo_a (spec 2.4, step 6)
        z = torch.cat([select.project(groups[:, g], self.wo_a[g], rounded=False) for g in range(self.groups)], dim=1)
        return select.project(z, self.wo_b, rounded=True)
