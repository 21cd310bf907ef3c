"""The other twins: each has the name and the arguments of its reference, restated only where they differ."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu.call import call
from deepinfer.kernels.layer_weights import HyperWeights, MoeWeights, OutputWeights, QueryWeights


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


def query_and_window(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    rows = x.shape[0]
    latent, kv = torch.empty(rows, w.rank), torch.empty(rows, w.head_dim)
    q = torch.empty(rows, w.heads, w.head_dim)
    call("query_and_window_f32", w.address, x, cos, sin, rows, latent, q, kv)
    return latent, q, kv


def window_latents(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.contiguous()
    kv = torch.empty(x.shape[0], w.head_dim)
    call("query_and_window_f32", w.address, x, cos, sin, x.shape[0], None, None, kv)
    return kv


def grouped_output(o: Tensor, w: OutputWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """`o` is turned back in place."""
    assert w.packed is not None
    out = torch.empty(o.shape[0], w.packed.width)
    call("grouped_output_f32", w.address, o, cos, sin, o.shape[0], out)
    return out


def moe(x: Tensor, w: MoeWeights, row_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    rows = x.shape[0]
    ids, weights = torch.empty(rows, w.topk, dtype=torch.int64), torch.empty(rows, w.topk)
    scores, out = torch.empty(rows, w.bias.numel()), torch.empty_like(x)
    call("moe_f32", w.address, x, None if row_bias is None else row_bias.contiguous(), rows, ids, weights, scores, out)
    return out, ids, weights, scores


def hyper_step(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Expand (with an update), collapse and norm, new coefficients: -> stream, x, pre, post, comb. Four copies only."""
    rows, copies, width = stream.shape
    expanded = stream if update is None else torch.empty_like(stream)
    x, new_pre, post = torch.empty(rows, width), torch.empty(rows, copies), torch.empty(rows, copies)
    comb = torch.empty(rows, copies, copies)
    y, old_post, old_comb = (None, None, None) if update is None else update
    call("hyper_step_f32", w.address, stream, y, old_post, old_comb, pre, rows, expanded, x, new_pre, post, comb)
    return expanded, x, new_pre, post, comb


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


def top_entries(scores: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    entries = torch.empty(scores.shape[0], k, dtype=torch.int64)
    call("top_entries_f32", scores.contiguous(), allowed, *scores.shape, k, entries)
    return entries


def candidate_mask(scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int) -> Tensor:
    kept = torch.empty(scores.shape, dtype=torch.bool)
    call("candidate_mask_f32", scores.contiguous(), visible.contiguous(), *scores.shape, block_size, topk_blocks, kept)
    return kept


def copy_rows(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """pool [rows, D] of any dtype: pool[targets] = pool[sources]; no row is both."""
    call("copy_rows", pool, targets, sources, targets.numel(), pool.stride(0) * pool.element_size())


def constrain_rows(logits: Tensor, raw: Tensor, rows: Tensor, masks: Tensor) -> None:
    call("constrain_rows_f32", logits, raw, rows.contiguous(), masks.contiguous(), rows.numel(), logits.shape[1])


def table_rows(codes: int, scales: int, ids: Tensor, rows: int, width: int) -> tuple[Tensor, bool]:
    """Rows of a mapped Engram table: addresses of its e4m3 codes [rows, width] and E8M0 scales [rows, width / 32], ids
    int64 [...] -> float32 [..., width], and whether every id was inside the table and every row free of NaN."""
    ids = ids.contiguous()
    out, bad = torch.empty(*ids.shape, width), torch.zeros(1, dtype=torch.int64)
    call("table_rows_f32", codes, scales, ids, ids.numel(), rows, width, out, bad)
    return out, not bool(bad)


def window_rows(
    positions: Tensor, slots: Tensor, starts: Tensor, floors: Tensor, window: int, ring: int, staging: int
) -> Tensor:
    rows = torch.empty(positions.numel(), window, dtype=torch.int64)
    call("window_rows", positions, slots, starts, floors, positions.numel(), window, ring, staging, rows)
    return rows


def entry_rows(tables: Tensor, slots: Tensor, entries: Tensor, per_block: int) -> Tensor:
    rows = torch.empty_like(entries)
    call("entry_rows", tables, tables.shape[1], slots, entries.contiguous(), *entries.shape, per_block, rows)
    return rows


def block_rows(tables: Tensor, slots: Tensor, count: int, per_block: int) -> Tensor:
    rows = torch.empty(slots.numel(), count, dtype=torch.int64)
    call("block_rows", tables, tables.shape[1], slots, slots.numel(), count, per_block, rows)
    return rows


def token_history(
    ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, store: Tensor, lookback: int
) -> Tensor:
    history = torch.empty(ids.numel(), lookback + 1, dtype=torch.int64)
    rows = (ids.contiguous(), positions, slots, starts, ids.numel())
    call("token_history", *rows, store, store.shape[1], lookback, history)
    return history


def markov_chain(anchors: Tensor, embed: Tensor, packed: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """embed bfloat16 [V, rank]; packed: the head."""
    rows, k, vocab = logits.shape
    rank = embed.shape[1]
    drafts, embeddings = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k, rank)
    inputs = (anchors.contiguous(), embed, packed, logits.contiguous())
    call("markov_chain_f32", *inputs, rows, k, vocab, rank, drafts, embeddings)
    return drafts, embeddings


def top_prefixes(values: Tensor, caps: Tensor, count: int) -> Tensor:
    lengths = torch.empty_like(caps)
    call("top_prefixes_f32", values.contiguous(), caps, *values.shape, count, lengths)
    return lengths
