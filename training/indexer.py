"""Lightning indexer: scores of compressed entries, top-k selection with candidate blocks, and the teacher's loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.attention import rope, visible_entries
from training.quant import act_fp4_e8m0, act_fp8, straight


def index_query(
    qr: Tensor, x: Tensor, wq_b: Tensor, weights_proj: Tensor, cos: Tensor, sin: Tensor, rope_dim: int, quant: bool
) -> tuple[Tensor, Tensor]:
    """qr [N, q_lora], x [N, D] -> index queries [N, heads, width] and head weights [N, heads] float32."""
    heads = weights_proj.shape[0]
    width = wq_b.shape[0] // heads
    iq = ((straight(qr, act_fp8) if quant else qr) @ wq_b.t()).unflatten(-1, (heads, width))
    iq = rope(iq, cos, sin, rope_dim)
    iq = straight(iq, act_fp4_e8m0) if quant else iq
    return iq, (x @ weights_proj.t()).float() * (width * heads) ** -0.5


def index_scores(iq: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """iq [B, Q, heads, width], weights [B, Q, heads], keys [B, n, width] -> scores [B, Q, n] float32."""
    dots = torch.einsum("bqhd,bjd->bqhj", iq, keys)
    return (F.relu(dots.float()) * weights[..., None]).sum(2)


@torch.no_grad()
def select_entries(
    iq: Tensor, weights: Tensor, keys: Tensor, start: Tensor, ratio: int, top_k: int, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Best `top_k` visible entries of every query.

    iq [B, T, heads, width], weights [B, T, heads], keys [B, n, width]; `allowed` [B, T, n] bool: candidate entries.
    Returns the selection [B, T, n] bool and the masked scores [B, T, n] float32. Ties go to the lower entry on the CPU.
    """
    mask = visible_entries(start, ratio)
    scores = index_scores(iq, weights, keys).masked_fill(~mask, -torch.inf)
    masked = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    k = min(top_k, scores.shape[-1])
    if scores.is_cuda:
        best = masked.topk(k, sorted=False).indices
    else:
        best = masked.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    selected = torch.zeros_like(mask).scatter_(-1, best, True)
    return selected & (masked > -torch.inf), scores


@torch.no_grad()
def candidate_blocks(scores: Tensor, start: Tensor, ratio: int, block: int, top_blocks: int) -> Tensor:
    """Masked scores [B, T, n] of the candidate source -> allowed entries [B, T, n] bool.

    The block of the query's newest entry always counts; then the blocks with the best entry.
    """
    _, t, n = scores.shape
    best = F.pad(scores, (0, -n % block), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)  # [B, T, blocks]
    newest = (torch.arange(1, t + 1, device=scores.device) // ratio - 1) // block
    own = (torch.arange(best.shape[-1], device=scores.device) == newest[:, None]) & (best > -torch.inf)
    best = best.masked_fill(own, torch.inf)
    k = min(top_blocks, best.shape[-1])
    if scores.is_cuda:
        kept = best.topk(k, sorted=False).indices
    else:
        kept = best.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    allowed = torch.zeros_like(own).scatter_(-1, kept, True) & (best > -torch.inf)
    return allowed.repeat_interleave(block, -1)[..., :n]


@torch.no_grad()
def teacher_mass(q: Tensor, lse: Tensor, sink: Tensor, entries: Tensor) -> Tensor:
    """Attention probability of each compressed entry, summed over heads.

    q [B, Q, heads, d], lse [B, Q, heads] (without the sink), sink [heads], entries [B, n, d] -> [B, Q, n] float32.
    """
    logits = torch.einsum("bqhd,bjd->bqhj", q, entries).float() * q.shape[-1] ** -0.5
    return torch.exp(logits - torch.logaddexp(lse, sink)[..., None]).sum(2)


def index_loss(iq: Tensor, weights: Tensor, keys: Tensor, target: Tensor, visible: Tensor) -> Tensor:
    """Mean KL(teacher || softmax of scores) over the queries that see an entry; visible [B, Q, n] bool."""
    scores = index_scores(iq, weights, keys).masked_fill(~visible, -1e9)
    target = torch.where(visible, target, 0)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
    kl = (target * (target.clamp(min=1e-9).log() - F.log_softmax(scores, -1))).sum(-1)
    live = visible.any(-1)
    return (kl * live).sum() / live.sum().clamp(min=1)
