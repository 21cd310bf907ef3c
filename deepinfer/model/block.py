"""One block: Engram where the layer has one, then attention and experts, each in its hyper-connection (2.2, 2.3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepinfer.model.attention import Attention
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram import Engram
from deepinfer.model.hyper import HyperCoefficients, HyperConnection, Update, taken_in
from deepinfer.model.indexer import Selection
from deepinfer.model.moe import MixtureOfExperts
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import WeightSource
from deepinfer.model.state import StepState


class Block:
    """A layer of the backbone, or a draft stage: layer num_hidden_layers + s."""

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, numerics: Numerics) -> None:
        self.layer, self.prefix = layer, config.layer_prefix(layer)
        prefix = self.prefix
        has_engram = config.engram_index(layer) is not None
        self.engram = Engram(config, source, prefix) if has_engram else None
        self.narrows = layer == max(config.kv_source_layer_ids, default=-1)
        self.hc_attn = HyperConnection(config, source, prefix, "attn")
        self.hc_ffn = HyperConnection(config, source, prefix, "ffn")
        self.attention = Attention(config, source, layer, numerics)
        self.experts = MixtureOfExperts(config, source, layer, numerics)

    def __call__(
        self,
        stream: Tensor,
        pre: Tensor,
        memory: Any,
        state: StepState,
        selection: Selection,
        update: Update | None = None,
    ) -> tuple[Tensor, Tensor, Update | None]:
        """stream [N, copies, D], pre [N, copies] (from the sub-layer before), and what the stream lacks still ->
        the same three for the next block. memory: what Engram's table holds for the rows, where the layer has one (else
        None).

        A sub-layer is collapsed with the pre of the one before it; its own pre serves the next one. At the last KV
        source the rows that end there drop out once they have left their keys: the results are those of `state.kept`.
        """
        name = self.prefix
        if update is not None and (self.engram is not None or state.listens(self.layer)):
            stream, update = taken_in(stream, update), None
        if self.engram is not None:
            assert memory is not None
            state.trace(f"{name}.stream_before_engram", stream)
            stream = self.engram(stream, memory, state.dead)
        state.trace(f"{name}.stream_in", stream)
        state.tap(self.layer, stream)

        stream, x, mixing = self.hc_attn.enter(stream, update, pre)
        kept = state.kept if self.narrows else None
        if kept is None:
            y = self.attention(x, state, selection)
        else:
            y = self.attention.narrowing(x, state, selection)
            stream, x, mixing = stream[kept], x[kept], HyperCoefficients(*(part[kept] for part in mixing))
            if not len(kept):
                return stream, mixing.pre, None
        self._trace_part(state, f"{name}.hc_attn", mixing, f"{name}.attn", x, y)

        stream, x, following = self.hc_ffn.enter(stream, Update(y, mixing.post, mixing.comb), mixing.pre)
        y = self.experts(x, state)
        self._trace_part(state, f"{name}.hc_ffn", following, f"{name}.ffn", x, y)
        return stream, following.pre, Update(y, following.post, following.comb)

    @staticmethod
    def _trace_part(
        state: StepState, hyper_name: str, hyper: tuple[Tensor, ...], name: str, x: Tensor, y: Tensor
    ) -> None:
        for part, value in zip(("pre", "post", "comb"), hyper, strict=True):
            state.trace(f"{hyper_name}_{part}", value)
        state.trace(f"{name}_in", x)
        state.trace(f"{name}_out", y)
