"""The other twins: each has the name and the arguments of its reference, restated only where they differ."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu.call import call


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """reference.attention.sparse_attention; heads a multiple of 4, head size of 16."""
    q = q.contiguous()
    out = torch.empty_like(q)
    width = 0 if kv_indices is None else kv_indices.shape[1]
    window = (window_pool, window_indices.contiguous(), window_indices.shape[1])
    compressed = (kv_pool, None if kv_indices is None else kv_indices.contiguous(), width)
    call("sparse_attention_f32", q, *q.shape, *window, *compressed, sink, float(scale), out)
    return out


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
    """Routed and shared experts together: x [N, D], ids int64 [N, k], weights [N, k], up bfloat16
    [E + 1, 2 I / 16, D, 16] (w1 above w3), down [E + 1, D / 16, I, 16]; the shared expert last. -> float32 [N, D]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    count, inner = up.shape[0] - 1, down.shape[2]
    routes = (ids.contiguous(), weights.contiguous(), ids.shape[1])
    call("experts_packed", x, *x.shape, *routes, up, down, count, inner, float(limit), out)
    return out


def hyper_coefficients(
    stream: Tensor, fn_transposed: Tensor, scale: Tensor, base: Tensor, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes and coefficients in one pass; fn_transposed [4 D, 24]. Four copies only."""
    rows, copies, width = stream.shape
    pre, post = torch.empty(rows, copies), torch.empty(rows, copies)
    comb = torch.empty(rows, copies, copies)
    numbers = (iterations, float(eps), float(norm_eps))
    call("hyper_coefficients_f32", stream, rows, width, fn_transposed, scale, base, *numbers, pre, post, comb)
    return pre, post, comb


def hyper_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the collapsed stream: [N, 4, D] -> [N, D]."""
    out = torch.empty(stream.shape[0], stream.shape[2])
    call("hyper_collapse_norm_f32", stream, pre, weight, stream.shape[0], stream.shape[2], float(eps), out)
    return out


def hyper_expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = torch.empty_like(stream)
    call("hyper_expand_f32", stream, y.contiguous(), post, comb, stream.shape[0], stream.shape[2], out)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    call("rms_norm_f32", x, weight, x.numel() // x.shape[-1], x.shape[-1], float(eps), out)
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, size = x.shape[0], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    turn = -1.0 if inverse else 1.0
    call("apply_rope_f32", x, cos.contiguous(), sin.contiguous(), rows, heads, size, cos.shape[-1], turn, out)
    return out


def index_scores(queries: Tensor, pool: Tensor, key_rows: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """queries [B, T, H, D], pool [rows, D], key_rows int64 [B, M], weights [B, T, H], visible int64 [B, T] ->
    [B, T, M], -inf where not visible."""
    batch, rows, heads, size = queries.shape
    out = torch.empty(batch, rows, key_rows.shape[1])
    inputs = (queries.contiguous(), weights.contiguous(), visible.contiguous(), pool, key_rows.contiguous())
    call("index_scores_f32", *inputs, batch, rows, heads, size, key_rows.shape[1], out)
    return out


def engram_inject(stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float) -> Tensor:
    """Gate and injection in one pass: stream [N, 4, D], kv [N, 5 D] (keys, then the value), dead bool [N] or None."""
    out = torch.empty_like(stream)
    mask = None if dead is None else dead.contiguous()
    call("engram_inject_f32", stream, kv.contiguous(), weight, mask, stream.shape[0], stream.shape[2], float(eps), out)
    return out


def compress_pairs(first: Tensor, second: Tensor, norm: Tensor, eps: float) -> Tensor:
    out = torch.empty(first.shape[0], first.shape[2])
    call("compress_pairs_f32", first.contiguous(), second.contiguous(), norm, *out.shape, float(eps), out)
    return out


def route(
    logits: Tensor, bias: Tensor, *, topk: int, scale: float, normalize: bool, gate_temp: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, count = logits.shape
    ids, weights = torch.empty(rows, topk, dtype=torch.int64), torch.empty(rows, topk)
    scores = torch.empty_like(logits)
    stride = 0 if bias.dim() == 1 else count
    options = (topk, float(scale), int(normalize), float(gate_temp))
    call("route_f32", logits, bias.contiguous(), stride, rows, count, *options, ids, weights, scores)
    return ids, weights, scores


def top_entries(scores: Tensor, k: int) -> Tensor:
    entries = torch.empty(scores.shape[0], k, dtype=torch.int64)
    call("top_entries_f32", scores.contiguous(), *scores.shape, k, entries)
    return entries
