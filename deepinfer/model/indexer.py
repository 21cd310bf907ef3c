"""Lightning indexer of an index source: keys where it owns KV, queries and the choice of entries (section 2.6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource

if TYPE_CHECKING:
    from deepinfer.model.state import StepState


@dataclass
class Selection:
    """What index sources hand to the layers after them in one step."""

    entries: Tensor | None = None  # int64 [N, K] chosen entries, ascending, -1 = empty
    candidates: list[Tensor | None] = field(default_factory=list)  # per segment bool [rows, M]; None = all visible
    blocks: Tensor | None = None  # the same of paged keys: int32 [N, blocks] of candidate blocks, None = all visible


class IndexKeys:
    """Keys of a KV source's entries."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        self.wk = source.matrix(f"{prefix}.wk")
        self.norm = source.vector(f"{prefix}.k_norm.weight")
        self.eps = config.rms_norm_eps

    def __call__(self, latents: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Latents before RoPE [G, head_dim] and the rotation of their positions -> [G, index_head_dim], before their
        records are rounded."""
        keys = select.rms_norm(select.project(latents, self.wk, rounded=False), self.norm, self.eps)
        return select.apply_rope(keys, cos, sin)


class Indexer:
    """Queries, weights and the top-k of one index source."""

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, numerics: Numerics) -> None:
        prefix = f"layers.{layer}.attn.indexer"
        self.layer, self.config, self.numerics = layer, config, numerics
        self.kv_source = config.kv_source(layer)
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = source.matrix(f"{prefix}.wq_b")
        self.weights_proj = source.matrix(f"{prefix}.weights_proj")
        self.scale = self.dim**-0.5 * self.heads**-0.5
        self.publishes = config.candidate_source_layer_id == layer
        self.filtered = config.is_candidate_user(layer)

    def select(
        self, x: Tensor, latent_query: Tensor, cos: Tensor, sin: Tensor, state: StepState, selection: Selection
    ) -> None:
        """Choose entries for every row: x [N, D] and latent_query [N, q_lora_rank] are the attention's own input and
        query bottleneck. Updates `selection` in place."""
        assert self.kv_source is not None
        config = self.config
        if state.rounds.keys:
            self._select_paged(x, latent_query, cos, sin, state, selection)
            return
        queries = select.project(latent_query, self.wq_b, rounded=True).unflatten(1, (self.heads, self.dim))
        queries = self.numerics.index_record(select.apply_rope(queries, cos, sin))  # [N, heads, dim]
        weights = select.project(x, self.weights_proj, rounded=False) * self.scale  # [N, heads]
        width = min(self.topk, max(1, state.most_visible(self.kv_source)))
        entries = torch.full((x.shape[0], width), -1, dtype=torch.int64, device=x.device)
        if self.publishes:
            selection.candidates = []
        pool = state.key_pool(self.kv_source)
        for number, segment in enumerate(state.segments(self.kv_source)):
            rows, visible = segment.rows, segment.visible  # [B, T]
            most = segment.key_rows.shape[1]
            allowed = selection.candidates[number] if self.filtered else None
            narrow = self.publishes and -(-most // config.candidate_block_size) > config.candidate_topk_blocks
            if self.publishes:
                selection.candidates.append(None)
            if most <= self.topk:  # everything visible is chosen, no score matters
                chosen = torch.arange(width, device=x.device).expand(rows.numel(), width)
                entries[rows.flatten()] = chosen.masked_fill(chosen >= visible.reshape(-1, 1), -1)
                continue
            if segment.whole:
                asked = queries.unflatten(0, rows.shape), weights.unflatten(0, rows.shape)
            else:
                asked = queries[rows], weights[rows]
            scores = select.index_scores(
                asked[0], pool, segment.key_rows, asked[1], visible, invariant=self.numerics.invariant
            ).flatten(0, 1)
            state.trace(f"layers.{self.layer}.index_score", scores)  # [B * T, M], -inf where not visible
            if narrow:
                selection.candidates[number] = select.candidate_mask(
                    scores,
                    visible.flatten(),
                    block_size=config.candidate_block_size,
                    topk_blocks=config.candidate_topk_blocks,
                )
            best = select.top_entries(scores, self.topk, allowed)
            if segment.whole:
                entries = best
            else:
                entries[rows.flatten()] = best
        selection.entries = entries
        state.trace(f"layers.{self.layer}.topk", entries)

    def _select_paged(
        self, x: Tensor, latent_query: Tensor, cos: Tensor, sin: Tensor, state: StepState, selection: Selection
    ) -> None:
        """The same for all rows at once, over keys in pages."""
        assert self.kv_source is not None
        config, keys = self.config, state.view.paged_keys(self.kv_source)
        narrow = keys.most > config.candidate_block_size * config.candidate_topk_blocks
        queries = select.project(latent_query, self.wq_b, rounded=True)
        weights = select.project_wide(x, self.weights_proj)
        selection.entries, blocks = select.choose_entries(
            (queries, weights, cos, sin, self.scale),
            keys,
            topk=self.topk,
            publish=config.candidate_topk_blocks if self.publishes and narrow else 0,
            candidates=selection.blocks if self.filtered else None,
        )
        if self.publishes:
            selection.blocks = blocks
        state.trace(f"layers.{self.layer}.topk", selection.entries)
