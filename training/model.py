"""The trainable model: the architecture of the released checkpoint, batched, with autograd.

Weights of equal shape are stacked over the layers (the optimiser works on whole stacks). `Mode` says how to run: bf16
on a GPU with compiled regions and FlexAttention, or float32 with plain dense masks; dense or selected entries; with or
without the checkpoint's number formats in the loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import regions
from training.attention import build_block_mask, visible, visible_entries
from training.config import NanoConfig
from training.engram import EngramHasher
from training.indexer import candidate_blocks
from training.quant import straight, weight_fp4, weight_fp8, weight_fp8_rows


@dataclass(frozen=True)
class Mode:
    """How one forward pass runs."""

    dtype: torch.dtype = torch.float32
    flex: bool = False  # FlexAttention instead of dense masks
    sparse: bool = False  # attend to the selected entries only
    quant: bool = False  # number formats of weights, activations and caches, straight-through
    teach_rows: int = 0  # query positions per row on which the indexer learns


@dataclass
class Output:
    """Result of `NanoModel.forward`."""

    nll: Tensor | None  # [B, T] float32 loss of each position
    index_loss: Tensor  # scalar
    loads: Tensor  # [layers, experts] tokens per expert
    tail: tuple[Tensor, ...]  # arguments of the head (see regions.head_hidden)
    taps: list[Tensor]  # [N, D] each: mean over the copies of the stream that enters the tapped layers


@dataclass
class _Index:
    """Selection state of one index source and the layers behind it."""

    layer: int
    iq: Tensor
    weights: Tensor
    keys: Tensor  # [B, n, width]
    target: Tensor | float = 0.0
    selected: Tensor | None = None
    masks: dict[int, object] = field(default_factory=dict)


class NanoModel(nn.Module):
    """Text backbone; parameters are float32 masters."""

    def __init__(self, config: NanoConfig, token_map: np.ndarray, compiled: bool = False):
        super().__init__()
        c = self.config = config
        self.run = regions.Regions(compiled)
        self.fixed: dict[str, list[Tensor]] | None = None  # see freeze()
        self.hasher = EngramHasher(c, token_map)
        layers, d, h, hd = c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.head_dim
        f, e, hc = c.moe_intermediate_size, c.n_routed_experts, c.hc_mult
        kv, idx = len(c.kv_source_layer_ids), len(c.index_source_layer_ids)
        engrams = len(c.engram_layer_ids)
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
        self.gated = [i for i, s in enumerate(c.kv_source_layer_ids) if c.ratio(s) == 2]

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape))

        def ones(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(*shape))

        self.embed, self.head, self.norm = zeros(c.vocab_size, d), zeros(c.vocab_size, d), ones(d)
        self.attn_norm, self.ffn_norm = ones(layers, d), ones(layers, d)
        self.wq_a, self.q_norm = zeros(layers, c.q_lora_rank, d), ones(layers, c.q_lora_rank)
        self.wq_b = zeros(layers, h * hd, c.q_lora_rank)
        self.wkv, self.kv_norm = zeros(layers, hd, d), ones(layers, hd)
        self.wo_a = zeros(layers, c.o_groups, c.o_lora_rank, h * hd // c.o_groups)
        self.wo_b = zeros(layers, d, c.o_groups * c.o_lora_rank)
        self.sink = zeros(layers, h)
        self.comp_wkv, self.comp_norm = zeros(kv, hd, d), ones(kv, hd)
        self.comp_wgate = zeros(len(self.gated), hd, d)
        self.idx_wk, self.idx_k_norm = zeros(kv, c.index_head_dim, hd), ones(kv, c.index_head_dim)
        self.idx_wq_b = zeros(idx, c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self.idx_weights = zeros(idx, c.index_n_heads, d)
        self.gate = zeros(layers, e, d)
        self.w13, self.w2 = zeros(layers, e, 2, f, d), zeros(layers, e, d, f)
        self.sw13, self.sw2 = zeros(layers, 2, f, d), zeros(layers, d, f)
        self.hc_fn = zeros(layers, 2, (2 + hc) * hc, hc * d)
        self.hc_base, self.hc_scale = zeros(layers, 2, (2 + hc) * hc), ones(layers, 2, 3)
        self.tables = nn.ParameterList([zeros(rows, c.engram_head_dim) for rows in c.engram_num_embeddings])
        self.engram_wkv = zeros(engrams, (hc + 1) * d, columns)
        self.engram_q, self.engram_k = ones(engrams, hc, d), ones(engrams, hc, d)
        self.register_buffer("gate_bias", torch.zeros(layers, e))
        for name, compressed in (("plain", False), ("yarn", True)):
            freq = torch.from_numpy(c.rope_frequencies(compressed))
            angle = torch.arange(c.max_position_embeddings, dtype=torch.float32)[:, None] * freq
            self.register_buffer(f"cos_{name}", angle.cos(), persistent=False)
            self.register_buffer(f"sin_{name}", angle.sin(), persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int = 0) -> None:
        """Random start: unit-variance inputs stay near unit variance, output projections start at zero."""
        generator = torch.Generator().manual_seed(seed)

        def fill(p: Tensor, std: float) -> None:
            p.copy_(torch.empty(p.shape).normal_(0, std, generator=generator))

        fill(self.embed, 0.7)
        fill(self.head, 0.002)
        for p in (self.wq_a, self.wq_b, self.wkv, self.wo_a, self.comp_wkv, self.idx_wk, self.idx_wq_b):
            fill(p, p.shape[-1] ** -0.5)
        for p in (self.w13, self.sw13, self.engram_wkv):
            fill(p, p.shape[-1] ** -0.5)
        fill(self.w2, 0.02 * self.w2.shape[-1] ** -0.5)
        fill(self.gate, 0.5 * self.gate.shape[-1] ** -0.5)
        fill(self.idx_weights, self.idx_weights.shape[-1] ** -0.5)
        fill(self.hc_fn, 0.3 * self.hc_fn.shape[-1] ** -0.5)
        for table in self.tables:
            fill(table, 0.02)
        hc = self.config.hc_mult
        base = torch.zeros_like(self.hc_base, device="cpu")
        for layer in range(base.shape[0]):
            for sub in range(2):
                base[layer, sub, :hc] = -1.0
                base[layer, sub, (2 * layer + sub) % hc] = 1.0  # each sub-layer favours another copy
                base[layer, sub, hc : 2 * hc] = torch.empty(hc).normal_(0, 0.3, generator=generator)
                base[layer, sub, 2 * hc :] = (4.0 * torch.eye(hc)).flatten()
        self.hc_base.copy_(base)
        self.hc_scale.fill_(0.1)

    # ------------------------------------------------------------------ weights of one pass

    @torch.no_grad()
    def freeze(self, mode: Mode) -> None:
        """Stops learning; every later pass uses the weights cast now, for passes of `mode`."""
        self.requires_grad_(False)
        self.fixed = self.cast_weights(mode)

    def cast_weights(self, mode: Mode) -> dict[str, list[Tensor]]:
        """Per-layer weights in the compute dtype, on the checkpoint's grid when mode.quant."""
        low = {
            name: _cast(getattr(self, name), mode.dtype, weight_fp8 if mode.quant else None)
            for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "idx_wq_b", "sw13", "sw2", "engram_wkv")
        }
        for name in ("w13", "w2"):
            low[name] = _cast(getattr(self, name), mode.dtype, weight_fp4 if mode.quant else None)
        plain = "attn_norm ffn_norm q_norm kv_norm comp_wkv comp_wgate comp_norm idx_wk idx_k_norm idx_weights gate"
        for name in [*plain.split(), "engram_q", "engram_k"]:
            low[name] = getattr(self, name).to(mode.dtype)
        low["w13"], low["sw13"] = low["w13"].flatten(2, 3), low["sw13"].flatten(1, 2)
        for name in ("hc_fn", "hc_base", "hc_scale", "sink"):
            low[name] = getattr(self, name)
        out = {name: list(stack.unbind(0)) for name, stack in low.items()}
        out["tables"] = [straight(t, weight_fp8_rows) if mode.quant else t for t in self.tables]
        return out

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        mode: Mode,
        generator: torch.Generator | None = None,
        taps: Sequence[int] = (),
    ) -> Output:
        """tokens [B, T] int64; targets [B, T] int64 with -100 where nothing is predicted, or None for no loss.

        `taps`: layers whose input is wanted beside (Output.taps, in ascending order of the layers).
        """
        c, run = self.config, self.run
        b, t = tokens.shape
        start = document_start(tokens)
        w = self.fixed or run.call("cast_weights", self.cast_weights, mode)
        rope_of = {r: self._rope(b, t, r) for r in {c.ratio(i) for i in range(c.num_hidden_layers)}}
        masks = {r: self._mask(start, r, mode, None) for r in rope_of if r == 0 or not mode.sparse}
        hashes = self.hasher(tokens, start)
        rows = None
        if mode.teach_rows:
            rows = torch.randperm(t, device=tokens.device, generator=generator)[: mode.teach_rows].sort().values
        state = _State(b, t, mode, start, w, masks, rows)

        x = F.embedding(tokens.flatten(), self.embed).to(mode.dtype)  # [N, D]
        x = x[:, None].expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(b * t, c.hc_mult, device=tokens.device)
        pre[:, 0] = 1
        pending: tuple[Tensor, ...] | None = None  # (y, post, comb) of the sub-layer not yet added to the stream
        loads, tapped = [], []
        for layer in range(c.num_hidden_layers):
            if layer in c.engram_layer_ids:
                if pending is not None:
                    x, pending = run("expand", x, *pending), None
                i = c.engram_layer_ids.index(layer)
                x = run(
                    "engram", x, w["tables"][i], hashes[i], w["engram_wkv"][i], w["engram_q"][i], w["engram_k"][i],
                    c.rms_norm_eps, mode.quant,
                )  # fmt: skip
            for sub, norm in enumerate(("attn_norm", "ffn_norm")):
                mix = (w["hc_fn"][layer][sub], w["hc_base"][layer][sub], w["hc_scale"][layer][sub])
                if pending is None:
                    u, pre, post, logits = run("enter", x, pre, *mix, w[norm][layer], c.rms_norm_eps, c.hc_eps)
                else:
                    x, u, pre, post, logits = run(
                        "step", x, *pending, pre, *mix, w[norm][layer], c.rms_norm_eps, c.hc_eps
                    )
                comb = regions.sinkhorn(logits, c.hc_sinkhorn_iters, c.hc_eps)
                if sub == 0:
                    if layer in taps:
                        tapped.append(x.float().mean(1).to(mode.dtype))
                    y = self._attention(layer, u, state, rope_of[c.ratio(layer)])
                else:
                    y, load = self._experts(layer, u, state)
                    loads.append(load)
                pending = (y, post, comb)
        tail = (x, *pending, pre, self.norm, c.rms_norm_eps)
        nll = None
        if targets is not None:
            nll = run("head_loss", *tail, self.head, targets.flatten(), mode.dtype).view(b, t)
        return Output(nll, self._index_loss(state), torch.stack(loads), tail, tapped)

    def logits(self, tokens: Tensor, mode: Mode) -> Tensor:
        """tokens [B, T] -> float32 logits [B, T, V]."""
        hidden = regions.head_hidden(*self(tokens, None, mode).tail)
        head = self.head if mode.dtype == torch.float32 else self.head.to(mode.dtype)
        return (hidden @ head.t()).float().view(*tokens.shape, -1)

    # ------------------------------------------------------------------ parts

    def _rope(self, b: int, t: int, ratio: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos, sin of the tokens [B*T, dim/2] and of the compressed entries [B*n, dim/2]."""
        cos, sin = (self.cos_yarn, self.sin_yarn) if ratio else (self.cos_plain, self.sin_plain)
        step = max(ratio, 1)
        entries = t // step * step
        return (
            cos[:t].repeat(b, 1), sin[:t].repeat(b, 1), cos[:entries:step].repeat(b, 1), sin[:entries:step].repeat(b, 1)
        )  # fmt: skip

    def _mask(self, start: Tensor, ratio: int, mode: Mode, selected: Tensor | None):
        if mode.flex:
            return build_block_mask(start, ratio, self.config.sliding_window, selected)
        mask = visible(start, ratio, self.config.sliding_window)
        if selected is not None:
            mask = torch.cat([mask[..., : start.shape[1]], selected], -1)
        return mask

    def _attention(self, layer: int, u: Tensor, s: _State, rope: tuple[Tensor, ...]) -> Tensor:
        c, w, run, mode = self.config, s.w, self.run, s.mode
        ratio, b, t, rd = c.ratio(layer), s.b, s.t, c.qk_rope_head_dim
        cos, sin, cos_entry, sin_entry = rope
        qr, q, kv = run(
            "attn_in", u, w["wq_a"][layer], w["q_norm"][layer], w["wq_b"][layer], w["wkv"][layer], w["kv_norm"][layer],
            cos, sin, c.num_attention_heads, rd, c.rms_norm_eps, mode.quant,
        )  # fmt: skip
        keys, mask = kv.view(b, t, -1), s.masks.get(ratio)
        if ratio:
            if layer in c.kv_source_layer_ids:
                i = c.kv_source_layer_ids.index(layer)
                gate = w["comp_wgate"][self.gated.index(i)] if i in self.gated else None
                even = u.view(b, t, -1)[:, : t // ratio * ratio].flatten(0, 1)
                entry, index_key = run(
                    "compress", even, w["comp_wkv"][i], gate, w["comp_norm"][i], w["idx_wk"][i], w["idx_k_norm"][i],
                    cos_entry, sin_entry, rd, c.rms_norm_eps, mode.quant,
                )  # fmt: skip
                s.entries, s.index_keys = entry.view(b, t // ratio, -1), index_key.view(b, t // ratio, -1)
            if layer in c.index_source_layer_ids and (mode.sparse or s.rows is not None):
                self._open_index(layer, ratio, qr, u, s, cos, sin)
            keys = torch.cat([keys, s.entries], 1)
            if mode.sparse:
                mask = s.index[-1].masks[ratio]
        q4 = q.view(b, t, c.num_attention_heads, -1)
        o, lse = run("attend_flex" if mode.flex else "attend_reference", q4.transpose(1, 2), keys, mask)
        if ratio and s.rows is not None:
            lse_rows = lse.transpose(1, 2)[:, s.rows]
            mass = run(
                "teacher_mass", q4[:, s.rows].detach(), lse_rows.detach(), w["sink"][layer].detach(), s.entries.detach()
            )
            s.index[-1].target = s.index[-1].target + mass
        return run("attn_out", o, lse, w["sink"][layer], cos, sin, w["wo_a"][layer], w["wo_b"][layer], rd, mode.quant)

    def _open_index(self, layer: int, ratio: int, qr: Tensor, u: Tensor, s: _State, cos: Tensor, sin: Tensor) -> None:
        """Queries of an index source (no gradient into the backbone) and, when sparse, its selection and mask."""
        c, i = self.config, self.config.index_source_layer_ids.index(layer)
        iq, weights = self.run(
            "index_query", qr.detach(), u.detach(), s.w["idx_wq_b"][i], s.w["idx_weights"][i], cos, sin,
            c.qk_rope_head_dim, s.mode.quant,
        )  # fmt: skip
        index = _Index(layer, iq.view(s.b, s.t, *iq.shape[1:]), weights.view(s.b, s.t, -1), s.index_keys)
        s.index.append(index)
        if not s.mode.sparse:
            return
        source = c.candidate_source_layer_id
        inside = source >= 0 and layer > source
        parts = []
        for n in range(0, s.b, s.chunk):
            cut = slice(n, n + s.chunk)
            allowed = s.candidates[cut] if inside else None
            found, scores = self.run(
                "select_entries", index.iq[cut].detach(), index.weights[cut].detach(), index.keys[cut].detach(),
                s.start[cut], ratio, c.index_topk, allowed,
            )  # fmt: skip
            blocks = None
            if layer == source:
                blocks = candidate_blocks(scores, s.start[cut], ratio, c.candidate_block_size, c.candidate_topk_blocks)
            parts.append((found, blocks))
        index.selected = torch.cat([found for found, _ in parts])
        if layer == source:
            s.candidates = torch.cat([blocks for _, blocks in parts])
        index.masks[ratio] = self._mask(s.start, ratio, s.mode, index.selected)

    def _experts(self, layer: int, u: Tensor, s: _State) -> tuple[Tensor, Tensor]:
        c, w, run = self.config, s.w, self.run
        ids, weights = run(
            "route", u, w["gate"][layer], self.gate_bias[layer], c.num_experts_per_tok, c.routed_scaling_factor
        )
        d = run("dispatch", ids, c.n_routed_experts)
        stacks = (w["w13"][layer], w["w2"][layer], w["sw13"][layer], w["sw2"][layer])
        return run("experts", u, weights, d, *stacks, c.swiglu_limit, s.mode.quant), d.counts

    def _index_loss(self, s: _State) -> Tensor:
        total = torch.zeros((), device=s.start.device)
        if s.rows is None:
            return total
        for index in s.index:
            ratio = self.config.ratio(index.layer)
            seen = visible_entries(s.start, ratio)[:, s.rows]
            total = total + self.run(
                "index_loss", index.iq[:, s.rows], index.weights[:, s.rows], index.keys, index.target, seen
            )
        return total


class _State:
    """What the layers of one pass share."""

    def __init__(self, b: int, t: int, mode: Mode, start: Tensor, w: dict, masks: dict, rows: Tensor | None):
        self.b, self.t, self.mode, self.start, self.w, self.masks, self.rows = b, t, mode, start, w, masks, rows
        self.index: list[_Index] = []
        self.entries = self.index_keys = self.candidates = None
        self.chunk = max(1, 8192 // t)  # sequences scored at once by the indexer


def document_start(tokens: Tensor) -> Tensor:
    """tokens [B, T] -> row position [B, T] of the newest BOS (id 0) at or before each position, 0 without one."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens == 0, position, 0).cummax(1).values


def _cast(p: Tensor, dtype: torch.dtype, grid) -> Tensor:
    return (straight(p, grid) if grid is not None else p).to(dtype)


def parameter_count(config: NanoConfig) -> int:
    """Number of parameters, tables included."""
    model = NanoModel(config, np.zeros(config.vocab_size, dtype=np.int64))
    return sum(math.prod(p.shape) for p in model.parameters())
