"""DSpark's draft model: a few stages behind the backbone guess the next tokens, all at once (spec/dspark.md 2).

What is unusual: the stages never run over the past. Their windows hold, for every written position, keys made of the
*backbone's* hidden states (`write_context`). A block pass then runs over the anchor (the newest token) and noise tokens
in its place for the tokens to come; every row of a block sees the whole window and the whole block. What the rows
cannot know, which tokens were really drawn before them, a low-rank bigram adds afterwards, one draft after the other
(`markov`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.kernels.reference.rope import rope_angles
from deepinfer.kernels.weights import Weight
from deepinfer.model.block import Block
from deepinfer.model.config import ModelConfig
from deepinfer.model.hyper import first_stream, taken_in
from deepinfer.model.indexer import Selection
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource
from deepinfer.model.state import BlockState, BlockWindow, CacheView, Rotations


class DraftModel:
    """The stages `mtp.*` with their heads; embedding, output head and rotations are the backbone's."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        numerics: Numerics,
        *,
        embed: Tensor,
        head: Weight,
        rotations: Rotations,
    ) -> None:
        self.config, self.numerics, self.device = config, numerics, source.device
        self.block = config.dspark_block_size
        layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_drafts)
        first, last = config.layer_prefix(layers[0]), config.layer_prefix(layers[-1])
        self.main_proj = source.matrix(f"{first}.main_proj")
        self.main_norm = source.vector(f"{first}.main_norm.weight")
        self.stages = [Block(config, source, layer, numerics) for layer in layers]
        self.norm = source.vector(f"{last}.norm.weight")
        self.markov_embed = source.embedding(f"{last}.markov_head.embed")
        self.markov_head = source.matrix(f"{last}.markov_head.head")
        self.confidence_head = source.matrix(f"{last}.confidence_head.proj")
        self.embed, self.head = embed, head
        self._frequencies = rotations.window

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Around all that one proposal asks of the model: the kernels keep the threads from one part to the next."""
        with torch.no_grad(), select.step_threads(self.device, self.numerics.dtype):
            yield

    def write_context(self, taps: Tensor, view: CacheView) -> None:
        """Keys of written positions into every stage's window: taps [N, targets * D] of the rows of `view`."""
        cos, sin = rope_angles(view.batch.positions, self._frequencies)
        x = select.project(taps, self.main_proj, rounded=True)
        # in place of the stages' own norms
        x = select.rms_norm(x, self.main_norm, self.config.rms_norm_eps, multiplied=True)
        for stage in self.stages:
            latents = select.window_latents(x, stage.attention.queries, cos, sin)
            view.stage_window(stage.layer, latents if view.rounds.latents else self.numerics.window_record(latents))
            view.commit_window(stage.layer)

    def hidden(self, anchors: Tensor, window: BlockWindow) -> Tensor:
        """One block pass: anchors int64 [R], the newest token of each sequence -> hidden states before the last norm,
        [R, block, D]. Row i of a block predicts the token i + 1 positions after the anchor."""
        ids = anchors.new_full((len(anchors), self.block), self.config.dspark_noise_token_id)
        ids[:, 0] = anchors
        with self.drafting():
            state = BlockState(window, rope_angles(window.positions, self._frequencies))
            embedded = F.embedding(ids.flatten(), self.embed).to(self.numerics.dtype)
            stream, pre = first_stream(embedded, self.config.hc_mult)
            selection, update = Selection(), None  # windows alone: nothing is ever selected
            for stage in self.stages:
                stream, pre, update = stage(stream, pre, None, state, selection, update)
            return select.hyper_collapse(taken_in(stream, update), pre).unflatten(0, ids.shape)

    def base_logits(self, hidden: Tensor, k: int) -> Tensor:
        """hidden [R, block, D] -> logits of the first k drafts without what the tokens before them add, float32
        [R, k, vocab]."""
        with self.drafting():
            x = select.rms_norm(hidden[:, :k].flatten(0, 1), self.norm, self.config.rms_norm_eps)
            return select.project_wide(x, self.head).unflatten(0, (len(hidden), k))

    def markov(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The token before a draft, int64 [R] -> what it adds to the draft's logits, float32 [R, vocab], and its
        embedding float32 [R, rank], which the confidence head reads."""
        embedding = F.embedding(previous, self.markov_embed).float()
        return select.project(embedding, self.markov_head, rounded=False), embedding

    def greedy_chain(self, anchors: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest drafts, one after the other: anchors int64 [R] and `base_logits` [R, k, vocab] -> int64 [R, k],
        and the embeddings of the tokens before them, float32 [R, k, rank]."""
        return select.markov_chain(anchors, self.markov_embed, self.markov_head, logits)

    def confidence(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """How likely drafts are to be accepted once those before them are: hidden [N, D] of their rows and embedding
        [N, rank] of the tokens before them -> float32 [N], before any sigmoid."""
        x = torch.cat((hidden.float(), embedding), dim=1)
        return select.project(x, self.confidence_head, rounded=False).squeeze(1)
