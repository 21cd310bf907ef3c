"""Picks the implementation of an operation by device, dtype and shape. The reference is always there and always right.

The CPU twins (`kernels/cpu`) serve float32 on a CPU where a C++ compiler is found; everything else runs the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.cpu.build import library
from deepinfer.kernels.cpu.linear import linear_packed
from deepinfer.kernels.cpu.threads import lend_torch_threads
from deepinfer.kernels.layer_weights import HyperWeights, MoeWeights, OutputWeights, QueryWeights
from deepinfer.kernels.reference import (
    attention,
    compressor,
    engram,
    experts,
    hyper,
    indexer,
    markov,
    masks,
    norm,
    paging,
    records,
    rope,
    router,
    selection,
)
from deepinfer.kernels.reference.linear import linear, quantized_linear
from deepinfer.kernels.weights import Experts, PackedWeight, Weight, loose

_reference_only = False


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, every operation runs its reference: for comparisons."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def cpu_twins(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether float32 CPU kernels serve this device and dtype. The first question may compile them."""
    return device.type == "cpu" and dtype == torch.float32 and not _reference_only and library().handle is not None


def explain(device: torch.device, dtype: torch.dtype) -> str:
    """One line for people: what runs here, and why not something faster."""
    if device.type != "cpu":
        return f"reference operations (plain PyTorch) on {device}: GPU kernels are not built yet"
    if dtype != torch.float32:
        return f"reference operations (plain PyTorch): the CPU kernels serve float32, not {dtype}"
    return library().explanation if cpu_twins(device, dtype) else f"reference operations: {library().explanation}"


@contextmanager
def step_threads(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Around a forward pass: the CPU kernels, where they serve it, get all of torch's threads."""
    with lend_torch_threads() if cpu_twins(device, dtype) else nullcontext():
        yield


def _fast(x: Tensor, multiple: int = 8) -> bool:
    return x.shape[-1] % multiple == 0 and cpu_twins(x.device, x.dtype)


def project(x: Tensor, weight: Weight, *, rounded: bool) -> Tensor:
    """x [..., K] times weight [N, K]^T. rounded: the official numerics round x to FP8 first (not in float32)."""
    if isinstance(weight, PackedWeight) and x.dim() == 2 and cpu_twins(x.device, x.dtype):
        return linear_packed(x, weight.packed, weight.rows)
    return (quantized_linear if rounded else linear)(x, weight.dense())


def query_and_window(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D] -> latent query [N, q_lora_rank] (normalised), queries [N, heads, head_dim] and window latents
    [N, head_dim], both rotated. Section 2.4, steps 1 and 2, before the window record is rounded."""
    if w.packed is not None and _fast(x):
        return cpu.query_and_window(x, w, cos, sin)
    latent = rms_norm(project(x, w.wq_a, rounded=True), w.q_norm, w.eps)
    q = project(latent, w.wq_b, rounded=True).unflatten(1, (w.heads, w.head_dim))
    return latent, apply_rope(q, cos, sin), window_latents(x, w, cos, sin)


def window_latents(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """The third result of `query_and_window` alone, the same bits: for rows that leave keys behind and ask nothing."""
    if w.packed is not None and _fast(x):
        return cpu.window_latents(x, w, cos, sin)
    return apply_rope(rms_norm(project(x, w.wkv, rounded=True), w.kv_norm, w.eps), cos, sin)


def grouped_output(o: Tensor, w: OutputWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """o [N, heads, head_dim] (may be overwritten) -> [N, D]: turned back, each group through its wo_a, then wo_b."""
    if w.packed is not None and _fast(o):
        return cpu.grouped_output(o, w, cos, sin)
    return project_groups(apply_rope(o, cos, sin, inverse=True), w)


def project_groups(o: Tensor, w: OutputWeights) -> Tensor:
    """o [N, heads, head_dim] turned back -> [N, D]. wo_a takes its input unrounded even in the official numerics: the
    release dequantises it (section 2.4, step 6)."""
    groups = o.flatten(1).unflatten(1, (len(w.wo_a), -1)).unbind(1)  # [N, heads / groups * head_dim] each
    z = torch.cat([project(x, wo_a, rounded=False) for x, wo_a in zip(groups, w.wo_a, strict=True)], dim=1)
    return project(z, w.wo_b, rounded=True)


def moe(x: Tensor, w: MoeWeights, row_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, D] -> sum of routed and shared experts float32 [N, D], expert ids int64 [N, k] best first, their weights
    float32 [N, k], scores float32 [N, experts]. row_bias float32 [N, experts] replaces the weights' bias."""
    if w.packed is not None and _fast(x):
        return cpu.moe(x, w, row_bias)
    bias = w.bias if row_bias is None else row_bias
    ids, weights, scores = router.route(
        project(x.float(), w.gate, rounded=False),
        bias,
        topk=w.topk,
        scale=w.scale,
        normalize=w.normalize,
        gate_temp=w.temperature,
    )
    return expert_sum(x, ids, weights, w.experts, w.limit), ids, weights, scores


def expert_sum(x: Tensor, ids: Tensor, weights: Tensor, bank: Experts, limit: float) -> Tensor:
    """The chosen experts' outputs and the shared expert's, float32 [N, D], by rising expert number."""
    bank = loose(bank)

    def dense(expert: tuple[Weight, Weight, Weight]) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = expert
        return w1.dense(), w3.dense(), w2.dense()

    routed = experts.routed_experts(x, ids, weights, lambda number: dense(bank.routed[number]), limit)
    return routed + experts.expert_forward(x, *dense(bank.shared), limit, None).float()


def hyper_step(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one sub-layer to the next: expand the stream by the update (output, post, comb) if there is one, collapse it
    with `pre` and norm it, find the new coefficients -> stream [N, copies, D], x [N, D], pre, post, comb."""
    if stream.shape[1] == 4 and _fast(stream):
        return cpu.hyper_step(stream, update, pre, w)
    if update is not None:
        stream = hyper_expand(stream, *update)
    mixes = hyper.hyper_mixes(stream, w.fn.t(), w.norm_eps)
    coefficients = hyper.hyper_coefficients(
        mixes, w.scale, w.base, copies=stream.shape[1], iterations=w.iterations, eps=w.eps
    )
    return stream, hyper_collapse_norm(stream, pre, w.norm, w.norm_eps), *coefficients


def hyper_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(collapse(stream, pre)) * weight: [N, copies, D] -> [N, D]."""
    return rms_norm(hyper_collapse(stream, pre), weight, eps)


def hyper_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: [N, copies, D] -> [N, D]."""
    return hyper.hyper_collapse(stream, pre)


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    fast = _fast(q, 16) and q.shape[1] % 4 == 0
    run = cpu.sparse_attention if fast else attention.sparse_attention
    return run(q, window_pool, window_indices, kv_pool, kv_indices, sink, scale)


def index_scores(queries: Tensor, pool: Tensor, key_rows: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """queries [B, T, H, D], pool [rows, D] (or packed keys), key_rows int64 [B, M], weights [B, T, H], visible int64
    [B, T] -> float32 [B, T, M], -inf where not visible."""
    if _fast(queries):
        return cpu.index_scores(queries, pool, key_rows, weights, visible)
    scores = indexer.index_scores(queries, records.key_values(pool[key_rows]), weights)
    hidden = torch.arange(key_rows.shape[1], device=visible.device) >= visible.unsqueeze(-1)
    return scores.masked_fill(hidden, float("-inf"))


def hyper_expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    run = cpu.hyper_expand if stream.shape[1] == 4 and _fast(stream) else hyper.hyper_expand
    return run(stream, y, post, comb)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (cpu.rms_norm if _fast(x) else norm.rms_norm)(x, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    return (cpu.apply_rope if _fast(x) else rope.apply_rope)(x, cos, sin, inverse=inverse)


def engram_inject(stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float) -> Tensor:
    """stream [N, copies, D], kv [N, (copies + 1) * D] (keys, then the value), weight [copies, D], dead bool [N] or None
    -> the stream with the gated value added to every copy of every live token."""
    copies = stream.shape[1]
    if copies == 4 and _fast(stream):
        return cpu.engram_inject(stream, kv, weight, dead, eps)
    keys, value = kv.unflatten(1, (copies + 1, -1)).split((copies, 1), dim=1)
    gate = engram.engram_gate(stream, keys, weight, eps)
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(1), 0.0)
    return engram.engram_inject(stream, gate, value.squeeze(1))


def compress_pairs(first: Tensor, second: Tensor, norm_weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32 and _fast(first):
        return cpu.compress_pairs(first, second, norm_weight, eps)
    return compressor.compress_pairs(first, second, norm_weight, eps, dtype)


def top_entries(scores: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    """scores float32 [N, M], -inf = not selectable; allowed bool [N, M] or None -> int64 [N, k] the k best positions,
    ascending, -1 = empty."""
    if cpu_twins(scores.device, scores.dtype):
        return cpu.top_entries(scores, k, allowed)
    return selection.top_entries(scores if allowed is None else scores.masked_fill(~allowed, float("-inf")), k)


def candidate_mask(scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int) -> Tensor:
    run = cpu.candidate_mask if cpu_twins(scores.device, scores.dtype) else selection.candidate_mask
    return run(scores, visible, block_size=block_size, topk_blocks=topk_blocks)


def markov_chain(anchors: Tensor, embed: Tensor, head: Weight, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy drafts: anchors int64 [R], embed [V, rank], head [V, rank], logits float32 [R, k, V] without what the
    token before adds -> int64 [R, k], and the embeddings of the tokens before them, float32 [R, k, rank]."""
    if isinstance(head, PackedWeight) and embed.dtype == torch.bfloat16 and cpu_twins(logits.device, logits.dtype):
        return cpu.markov_chain(anchors, embed, head.packed, logits)
    return markov.markov_chain(anchors, embed, head.dense(), logits)


def constrain_rows(logits: Tensor, raw: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """`rows` int64 [n] of logits float32 [N, V] in place: -inf where a bit of allowed int32 [n, (V + 31) // 32] is not
    set. raw float32 [N, V]: what a row takes of which nothing would be left."""
    fast = cpu_twins(logits.device, logits.dtype) and logits.is_contiguous() and raw.is_contiguous()
    (cpu if fast else masks).constrain_rows(logits, raw, rows, allowed)


def _whole_numbers(x: Tensor) -> bool:
    """CPU twins that only count serve every dtype of the model, where they are not switched off."""
    return cpu_twins(x.device, torch.float32)


def window_rows(
    positions: Tensor, slots: Tensor, starts: Tensor, floors: Tensor, window: int, ring: int, staging: int
) -> Tensor:
    run = cpu.window_rows if _whole_numbers(positions) else paging.window_rows
    return run(positions, slots, starts, floors, window, ring, staging)


def entry_rows(tables: Tensor, slots: Tensor, entries: Tensor, per_block: int) -> Tensor:
    run = cpu.entry_rows if _whole_numbers(entries) else paging.entry_rows
    return run(tables, slots, entries, per_block)


def block_rows(tables: Tensor, slots: Tensor, count: int, per_block: int) -> Tensor:
    run = cpu.block_rows if _whole_numbers(tables) else paging.block_rows
    return run(tables, slots, count, per_block)


def token_history(
    ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, store: Tensor, lookback: int
) -> Tensor:
    run = cpu.token_history if _whole_numbers(ids) else paging.token_history
    return run(ids, positions, slots, starts, store, lookback)


def copy_rows(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """pool[targets] = pool[sources] for a pool [rows, D] of any dtype; no row is both a target and a source."""
    if _whole_numbers(pool):
        cpu.copy_rows(pool, targets, sources)
    else:
        pool[targets] = pool[sources]


def table_rows(codes: int, scales: int, ids: Tensor, rows: int, width: int) -> Tensor | None:
    """Rows of a mapped Engram table (addresses of its bytes) as float32 [..., width]; None where `EngramTable.raw_rows`
    has to read them, or to refuse: no CPU kernels, an id outside the table, NaN in a row."""
    if not cpu_twins(ids.device, torch.float32):
        return None
    out, fine = cpu.table_rows(codes, scales, ids, rows, width)
    return out if fine else None
