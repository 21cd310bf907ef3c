"""Sinkhorn normalisation of the 4x4 copy-mixing matrices: plain autograd on the CPU, one Triton kernel each way on a GPU.

The GPU gradient is the one at the fixed point (both marginals equal one): exact when the iteration has converged,
and it needs nothing stored but the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installs
    triton = None


def sinkhorn_reference(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[N, H, H] float32 logits -> doubly normalised matrices, as the architecture defines them."""
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[N, H, H] float32 logits -> [N, H, H]."""
    if logits.is_cuda and triton is not None and logits.shape[-1] == 4:
        return _Sinkhorn.apply(logits.contiguous(), iters, eps)
    return sinkhorn_reference(logits, iters, eps)


if triton is not None:

    @triton.jit
    def _forward_kernel(logits, out, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cell = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        offset = token[:, None, None] * 16 + cell[None, :, :]
        mask = (token < n)[:, None, None]
        x = tl.load(logits + offset, mask=mask, other=0.0)
        x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
        c = x / tl.sum(x, axis=2)[:, :, None] + eps
        c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        for _ in range(ITERS - 1):
            c = c / (tl.sum(c, axis=2)[:, :, None] + eps)
            c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        tl.store(out + offset, c, mask=mask)

    @triton.jit
    def _backward_kernel(out, grad, grad_logits, n, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cell = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        offset = token[:, None, None] * 16 + cell[None, :, :]
        mask = (token < n)[:, None, None]
        c = tl.load(out + offset, mask=mask, other=0.25)
        s = c * tl.load(grad + offset, mask=mask, other=0.0)
        # Subtract row and column terms (alternating projection) until every row and column of the result sums to 0.
        for _ in range(ITERS):
            s = s - c * tl.sum(s, axis=2)[:, :, None]
            s = s - c * tl.sum(s, axis=1)[:, None, :]
        tl.store(grad_logits + offset, s, mask=mask)

    class _Sinkhorn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits: Tensor, iters: int, eps: float) -> Tensor:
            out, n = torch.empty_like(logits), logits.shape[0]
            _forward_kernel[(triton.cdiv(n, 128),)](logits, out, n, eps, ITERS=iters, BLOCK=128)
            ctx.save_for_backward(out)
            ctx.iters = iters
            return out

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
            (out,) = ctx.saved_tensors
            result, n = torch.empty_like(out), out.shape[0]
            _backward_kernel[(triton.cdiv(n, 128),)](out, grad.contiguous(), result, n, ITERS=ctx.iters, BLOCK=128)
            return result, None, None
