"""Attention of one layer: shared-latent queries over the window and the selected compressed entries (2.4, 2.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels import select
from deepinfer.kernels.layer_weights import OutputWeights, QueryWeights
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
        self.layer, self.numerics = layer, numerics
        self.scale = config.head_dim**-0.5
        self.kv_source = config.kv_source(layer) if config.ratio(layer) else None
        sizes = {
            "heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "rope_dim": config.qk_rope_head_dim,
        }
        self.queries = QueryWeights(
            wq_a=source.matrix(f"{prefix}.wq_a"),
            q_norm=source.vector(f"{prefix}.q_norm.weight"),
            wq_b=source.matrix(f"{prefix}.wq_b"),
            wkv=source.matrix(f"{prefix}.wkv"),
            kv_norm=source.vector(f"{prefix}.kv_norm.weight"),
            eps=config.rms_norm_eps,
            **sizes,
        )
        self.output = OutputWeights(
            wo_a=source.grouped(f"{prefix}.wo_a", config.o_groups), wo_b=source.matrix(f"{prefix}.wo_b"), **sizes
        )
        self.sink = source.vector(f"{prefix}.attn_sink")
        self.compressor = Compressor(config, source, layer, numerics) if config.owns_kv(layer) else None
        self.indexer = Indexer(config, source, layer, numerics) if config.owns_index(layer) else None

    def __call__(self, x: Tensor, state: StepState, selection: Selection) -> Tensor:
        """x [N, D], normalised -> [N, D]. Reads and writes the step's state; updates `selection` at index sources."""
        cos, sin = state.window_rope if self.kv_source is None else state.compressed_query_rope
        latent_query, q, kv = select.query_and_window(x, self.queries, cos, sin)
        window = state.stage_window(self.layer, self.numerics.window_record(kv))
        if self.compressor is not None:
            self.compressor(x, state)
        if self.indexer is not None:
            self.indexer.select(x, latent_query, cos, sin, state, selection)
        kv_pool, kv_rows = None, None
        if self.kv_source is not None:
            assert selection.entries is not None
            kv_pool = state.kv_pool(self.kv_source)
            kv_rows = state.selected_rows(self.kv_source, selection.entries)
        o = select.sparse_attention(q, window, state.window_indices, kv_pool, kv_rows, self.sink, self.scale)
        state.commit_window(self.layer)
        return select.grouped_output(o, self.output, cos, sin)
