"""The tensor regions of a block, each compiled as a whole on a GPU.

Regions see flattened tokens [N, ...], so one compilation serves every layer and every (batch, length) with the same N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training import attention, engram, indexer, mhc, moe
from training.attention import rope
from training.mhc import rms_norm, sinkhorn  # noqa: F401  (re-exported for the model)
from training.quant import act_fp4_e4m3, act_fp4_e8m0, act_fp8, straight


class Regions:
    """Calls a region by name, compiled or plain."""

    def __init__(self, compiled: bool):
        self.compiled = compiled
        self.cache: dict[str, Callable] = {}

    def __call__(self, name: str, *args: Any) -> Any:
        return self.call(name, FUNCTIONS[name], *args)

    def call(self, name: str, function: Callable, *args: Any) -> Any:
        """Runs `function`, compiled once per name when compilation is on."""
        if not self.compiled or name in PLAIN:
            return function(*args)
        if name not in self.cache:
            self.cache[name] = torch.compile(function, dynamic=False)
        return self.cache[name](*args)


def enter(x: Tensor, pre: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, hc_eps: float):
    """Stream -> (sub-layer input [N, D], pre, post, comb logits)."""
    new_pre, post, logits = mhc.coefficients(x, fn, base, scale, eps, hc_eps)
    return mhc.collapse_norm(x, pre, norm, eps), new_pre, post, logits


def step(x: Tensor, y: Tensor, post: Tensor, comb: Tensor, pre: Tensor, fn: Tensor, base: Tensor, scale: Tensor,
         norm: Tensor, eps: float, hc_eps: float):  # fmt: skip
    """Adds the last sub-layer's output to the stream, then `enter` for the next one."""
    x = mhc.expand(x, y, post, comb)
    return x, *enter(x, pre, fn, base, scale, norm, eps, hc_eps)


def inject(
    x: Tensor, table: Tensor, rows: Tensor, wkv: Tensor, qw: Tensor, kw: Tensor, eps: float, quant: bool
) -> Tensor:
    """Engram with its table lookup; rows [N, columns]."""
    e = F.embedding(rows, table).flatten(1).to(x.dtype)
    e = straight(e, act_fp8) if quant else e
    return engram.engram_inject(x, e, wkv, qw, kw, eps)


def attn_in(u: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, kv_norm: Tensor, cos: Tensor,
            sin: Tensor, heads: int, rope_dim: int, eps: float, quant: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """u [N, D] -> qr [N, q_lora], q [N, heads, d] and window KV [N, d], both rotated."""
    u = straight(u, act_fp8) if quant else u
    qr = rms_norm(u @ wq_a.t(), q_norm, eps)
    q = ((straight(qr, act_fp8) if quant else qr) @ wq_b.t()).unflatten(-1, (heads, -1))
    kv = rope(rms_norm(u @ wkv.t(), kv_norm, eps), cos, sin, rope_dim)
    return qr, rope(q, cos, sin, rope_dim), straight(kv, act_fp8) if quant else kv


def compress(x: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, wk: Tensor, k_norm: Tensor, cos: Tensor,
             sin: Tensor, rope_dim: int, eps: float, quant: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [N, D] -> compressed entries [N / r, d] and index keys [N / r, width]; r = 2 with a gate, else 1."""
    if wgate is None:
        c = rms_norm(x @ wkv.t(), norm, eps)
    else:
        pair = x.float().unflatten(0, (-1, 2))
        share = torch.softmax(pair @ wgate.float().t(), 1)
        c = rms_norm((share * (pair @ wkv.float().t())).sum(1).to(x.dtype), norm, eps)
    # The index key learns from its teacher only; the latent belongs to the backbone.
    key = rope(rms_norm(c.detach() @ wk.t(), k_norm, eps), cos, sin, rope_dim)
    entry = rope(c, cos, sin, rope_dim)
    if quant:
        entry, key = straight(entry, act_fp4_e4m3), straight(key, act_fp4_e8m0)
    return entry, key


def attn_out(o: Tensor, lse: Tensor, sink: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor, rope_dim: int,
             quant: bool) -> Tensor:  # fmt: skip
    """o [B, heads, T, d] and lse [B, heads, T] without the sink -> [N, D]."""
    share = torch.sigmoid(lse - sink[:, None])  # what the sink leaves to the keys
    o = (o.float() * share[..., None]).to(o.dtype).transpose(1, 2).flatten(0, 1)  # [N, heads, d]
    o = rope(o, cos, sin, rope_dim, inverse=True)
    groups = o.view(o.shape[0], wo_a.shape[0], -1)
    z = torch.einsum("ngk,grk->ngr", groups, wo_a).flatten(1)
    return (straight(z, act_fp8) if quant else z) @ wo_b.t()


def head_hidden(x: Tensor, y: Tensor, post: Tensor, comb: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Final stream update, collapse and norm -> [N, D]."""
    return mhc.collapse_norm(mhc.expand(x, y, post, comb), pre, norm, eps)


def head_loss(x: Tensor, y: Tensor, post: Tensor, comb: Tensor, pre: Tensor, norm: Tensor, eps: float, head: Tensor,
              targets: Tensor, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Next-token loss of each position [N] float32; 0 where the target is -100."""
    logits = (head_hidden(x, y, post, comb, pre, norm, eps) @ head.to(dtype).t()).float()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


FUNCTIONS: dict[str, Callable] = {
    "enter": enter,
    "step": step,
    "expand": mhc.expand,
    "engram": inject,
    "attn_in": attn_in,
    "compress": compress,
    "attn_out": attn_out,
    "attend_flex": attention.attend_flex,
    "attend_reference": attention.attend_reference,
    "route": moe.route,
    "dispatch": moe.dispatch,
    "experts": moe.experts,
    "index_query": indexer.index_query,
    "index_loss": indexer.index_loss,
    "select_entries": indexer.select_entries,
    "teacher_mass": indexer.teacher_mass,
    "head_loss": head_loss,
}
PLAIN = {"attend_reference"}
