"""The ends of the network: drafts from their heads, logits under a grammar."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.reference import markov, masks
from deepinfer.kernels.select.backends import cpu_twins, gpu, gpu_twins
from deepinfer.kernels.select.projections import is_bfloat16
from deepinfer.kernels.weights import PackedWeight, Weight


def markov_chain(
    anchors: Tensor, embed: Tensor, head: Weight, logits: Tensor, laws: Any = None
) -> tuple[Tensor, Tensor]:
    """Drafts: anchors int64 [R], embed [V, rank], head [V, rank], logits float32 [R, k, V] without what the token
    before adds -> int64 [R, k], and the embeddings of the tokens before them, float32 [R, k, rank].

    Greedy ones, or on a GPU by `laws` (`triton.sampling_rows.RowLaws`) where rank is a power of two; elsewhere they are
    greedy all the same, which costs drafts and never changes a token."""
    if isinstance(head, PackedWeight) and embed.dtype == torch.bfloat16 and cpu_twins(logits.device, logits.dtype):
        return cpu.markov_chain(anchors, embed, head.packed, logits)
    rank = embed.shape[1]
    served = embed.dtype == torch.bfloat16 and rank >= 16 and rank & (rank - 1) == 0
    if served and is_bfloat16(head) and gpu_twins(logits.device, torch.bfloat16):
        return gpu().markov_chain(anchors, embed, head.values, logits, laws)
    return markov.markov_chain(anchors, embed, head.dense(), logits)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """logits float32 [N, V], raw, ids int64 [N, n] -> float32 [N, n]: natural logs of the ids' probabilities. GPU: by
    the kernel that draws in rounds, so that they are the same bits."""
    if not gpu_twins(logits.device, torch.bfloat16):
        return torch.log_softmax(logits, dim=-1).gather(-1, ids)
    best = gpu().sample(logits)  # whose own is -log of the sum, measured from the largest logit
    return logits.gather(-1, ids) - logits.gather(-1, best.token_ids[:, None]) + best.logprobs[:, None]


def constrain_rows(logits: Tensor, raw: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """`rows` int64 [n] of logits float32 [N, V] in place: -inf where a bit of allowed int32 [n, (V + 31) // 32] is not
    set. raw float32 [N, V]: what a row takes of which nothing would be left."""
    fast = cpu_twins(logits.device, logits.dtype) and logits.is_contiguous() and raw.is_contiguous()
    (cpu if fast else masks).constrain_rows(logits, raw, rows, allowed)
