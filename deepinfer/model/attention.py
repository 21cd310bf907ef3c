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
        prefix = f"{config.layer_prefix(layer)}.attn"
        self.layer, self.numerics = layer, numerics
        self.scale = config.head_dim**-0.5
        self.kv_source = config.kv_source(layer) if config.ratio(layer) else None
        sizes = {
            "heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "rope_dim": config.qk_rope_head_dim,
        }
        stacked, (wq_a, wkv) = source.stacked((f"{prefix}.wq_a", f"{prefix}.wkv"))
        self.queries = QueryWeights(
            wq_a=wq_a,
            q_norm=source.vector(f"{prefix}.q_norm.weight"),
            wq_b=source.heads(f"{prefix}.wq_b", config.head_dim),
            wkv=wkv,
            kv_norm=source.vector(f"{prefix}.kv_norm.weight"),
            eps=config.rms_norm_eps,
            stacked=stacked,
            **sizes,
        )
        self.output = OutputWeights(
            wo_a=source.grouped(f"{prefix}.wo_a", config.o_groups, config.head_dim),
            wo_b=source.matrix(f"{prefix}.wo_b"),
            **sizes,
        )
        self.sink = source.vector(f"{prefix}.attn_sink")
        self.compressor = Compressor(config, source, layer, numerics) if config.owns_kv(layer) else None
        self.indexer = Indexer(config, source, layer, numerics) if config.owns_index(layer) else None

    def __call__(self, x: Tensor, state: StepState, selection: Selection) -> Tensor:
        """x [N, D], normalised -> [N, D]. Reads and writes the step's state; updates `selection` at index sources."""
        cos, sin = state.query_rope(self.kv_source is not None)
        places = state.window_places(self.layer, len(x))
        latent_query, q, kv = select.query_and_window(x, self.queries, cos, sin, places)
        window = self._leave_keys(x, kv, state)
        y = self._ask(x, latent_query, q, window, state, selection)
        state.commit_window(self.layer)
        return y

    def narrowing(self, x: Tensor, state: StepState, selection: Selection) -> Tensor:
        """The last KV source where not all rows go on: all of x [N, D] leave their keys, then the step narrows, and the
        kept rows ask, with all that their windows hold -> [M, D] (spec/engine.md 3.8)."""
        kept, commit_window = state.kept, state.commit_window
        assert kept is not None
        cos, sin = state.query_rope(self.kv_source is not None)
        pool, indices = self._leave_keys(x, select.window_latents(x, self.queries, cos, sin), state)
        state.narrow()
        y, x = x.new_empty(0, x.shape[1]), x[kept]
        if len(kept):
            cos, sin = state.query_rope(self.kv_source is not None)
            latent_query, q, _ = select.query_and_window(x, self.queries, cos, sin)
            y = self._ask(x, latent_query, q, (pool, indices[kept]), state, selection)
        commit_window(self.layer)
        return y

    def _leave_keys(self, x: Tensor, kv: Tensor, state: StepState) -> tuple[Tensor, Tensor]:
        """Window entries into the staging area, compressed entries and index keys into their blocks -> what
        `stage_window` gives."""
        window = state.stage_window(self.layer, kv if state.rounds.latents else self.numerics.window_record(kv))
        if self.compressor is not None:
            self.compressor(x, state)
        return window

    def _ask(
        self,
        x: Tensor,
        latent_query: Tensor,
        q: Tensor,
        window: tuple[Tensor, Tensor],
        state: StepState,
        selection: Selection,
    ) -> Tensor:
        """Choose entries where this is an index source, attend, project -> [N, D]."""
        cos, sin = state.query_rope(self.kv_source is not None)
        if self.indexer is not None:
            self.indexer.select(x, latent_query, cos, sin, state, selection)
        return select.grouped_output(self._attend(x, q, window, state, selection.entries), self.output, cos, sin)

    def _attend(
        self, x: Tensor, q: Tensor, window: tuple[Tensor, Tensor], state: StepState, entries: Tensor | None
    ) -> Tensor:
        """The heads' outputs [N, heads, head_dim], in the order of the queries."""
        split, source = select.in_split_order(x, self.queries), self.kv_source
        if split and not self.numerics.invariant and select.unpacks_keys(q, window[0]):
            chosen: tuple[Tensor | None, Tensor | None] | None = None, None
            if source is not None:
                assert entries is not None
                chosen = state.unpacked_keys(source, entries)
            if chosen is not None:
                return select.attention_over_unpacked(q, *window, *chosen, self.sink, self.scale)
        kv_pool, kv_rows = None, None
        if source is not None:
            assert entries is not None
            kv_pool, kv_rows = state.kv_pool(source), state.selected_rows(source, entries)
        return select.sparse_attention(
            q, *window, kv_pool, kv_rows, self.sink, self.scale, split=split, invariant=self.numerics.invariant
        )
