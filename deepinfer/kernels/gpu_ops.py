"""The GPU kernels as the model calls them: `select` comes here for bfloat16 on a GPU.

Rows that are multiplied with FP8 weights are quantised once: what quantised them last is kept with the tensor
(`quantized`), and read by all products that take it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cuda import attention as cuda_attention
from deepinfer.kernels.gpu_weights import FoldedWeight, GroupedWeight, ShuffledExperts, SplitHeads
from deepinfer.kernels.layer_weights import HyperWeights, MoeWeights, OutputWeights, QueryWeights
from deepinfer.kernels.streams import beside, fork
from deepinfer.kernels.triton import (
    attention,
    attention_prefill,
    compressor,
    dense,
    engram,
    grouped_output,
    hyper,
    index_keys,
    indexer,
    markov,
    norm,
    paging,
    records,
    rope,
    router,
    sampling,
)
from deepinfer.kernels.triton.bf16_linear import bf16_linear
from deepinfer.kernels.triton.index_scores_plain import plain_scores
from deepinfer.kernels.triton.moe import routed_experts, shared_expert
from deepinfer.kernels.triton.quantize import Fp8Rows, quantize_rows, rms_norm_quantize
from deepinfer.kernels.weights import DenseWeight

if TYPE_CHECKING:
    from deepinfer.kernels.select.attention import PagedKeys

copy_rows, window_rows, entry_rows, token_history = (
    paging.copy_rows,
    paging.window_rows,
    paging.entry_rows,
    paging.token_history,
)
commit_windows = paging.commit_window
insert_compressed, insert_key_pages = records.insert_compressed, index_keys.insert_keys
put_key_rows, pack_keys = index_keys.put_key_rows, index_keys.pack_keys
hyper_expand, hyper_collapse, hyper_collapse_norm = hyper.hyper_expand, hyper.hyper_collapse, hyper.hyper_collapse_norm
markov_chain, sample = markov.markov_chain, sampling.sample
engram_inject, ngram_rows, compress_pairs = engram.engram_inject, engram.ngram_rows, compressor.compress_pairs
rms_norm, apply_rope = norm.rms_norm, rope.apply_rope
serves_attention, attention_unpacked = attention.serves, attention_prefill.attention_unpacked
unpack_window, unpack_compressed = attention_prefill.unpack_window, attention_prefill.unpack_compressed
index_scores = plain_scores


def quantized(x: Tensor) -> Fp8Rows:
    """Q8 of x [N, K], one scale per row: made now, or by the operation that made x."""
    rows = getattr(x, "folded_rows", None)
    return quantize_rows(x) if rows is None else rows


def keep_quantized(x: Tensor, rows: Fp8Rows) -> Tensor:
    """x, which nobody may change from here on, with its `quantized`."""
    x.folded_rows = rows  # type: ignore[attr-defined]
    return x


def rms_norm_multiplied(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x [N, K], with its `quantized`."""
    return keep_quantized(*rms_norm_quantize(x, weight, eps))


_counted: dict[torch.device, Tensor] = {}


def insert_windows(kv: Tensor, places: Tensor) -> None:
    """kv [N, D] as window records into places uint8 [N, D + D / 32], neighbouring rows of a pool."""
    numbers = _counted.get(kv.device)
    if numbers is None or len(numbers) < len(kv):
        numbers = _counted[kv.device] = torch.arange(max(len(kv), 4096), dtype=torch.int32, device=kv.device)
    records.insert_window(kv, places, numbers[: len(kv)])


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    invariant: bool = False,
) -> Tensor:
    """As `triton.attention.sparse_attention`, in CUDA C++ where that serves and is not slower. invariant: wherever it
    serves, as bits must not depend on the number of rows."""
    fast = invariant or cuda_attention.is_faster(len(q), cuda_attention.tiles_of(window_indices, kv_indices))
    module = cuda_attention if fast and cuda_attention.serves(q, window_pool, kv_pool) else attention
    return module.sparse_attention(
        q, window_pool, window_indices, kv_pool, kv_indices, sink, scale, invariant=invariant
    )


def gains_by_unpacking(q: Tensor, window_pool: Tensor) -> bool:
    """Whether many queries in split order go faster over keys that `unpack_window` and `unpack_compressed` gave: where
    the kernel over records is Triton's."""
    return attention_prefill.unpacks_heads(q) and not cuda_attention.serves(q, window_pool, None)


# -- products -----------------------------------------------------------------------------------------------------


def linear_folded(x: Tensor, weight: FoldedWeight) -> Tensor:
    """x bf16 [N, K], rounded to FP8, times weight^T -> bf16 [N, outputs]."""
    return linear_rows(quantized(x), weight)


def linear_rows(rows: Fp8Rows, weight: FoldedWeight) -> Tensor:
    """Rows [N, K] that are FP8 already times weight^T -> bf16 [N, outputs]."""
    return dense.fp8_linear(rows, weight.codes, weight.factors, invariant=weight.invariant)


def linear_wide(x: Tensor, weight: DenseWeight) -> Tensor:
    """bf16 [N, K] times bf16 [M, K]^T with the sum in float32 -> float32 [N, M]."""
    if weight.invariant:
        return bf16_linear(x, weight.values)
    if x.is_cuda:
        return torch.mm(x, weight.values.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.values.float())


def linear_rounded(x: Tensor, weight: DenseWeight) -> Tensor:
    """The same, rounded once -> bf16 [N, M]."""
    return bf16_linear(x, weight.values, torch.bfloat16) if weight.invariant else F.linear(x, weight.values)


def query_and_window(
    x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor, places: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `select.query_and_window`; queries in split order."""
    assert w.stacked is not None and isinstance(w.wq_b, SplitHeads)
    both, heads = w.stacked.whole, w.wq_b.folded
    merged = dense.split_sums(quantized(x), both.codes, both.factors, invariant=both.invariant)
    latent, rows, window = norm.query_norms(merged, w.q_norm, w.kv_norm, w.eps, cos, sin, places)
    q = dense.fp8_queries(rows, heads.codes, heads.factors, cos, sin, w.head_dim, invariant=heads.invariant)
    return keep_quantized(latent, rows), q, window


def window_latents(x: Tensor, w: QueryWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """As `select.window_latents`."""
    assert isinstance(w.wkv, FoldedWeight)
    return rope.apply_rope(norm.rms_norm(linear_folded(x, w.wkv), w.kv_norm, w.eps), cos, sin)


def project_heads(o: Tensor, w: OutputWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """As `select.grouped_output`, o in split order."""
    assert isinstance(w.wo_a, GroupedWeight) and isinstance(w.wo_b, FoldedWeight)
    weight, groups = w.wo_a.folded, w.wo_a.groups
    rows = grouped_output.grouped_rows(
        o, weight.codes, weight.factors, cos, sin, groups, wide=w.wo_a.wide, invariant=weight.invariant
    )
    return linear_rows(rows, w.wo_b)


def moe(x: Tensor, w: MoeWeights, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `select.moe`, with the sum in bf16, ids int32 and no scores."""
    bank = w.experts
    assert isinstance(bank, ShuffledExperts) and isinstance(w.gate, DenseWeight)
    up, down = bank.shared_up.whole, bank.shared_down
    rows = quantized(x)
    # In a graph beside the choice of experts, whose launches are short and wait for each other: 391 instead of 411 us a
    # layer at 384 rows and 48 experts.
    side = fork(x.device)
    with beside(side):
        matrices = (up.codes, up.factors), (down.codes, down.factors)
        shared = shared_expert(rows, matrices, w.limit, exact=bank.invariant)
    logits = router.gate_logits(x, w.gate.values)
    ids, weights, scores = router.route(
        logits, bias, topk=w.topk, scale=w.scale, normalize=w.normalize, gate_temp=w.temperature
    )
    y = routed_experts(x, ids, weights, bank.routed, w.limit, shared=shared, side=side, exact=bank.invariant)
    return y, ids, weights, scores


def choose_entries(
    queries: tuple[Tensor, Tensor, Tensor, Tensor, float],
    keys: PagedKeys,
    topk: int,
    publish: int,
    candidates: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """As `select.choose_entries`."""
    q, weights, cos, sin, scale = queries
    blocks = None if candidates is None else candidates.shape[1]
    if blocks not in keys.plans:
        keys.plans[blocks] = indexer.plan_step(
            keys.positions,
            keys.slots,
            keys.starts,
            chunks=keys.chunks,
            ratio=keys.ratio,
            topk=topk,
            max_entries=keys.most,
            candidate_blocks=blocks,
        )
    folded = indexer.index_queries(q, weights, cos, sin, scale=scale)
    return indexer.choose_entries(
        folded, keys.pool, keys.tables, keys.per_block, keys.plans[blocks], publish=publish, candidates=candidates
    )


# -- the stream ---------------------------------------------------------------------------------------------------


def hyper_step(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `select.hyper_step`, with Q8 of x beside it."""
    (stream, x, *coefficients), rows = hyper.hyper_step_quantized(stream, update, pre, w)
    pre, post, comb = coefficients
    return stream, keep_quantized(x, rows), pre, post, comb


def serves_stream(stream: Tensor) -> bool:
    """Whether the kernels of the hyper-connections take a stream [N, copies, D]."""
    return stream.shape[1] == hyper.COPIES and stream.shape[2] % hyper.CHUNK == 0
