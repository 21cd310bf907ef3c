"""Single-pass manifold-constrained hyper-connections (mHC): the residual stream is `copies` wide (section 2.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[N, from, to] float32 -> nearly doubly stochastic. The first row step is a softmax; columns close each round."""
    c = torch.softmax(logits, dim=-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def hyper_mixes(stream: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """stream [N, copies, D], fn [(2 + copies) * copies, copies * D] float32 -> raw mixes float32 [N, rows].

    One root mean square over all copies, applied after the product.
    """
    v = stream.flatten(1).float()  # [N, copies * D], copy-major
    return F.linear(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)


def hyper_coefficients(
    mixes: Tensor, scale: Tensor, base: Tensor, *, copies: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Raw mixes [N, (2 + copies) * copies] -> pre [N, copies], post [N, copies], comb [N, from, to], float32."""
    pre, post, comb = mixes.split((copies, copies, copies * copies), dim=-1)
    base_pre, base_post, base_comb = base.split((copies, copies, copies * copies))
    pre = torch.sigmoid(pre * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    comb = (comb * scale[2] + base_comb).unflatten(-1, (copies, copies))
    return pre, post, sinkhorn(comb, iterations, eps)


def hyper_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: stream [N, copies, D], pre [N, copies] float32 -> [N, D] in the stream's dtype."""
    return torch.bmm(pre.unsqueeze(1), stream.float()).squeeze(1).to(stream.dtype)


def hyper_expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X_new[k] = post[k] * y + sum_j comb[j, k] * X[j]: stream [N, copies, D], y [N, D] -> [N, copies, D]."""
    mixed = torch.baddbmm(
        post.unsqueeze(-1) * y.float().unsqueeze(1), comb.transpose(1, 2), stream.float()
    )  # [N, copies, D]
    return mixed.to(stream.dtype)
