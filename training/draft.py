"""The trainable draft model: DSpark stages behind a frozen backbone, same mathematics as the released `mtp.*`.

A block [anchor, noise x 4] stands at positions n .. n+4 of its row, n being the anchor's position. Each of its queries
sees the context rows of positions max(0, n - window) .. n - 1 of its document and the whole block. Query i (from 0)
predicts the token at n + i + 1. Context rows come from the backbone's taps, not from tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import regions
from training.attention import rope
from training.config import NanoConfig
from training.mhc import expand, rms_norm
from training.model import Mode, NanoModel
from training.quant import straight, weight_fp4, weight_fp8

MASKED = -1e30  # finite: a block at the start of its document has no context, and no NaN may come of that


@dataclass
class Drafted:
    """Result of `DraftModel.forward` for R blocks of k queries."""

    hidden: Tensor  # [R * k, D] in the compute dtype: collapsed stream before the norm
    loads: Tensor  # [stages, experts] tokens per expert


class DraftModel(nn.Module):
    """Weights of equal shape are stacked over the stages; parameters are float32 masters."""

    def __init__(self, config: NanoConfig, compiled: bool = False):
        super().__init__()
        c = self.config = config
        self.run = regions.Regions(compiled)
        s, d, h, hd = c.num_nextn_predict_layers, c.hidden_size, c.num_attention_heads, c.head_dim
        f, e, hc, rank = c.moe_intermediate_size, c.dspark_n_routed_experts, c.hc_mult, c.dspark_markov_rank

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape))

        def ones(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(*shape))

        self.main_proj, self.main_norm = zeros(d, len(c.dspark_target_layer_ids) * d), ones(d)
        self.attn_norm, self.ffn_norm = ones(s, d), ones(s, d)
        self.wq_a, self.q_norm = zeros(s, c.q_lora_rank, d), ones(s, c.q_lora_rank)
        self.wq_b = zeros(s, h * hd, c.q_lora_rank)
        self.wkv, self.kv_norm = zeros(s, hd, d), ones(s, hd)
        self.wo_a = zeros(s, c.o_groups, c.o_lora_rank, h * hd // c.o_groups)
        self.wo_b = zeros(s, d, c.o_groups * c.o_lora_rank)
        self.sink = zeros(s, h)
        self.gate = zeros(s, e, d)
        self.w13, self.w2 = zeros(s, e, 2, f, d), zeros(s, e, d, f)
        self.sw13, self.sw2 = zeros(s, 2, f, d), zeros(s, d, f)
        self.hc_fn = zeros(s, 2, (2 + hc) * hc, hc * d)
        self.hc_base, self.hc_scale = zeros(s, 2, (2 + hc) * hc), ones(s, 2, 3)
        self.norm = ones(d)
        self.markov_embed, self.markov_head = zeros(c.vocab_size, rank), zeros(c.vocab_size, rank)
        self.confidence = zeros(1, d + rank)
        self.register_buffer("gate_bias", torch.zeros(s, e))
        freq = torch.from_numpy(c.rope_frequencies(compressed=False))
        # A block at a row's end reaches past it.
        angle = torch.arange(c.max_position_embeddings + c.dspark_block_size, dtype=torch.float32)[:, None] * freq
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    @torch.no_grad()
    def initialise(self, backbone: NanoModel, seed: int = 0) -> None:
        """Starts from the backbone's last layers; taps are averaged, both heads start without a say."""
        s, e = self.gate.shape[:2]
        for name in (
            "attn_norm", "ffn_norm", "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b", "sink", "sw13", "sw2",
            "hc_fn", "hc_base", "hc_scale",
        ):  # fmt: skip
            getattr(self, name).copy_(getattr(backbone, name)[-s:])
        for name in ("gate", "w13", "w2"):
            getattr(self, name).copy_(getattr(backbone, name)[-s:, :e])
        self.norm.copy_(backbone.norm)
        self.main_norm.copy_(backbone.attn_norm[-1])
        taps = len(self.config.dspark_target_layer_ids)
        self.main_proj.copy_(torch.eye(self.norm.shape[0]).repeat(1, taps) / taps)
        generator = torch.Generator().manual_seed(seed)
        self.markov_embed.copy_(torch.empty(self.markov_embed.shape).normal_(0, 0.3, generator=generator))

    def cast_weights(self, mode: Mode) -> dict[str, Tensor]:
        """Weights in the compute dtype, on the checkpoint's grid when mode.quant; what is float32 there stays so."""

        def cast(name: str, grid) -> Tensor:
            p = getattr(self, name)
            return (straight(p, grid) if mode.quant and grid is not None else p).to(mode.dtype)

        low = {n: cast(n, weight_fp8) for n in ("main_proj", "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "sw13", "sw2")}
        low |= {name: cast(name, weight_fp4) for name in ("w13", "w2")}
        low |= {name: cast(name, None) for name in ("main_norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "gate")}
        low["w13"], low["sw13"] = low["w13"].flatten(2, 3), low["sw13"].flatten(1, 2)
        return low | {name: getattr(self, name) for name in ("hc_fn", "hc_base", "hc_scale", "sink")}

    def forward(
        self, taps: Tensor, tokens: Tensor, start: Tensor, anchors: Tensor, embed: Tensor, mode: Mode
    ) -> Drafted:
        """Block pass of R = B * A blocks.

        taps [B, T, m * D], tokens and start [B, T] (see model.document_start), anchors [B, A] row positions of the
        anchor tokens, embed [V, D] of the backbone.
        """
        c, run = self.config, self.run
        b, t = tokens.shape
        k, n = c.dspark_block_size, anchors.numel() * c.dspark_block_size
        rd, eps = c.qk_rope_head_dim, c.rms_norm_eps
        w = self.cast_weights(mode)
        mask = visible_context(start, anchors, c.sliding_window)

        ids = torch.full((*anchors.shape, k), c.dspark_noise_token_id, device=tokens.device)
        ids[..., 0] = tokens.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(k, device=tokens.device)).flatten()
        cos, sin = self.cos[positions], self.sin[positions]
        cos_row, sin_row = self.cos[:t].repeat(b, 1), self.sin[:t].repeat(b, 1)
        main = rms_norm(taps.flatten(0, 1) @ w["main_proj"].t(), w["main_norm"], eps)  # [B * T, D]

        x = F.embedding(ids.flatten(), embed).to(mode.dtype)[:, None].expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(n, c.hc_mult, device=x.device)
        pre[:, 0] = 1
        pending: tuple[Tensor, ...] | None = None
        loads = []
        for s in range(c.num_nextn_predict_layers):
            for sub, norm in enumerate(("attn_norm", "ffn_norm")):
                mix = (w["hc_fn"][s][sub], w["hc_base"][s][sub], w["hc_scale"][s][sub])
                if pending is None:
                    u, pre, post, logits = run("enter", x, pre, *mix, w[norm][s], eps, c.hc_eps)
                else:
                    x, u, pre, post, logits = run("step", x, *pending, pre, *mix, w[norm][s], eps, c.hc_eps)
                comb = regions.sinkhorn(logits, c.hc_sinkhorn_iters, c.hc_eps)
                if sub == 0:
                    context = run.call(
                        "context", context_rows, main, w["wkv"][s], w["kv_norm"][s], cos_row, sin_row, rd, eps
                    )
                    _, q, kv = run(
                        "attn_in", u, w["wq_a"][s], w["q_norm"][s], w["wq_b"][s], w["wkv"][s], w["kv_norm"][s],
                        cos, sin, c.num_attention_heads, rd, eps, False,
                    )  # fmt: skip
                    o = run.call("attend", attend_blocks, q, kv, context.view(b, t, -1), mask, w["sink"][s])
                    y = run.call("attn_out", project_out, o, cos, sin, w["wo_a"][s], w["wo_b"][s], rd)
                else:
                    y, load = self._experts(s, u, w)
                    loads.append(load)
                pending = (y, post, comb)
        return Drafted(run.call("collapse", collapse, x, *pending, pre), torch.stack(loads))

    def _experts(self, s: int, u: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        c, run = self.config, self.run
        ids, weights = run(
            "route", u, w["gate"][s], self.gate_bias[s], c.dspark_num_experts_per_tok, c.routed_scaling_factor
        )
        d = run("dispatch", ids, c.dspark_n_routed_experts)
        stacks = (w["w13"][s], w["w2"][s], w["sw13"][s], w["sw2"][s])
        return run("experts", u, weights, d, *stacks, c.swiglu_limit, False), d.counts

    # ------------------------------------------------------------------ heads

    def base_logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """hidden [n, D], head [V, D] of the backbone -> logits without the Markov term [n, V] float32."""
        return rms_norm(hidden.float(), self.norm, self.config.rms_norm_eps) @ head.t()

    def markov(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """previous tokens [n] -> bias of the logits [n, V] and embedding [n, rank], float32."""
        e = F.embedding(previous, self.markov_embed)
        return e @ self.markov_head.t(), e

    def confidence_logits(self, hidden: Tensor, e: Tensor) -> Tensor:
        """[n, D] before the norm and [n, rank] -> [n] float32, before the sigmoid."""
        return (torch.cat([hidden.float(), e], -1) @ self.confidence.t()).squeeze(-1)


def context_rows(
    main: Tensor, wkv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, rope_dim: int, eps: float
) -> Tensor:
    """Projected taps [N, D] -> keys (= values) [N, d]; the stage's attn_norm has no part in it."""
    return rope(rms_norm(main @ wkv.t(), norm, eps), cos, sin, rope_dim)


def visible_context(start: Tensor, anchors: Tensor, window: int) -> Tensor:
    """start [B, T], anchors [B, A] -> mask [B, A, T]: the window before the anchor, inside its document."""
    p = torch.arange(start.shape[1], device=start.device)
    begin = torch.maximum(start.gather(1, anchors), anchors - window)
    return (p < anchors[..., None]) & (p >= begin[..., None])


def attend_blocks(q: Tensor, kv: Tensor, context: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """q [R * k, H, d], kv [R * k, d], context [B, T, d], mask [B, A, T], sink [H] -> [R * k, H, d].

    Dense over the row on purpose: gathering 128 keys per block would read less, but its gradient is a scatter with
    collisions. Sums are float32 (TF32 on a GPU where torch allows it).
    """
    b, a, t = mask.shape
    h, d = q.shape[1:]
    k = q.shape[0] // (b * a)
    own = kv.float().view(b * a, k, d)
    rows = context.float()
    flat = q.float().view(b, a * k * h, d) * d**-0.5  # rows in the order anchor, query, head
    far = (flat @ rows.transpose(1, 2)).view(b, a, k * h, t)
    far = far.masked_fill(~mask[:, :, None], MASKED)
    near = flat.view(b * a, k * h, d) @ own.transpose(1, 2)  # [R, k * H, k]
    near = near.view(b, a, k * h, k)
    rest = sink.float().repeat(k)[:, None]  # [k * H, 1]
    top = torch.maximum(torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True)), rest).detach()
    far, near = torch.exp(far - top), torch.exp(near - top)
    total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True) + torch.exp(rest - top)
    out = (far.view(b, a * k * h, t) @ rows).view(b, a, k * h, d)
    out = out + (near.view(b * a, k * h, k) @ own).view(b, a, k * h, d)
    return (out / total).to(q.dtype).view(-1, h, d)


def project_out(o: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor, rope_dim: int) -> Tensor:
    """o [N, H, d] -> [N, D]: inverse rotation, grouped low-rank projection."""
    groups = rope(o, cos, sin, rope_dim, inverse=True).reshape(o.shape[0], wo_a.shape[0], -1)
    return torch.einsum("ngk,grk->ngr", groups, wo_a).flatten(1) @ wo_b.t()


def collapse(x: Tensor, y: Tensor, post: Tensor, comb: Tensor, pre: Tensor) -> Tensor:
    """Last stream update and the weighted sum over the copies, without a norm -> [N, D]."""
    x = expand(x, y, post, comb)
    return sum(pre[:, j, None] * x[:, j].float() for j in range(x.shape[1])).to(x.dtype)
