"""DeepSeek-V4.1's text backbone on a flat batch: embedding, blocks, collapse, head (specification section 2).

What is unusual about this model: the residual stream is four copies wide; one latent vector is key and value of all
heads; only a few layers own long-range state, which the layers after them read; n-gram memory is looked up in tables
far larger than the network. The pass knows no sequences: rows of many requests go through together, and everything that
outlives a step is read and written through the cache's view of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.batch import Batch, Chunk
from deepinfer.model.block import Block
from deepinfer.model.config import ModelConfig
from deepinfer.model.draft_model import DraftModel
from deepinfer.model.engram import NgramHash, table_rows
from deepinfer.model.hyper import first_stream, taken_in
from deepinfer.model.indexer import Selection
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource
from deepinfer.model.state import CacheView, ModelCache, Rotations, StepBatch, StepState, Trace
from deepinfer.model.taps import Taps

Memories = dict[int, Any]  # by layer; see TableRows


class DeepseekV41:
    """The model with its weights. Build one with `load_model`; state lives in a cache (`deepinfer.cache.Cache`)."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, numerics: Numerics, tokenizer_file: Path, *, drafts: bool
    ) -> None:
        self.config, self.numerics, self.device = config, numerics, source.device
        self.embed = source.embedding("embed")
        self.blocks = [Block(config, source, layer, numerics) for layer in range(config.num_hidden_layers)]
        self._engrams = {block.layer: block.engram for block in self.blocks if block.engram is not None}
        self.tables = table_rows(self._engrams, config.engram_columns, source.device, numerics.dtype)
        self.norm = source.vector("norm.weight")
        self.head = source.matrix("head")
        self.rotations = Rotations(config, source.device)
        self.draft: DraftModel | None = None
        if drafts:
            self.draft = DraftModel(
                config, source, numerics, embed=self.embed, head=self.head, rotations=self.rotations
            )
        self.hashes = NgramHash(config, tokenizer_file, source.device) if config.engram_layer_ids else None
        self.trace: Trace | None = None  # receives (name, tensor) of every intermediate that the golden trace names

    def forward(self, chunks: Batch | Sequence[Chunk], cache: ModelCache) -> Tensor:
        """One step over chunks of many sequences -> logits float32 [sum of num_logits, vocab], in chunk order.

        Writes the chunks' state into the cache, and into the windows of the draft stages if it keeps any. ValueError,
        before anything is written: a chunk that does not start where its sequence ends, blocks not reserved, a token id
        outside the vocabulary. CheckpointError: an Engram row that was read is damaged; a GPU tells of it a step later.
        """
        self.tables.check()
        batch = chunks if isinstance(chunks, Batch) else Batch.from_chunks(chunks, self.device)
        if not 0 <= int(batch.token_ids.min()) <= int(batch.token_ids.max()) < self.config.vocab_size:
            raise ValueError(f"token ids must be in 0 .. {self.config.vocab_size - 1}")
        view = cache.begin(batch)
        dead = batch.token_ids == self.config.image_token_id
        logits = self.run(view, dead if bool(dead.any()) else None)
        view.commit()
        return logits

    def run(self, view: CacheView, dead: Tensor | None, memories: Memories | None = None) -> Tensor:
        """The pass over the rows of a step that is planned and checked -> logits float32. dead bool [N]: image tokens;
        None = there are none. memories: `recall` of this view; None = to be asked for here. Nothing else here asks the
        device for a value, unless the view does."""
        taps = Taps(self.config.dspark_target_layer_ids, view) if self.draft is not None and view.keeps_drafts else None
        state = StepState(view, self.rotations, dead, self.trace, taps)
        with torch.no_grad(), select.step_threads(self.device, self.numerics.dtype):
            hidden = self._hidden(view.batch, state, memories)  # of the rows that came this far
            logits = self._logits(hidden[state.view.batch.logit_rows])
            if self.draft is not None and taps is not None and len(hidden):
                main_hidden = taps.joined()
                state.trace("main_hidden", main_hidden)
                self.draft.write_context(main_hidden, taps.view)
        return logits

    def recall(self, view: CacheView) -> Memories:
        """What the Engram tables hold for the rows of a step, by layer. Once a step: the view remembers the tokens."""
        take = self.tables.start(self._engram_rows(view, None))
        return {layer: take(layer) for layer in self._engrams}

    def _hidden(self, batch: StepBatch, state: StepState, memories: Memories | None) -> Tensor:
        """Final normalised hidden states [N, D]: of the kept rows where the step narrows."""
        embedded = F.embedding(batch.token_ids, self.embed).to(self.numerics.dtype)
        stream, pre = first_stream(embedded, self.config.hc_mult)
        take = self.tables.start(self._engram_rows(state.view, state)) if memories is None else memories.__getitem__
        selection, update = Selection(), None
        for block in self.blocks:
            layer, memory = block.layer, None
            if layer in self._engrams:
                memory = take(layer)
            stream, pre, update = block(stream, pre, memory, state, selection, update)
            if not len(stream):  # no row of this step goes past the last KV source
                return stream[:, 0]
        stream = taken_in(stream, update)
        state.trace("stream_out", stream)
        hidden = select.hyper_collapse_norm(stream, pre, self.norm, self.config.rms_norm_eps)
        state.trace("final_hidden", hidden)
        return hidden

    def _engram_rows(self, view: CacheView, state: StepState | None) -> dict[int, Tensor]:
        """Table rows of this step's tokens for every Engram layer, int64 [N, columns] each."""
        if self.hashes is None:
            return {}
        live = self.hashes.live(view.batch.token_ids)
        history = view.token_history(live, self.config.engram_max_ngram_size - 1)
        rows = self.hashes.rows(history)
        if state is not None:
            state.trace("engram_hashes", torch.stack(rows, dim=1))
        return dict(zip(self.hashes.layers, rows, strict=True))

    def _logits(self, hidden: Tensor) -> Tensor:
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size, device=self.device)
        return select.project_wide(hidden, self.head)
